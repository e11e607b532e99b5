"""Methods with passes of their own on a public network: a ResNet-56 of CIFAR-10 as it is, trained by others.

    python benchmarks/field.py --data-dir DATA --weights cifar10_resnet56.safetensors --json docs/results/field.json

The task is `cifar10-resnet56` of `kedge.studies.tasks`, on which `kedge reproduce default` compares the methods that
read features on all images: Tiny-ImageNet (OpenOOD's images for CIFAR-10) is near OOD, five other sets are far OOD.
Here `kedge.compare` runs the other methods on a sample, and some of those again, to show what the sample changes.
"""

import argparse
from pathlib import Path

import kedge
from common import save
from kedge.detectors.registry import make, post_hoc
from kedge.evaluation.result import HEADLINE
from kedge.evaluation.summary import grouped_table
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.models.named import load_weights
from kedge.studies.openood import IMAGENET_STATISTICS
from kedge.studies.sets import NEAR_CIFAR10, far_from_cifar10, load_set
from kedge.studies.study import some
from kedge.threads import use_threads

IMAGES = {"fit": 1000, "calibration": 100, "test": 250, "near": 250, "far, of each set": 50}
ALSO = ("default", "knn", "msp")  # methods that read features


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of all data sets; by default KEDGE_DATA")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    use_threads(options.threads)
    mean, std = IMAGENET_STATISTICS
    net = Classifier(build("resnet56"), mean=mean, std=std)
    load_weights(net.network, options.weights)

    def load(name: str, count: int, split: str | None = None) -> kedge.ImageSet:
        return some(load_set(name, side=32, data_dir=options.data_dir, split=split), count)

    own = [name for name in post_hoc(unanchored=True) if not make(name, net).takes_features]
    tested = load("cifar10", IMAGES["calibration"] + IMAGES["test"])
    table = kedge.compare(
        net,
        load("cifar10", IMAGES["fit"], "train"),
        tested.subset(range(IMAGES["calibration"])),
        test=tested.subset(range(IMAGES["calibration"], len(tested))),
        near=[load(NEAR_CIFAR10, IMAGES["near"])],
        far=[some(each, IMAGES["far, of each set"]) for each in far_from_cifar10(options.data_dir)],
        methods=[*ALSO, *own],
    )
    print(grouped_table(table, HEADLINE).markdown())
    for name, reason in table.left_out.items():
        print(f"left out: {name}: {reason}")
    if options.json:
        facts = table.as_dict()
        results = {
            name: {key: result[key] for key in ("passes_per_image", "milliseconds_per_image")}
            | {group: {metric: by[metric] for metric in HEADLINE} for group, by in result["groups"].items()}
            for name, result in facts["results"].items()
        }
        left_out = dict(table.left_out)
        save(options.json, {"images": IMAGES, "groups": facts["groups"], "results": results, "left out": left_out})


if __name__ == "__main__":
    main()
