"""The images of the study of ImageNet's classes, as they are and blurred, and their features by a network.

The known images are validation images of ImageNet with their labels.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.data import Features, ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.detectors.extraction import extract
from kedge.errors import NotReadyError
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.seeds import seeded
from kedge.studies.corruptions import SEVERITIES, corrupt
from kedge.studies.imagenet_c import BLUR
from kedge.studies.photo_tasks import lite0
from kedge.studies.photographs import photos
from kedge.studies.sets import toy_images, toy_ood
from kedge.studies.study import SMOKE_CLASSES, SMOKE_IMAGES, SMOKE_SIDE, some
from kedge.studies.task import Task

NAME, KNOWN, LABELS = "imagenet", "imagenet-others", "imagenet_validation_labels.txt"
# Flowers-102's artichoke, and its flowers that are, or closely resemble, ImageNet's daisy and cardoon.
IN_IMAGENET = {
    "10": "globe thistle",
    "14": "spear thistle",
    "29": "artichoke",
    "41": "barbeton daisy",
    "49": "oxeye daisy",
}
SIDE = 224  # for which the strengths of the blur are; smaller photographs are enlarged
PREPROCESS = Preprocess((3, SIDE, SIDE), crop=0.875)
FITTED, HELD_OUT = 0.25, 0.25  # of the known images; the others are tested
MOST_OTHERS = 500


@dataclass(frozen=True)
class Pictures:
    """The images, and the network as it is.

    Args:
        net: The classifier.
        known: Labelled images of its classes.
        others: Images of other things.
        preprocess: How photographs become inputs; None for toy images, which are inputs already.
    """

    net: Classifier
    known: StreamedSet | ImageSet
    others: tuple[StreamedSet | ImageSet, ...]
    preprocess: Preprocess | None

    def parts(self, seed: int) -> list[Tensor]:
        """Numbers of the known images to fit on, to calibrate on and to test."""
        order = torch.randperm(len(self.known), generator=torch.Generator().manual_seed(seed))
        return list(order.tensor_split([int(FITTED * len(order)), int((FITTED + HELD_OUT) * len(order))]))

    def read(self, net: Classifier, images: Any, home: Path, place: str = "") -> Features:
        """Features of images by a network, in a folder of their own."""
        return extract(net, images, home / (place or images.name), preprocess=self.preprocess)

    def read_others(self, net: Classifier, home: Path) -> tuple[Features, ...]:
        """Features of the images of other things, without labels."""
        return tuple(replace(self.read(net, each, home), labels=None, classes=()) for each in self.others)

    def read_blurred(self, net: Classifier, images: StreamedSet | ImageSet, home: Path) -> dict[int, Features]:
        """Features of images at each level of blur."""
        clean = images if isinstance(images, ImageSet) else gather(images, PREPROCESS, name=images.name)
        return {level: self.read(net, corrupt(clean, BLUR, level), home, f"blur-{level}") for level in SEVERITIES}


@dataclass(frozen=True)
class Images:
    """The features of all images by the network as it is.

    Args:
        pictures: The images.
        known: Labelled images of its classes.
        others: Images of other things, without labels.
        blurred: The known images at each level of blur.
    """

    pictures: Pictures
    known: Features
    others: tuple[Features, ...]
    blurred: Mapping[int, Features]

    def task(self, seed: int) -> Task:
        """The task of a seed; each level of blur of the test images is an OOD set in it."""
        fitted, held_out, tested = self.pictures.parts(seed)
        fit, held, test = (self.known.subset(part) for part in (fitted, held_out, tested))
        blurred = {level: each.subset(tested) for level, each in self.blurred.items()}
        return task_of(NAME, seed, self.pictures.net, (fit, held, test), self.others, blurred)


def task_of(
    name: str,
    seed: int,
    net: Classifier,
    known: tuple[Features, Features, Features],
    others: tuple[Features, ...],
    blurred: Mapping[int, Features],
) -> Task:
    """A task in which each level of blur of the test images is an OOD set."""
    shifted = (replace(each, name=level_name(level), labels=None, classes=()) for level, each in blurred.items())
    return Task(name, seed, net, *known, others[:1], others[1:], tuple(shifted))


def features_of_pictures(pictures: Pictures, folder: Path) -> Images:
    """Features of all images by the network as it is."""
    net, home = pictures.net, folder / ("lite0-224" if pictures.preprocess else "toy-imagenet")
    blurred = pictures.read_blurred(net, pictures.known, home)
    return Images(pictures, pictures.read(net, pictures.known, home), pictures.read_others(net, home), blurred)


def read_pictures(data_dir: Path | None) -> Pictures:
    """EfficientNet-Lite0 and the photographs."""
    known = labelled(photos(KNOWN, data_dir), sources.data_folder(data_dir) / LABELS)
    flowers = photos("flowers", data_dir)
    assert flowers.labels is not None
    unknown = [number for number, name in enumerate(flowers.classes) if name not in IN_IMAGENET]
    flowers = some(flowers.subset(torch.isin(flowers.labels, torch.tensor(unknown))), MOST_OTHERS)
    return Pictures(lite0(), known, (flowers, some(photos("textures", data_dir), MOST_OTHERS)), PREPROCESS)


def labelled(images: StreamedSet, path: Path) -> StreamedSet:
    """Validation images of ImageNet with the labels of a file: a WordNet id for each number in their names."""
    if not path.is_file():
        raise NotReadyError(
            f"{images.name} needs labels in {path}: a WordNet id a line, as the file validation_labels.txt in the "
            "folder datasets/imagenet2012 of the package tensorflow-datasets has them"
        )
    ids = path.read_text(encoding="utf-8").split()
    classes = tuple(sorted(set(ids)))
    numbers = [int(re.findall(r"(\d{8})\.", name)[0]) for name in images.store.names]
    return replace(images, labels=torch.tensor([classes.index(ids[n - 1]) for n in numbers]), classes=classes)


def toy_pictures() -> Pictures:
    """Toy images and a tiny network that is not trained, for the smoke scale."""
    with seeded(0):
        net = Classifier(build("compact", width=4, classes=SMOKE_CLASSES), mean=0.5, std=0.25).eval()
    known = toy_images(SMOKE_IMAGES, "toy", classes=SMOKE_CLASSES, side=SMOKE_SIDE)
    others = tuple(toy_ood(SMOKE_IMAGES, name, side=SMOKE_SIDE) for name in ("toy noise", "toy clouds"))
    return Pictures(net, known, others, None)


def level_name(level: int) -> str:
    """The name of the test images at a level of blur."""
    return f"blur {level}"
