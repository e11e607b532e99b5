"""The tasks of studies on features, by name and seed.

The photo tasks are in `photo_tasks`; the CIFAR-10 tasks are public networks as they are, for which a seed only draws
the calibration images; the digits are a small network for each seed.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from kedge.anchoring import anchor
from kedge.data import Features, ImageSet
from kedge.detectors.extraction import extract
from kedge.errors import NotReadyError
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.models.named import load_weights
from kedge.seeds import seeded
from kedge.studies import sets
from kedge.studies.demo import KNOWN, demo_data
from kedge.studies.openood import IMAGENET_STATISTICS
from kedge.studies.photo_tasks import PHOTOS, VARIANTS, first_of_each, photo_task
from kedge.studies.study import SMOKE_CLASSES, Setting, smoke_data
from kedge.studies.task import Task
from kedge.training import Recipe, recipe, train

DEPTHS = (20, 56)  # of the public CIFAR-10 networks
PER_CLASS = (50, 500)  # of CIFAR-10's 5,000 training images of a class, in variants of its task


def cifar10_task(depth: int, setting: Setting, folder: Path, seed: int, *, per_class: int | None = None) -> Task:
    """CIFAR-10 with a public ResNet, trained on all training images: half of the test images are tested.

    ``per_class`` limits how many of the training images of a class are fitted on.
    """
    name = f"cifar10-resnet{depth}"
    file = next((each for each in setting.weights if f"resnet{depth}." in each.name), None)
    if file is None:
        raise NotReadyError(f"{name} needs weights: pass --weights FILE with resnet{depth} at the end of its name")
    mean, std = IMAGENET_STATISTICS
    net = Classifier(build(f"resnet{depth}"), mean=mean, std=std)
    load_weights(net.network, file)
    net.eval()

    def load(known: str, split: str | None = None) -> ImageSet:
        return sets.load_set(known, side=32, data_dir=setting.data_dir, split=split)

    def read(images: ImageSet) -> Features:
        return extract(net, images, home / images.name, batch_size=256)

    home = folder / name
    held_out, test = read(load("cifar10")).split(0.5, seed=seed)
    far = tuple(map(read, sets.far_from_cifar10(setting.data_dir)))
    near = read(load(sets.NEAR_CIFAR10))
    fit = read(load("cifar10", "train"))
    if per_class is not None:
        assert fit.labels is not None
        fit = fit.subset(first_of_each(fit.labels, [per_class] * len(fit.classes)))
        name = f"{name}, {per_class} a class"
    return Task(name, seed, net, fit, held_out, test, (near,), far)


def digits_task(setting: Setting, folder: Path, seed: int) -> Task:
    """The demo's digits 0 to 7 and its OOD sets, with a network of its own for each seed."""
    data = demo_data(seed=seed)
    near, *far = data.ood
    parts = (data.train, data.calibration, data.test)
    size = {"width": 16, "classes": len(KNOWN), "channels": 1}
    return _trained("digits", parts, (near,), tuple(far), size, recipe("demo", epochs=4), folder, seed)


def toy_task(name: str, setting: Setting, folder: Path, seed: int, *, anchored: bool = False) -> Task:
    """Toy images and a tiny network, anchored or not, for the smoke scale."""
    data = smoke_data(seed + len(name))
    near, far = data.ood
    size = {"width": 4, "classes": SMOKE_CLASSES}
    parts = (data.train, data.held_out, data.test)
    return _trained(name, parts, (near,), (far,), size, setting.recipe(), folder, seed, anchored)


def _trained(
    name: str,
    parts: tuple[Any, Any, Any],
    near: tuple[ImageSet, ...],
    far: tuple[ImageSet, ...],
    size: dict[str, int],
    how: Recipe,
    folder: Path,
    seed: int,
    anchored: bool = False,
) -> Task:
    """A task whose network is trained on its first part."""
    home = folder / name / f"seed-{seed}"
    with seeded(seed):
        network: nn.Module = build("compact", **size)
    if anchored:
        network = anchor(network, seed=seed)
    net = train(network, parts[0], how, seed=seed, directory=home / "network")
    fit, held_out, test = (extract(net, part, home / f"{number}") for number, part in enumerate(parts))
    near_set, far_sets = (
        tuple(extract(net, each, home / f"ood-{each.name}") for each in group) for group in (near, far)
    )
    return Task(name, seed, net, fit, held_out, test, near_set, far_sets)


Loader = Callable[[Setting, Path, int], Task]
TASKS: dict[str, Loader] = {
    **{name: functools.partial(photo_task, name) for name in PHOTOS},
    **{f"cifar10-resnet{depth}": functools.partial(cifar10_task, depth) for depth in DEPTHS},
    "digits": digits_task,
}
VARIED: dict[str, Loader] = {
    **{
        name: functools.partial(photo_task, photos, variant=variant, title=name)
        for name, (photos, variant) in VARIANTS.items()
    },
    **{f"cifar10-resnet20, {n} a class": functools.partial(cifar10_task, 20, per_class=n) for n in PER_CLASS},
}
TOYS: dict[str, Loader] = {name: functools.partial(toy_task, name) for name in ("toy", "toys")}


def tasks(setting: Setting) -> dict[str, Loader]:
    """The tasks of a scale, by name; each takes the setting, the folder of features, and a seed."""
    return TOYS if setting.scale == "smoke" else TASKS
