"""A few images for a dry run of a suite: of its own sets where they are here, and otherwise made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.data import ImageSet, Preprocess, StreamedSet, gather
from kedge.data.streamed import Files
from kedge.errors import KedgeError
from kedge.studies.plan import Need, Sets, Suite, SuiteData

FILE_SIZE, QUALITY = (500, 375), 90  # of a made photograph on disk, about as most of ImageNet's
FILES = 8  # of them, each listed many times


@dataclass(frozen=True)
class Wanted:
    """What a suite reads, and what of it is here.

    Args:
        needs: All sets.
        found: One set for each role that has some.
        missing: By name, how to get the others.
        shape: Of the network's inputs.
        streamed: Whether training and held-out images stay on disk.
    """

    needs: tuple[Need, ...]
    found: Mapping[str, ImageSet | StreamedSet]
    missing: Mapping[str, str]
    shape: tuple[int, ...]
    streamed: bool

    def images(self, *roles: str) -> int:
        """The number of images of some roles."""
        return sum(need.images for need in self.needs if need.role in roles)


def wanted(suite: Suite, report: Callable[[str], None]) -> Wanted:
    """Look for the sets of a suite."""
    if isinstance(suite.data, Sets) and suite.data.needs:
        needs, shape, streamed = suite.data.needs, suite.data.shape, suite.data.streamed
    else:  # a suite that declares none has small sets
        data = suite.data(suite.seeds[0])
        needs, shape, streamed = _needs_of(data), tuple(data.test.images.shape[1:]), False
    found: dict[str, ImageSet | StreamedSet] = {}
    missing: dict[str, str] = {}
    for need in needs:
        if need.find is not None and need.name not in missing:
            report(f"looking for {need.name}")
            try:
                images = need.find()
            except KedgeError as error:
                missing[need.name] = str(error)
            else:
                found.setdefault(need.role, images)
    return Wanted(needs, found, missing, shape, streamed)


def _needs_of(data: SuiteData) -> tuple[Need, ...]:
    parts: list[tuple[str, Any]] = [("train", data.train), ("held out", data.held_out), ("test", data.test)]
    parts += [("ood", each) for each in data.ood] + [("test", each) for each in data.shifted]
    parts += [] if data.outliers is None else [("outliers", data.outliers)]
    return tuple(Need(role, each.name, len(each), partial(_itself, each)) for role, each in parts)


def _itself(images: Any) -> Any:
    return images


def few_images(sets: Wanted, counts: Mapping[str, int], classes: int, folder: Path) -> SuiteData:
    """So many images of each role, by name; those for training are files in a folder where the suite streams them."""
    known = _part(sets, "train", counts["train"] + counts["held out"], classes)
    every = torch.arange(len(known))
    learned: ImageSet | StreamedSet = known.subset(every[: counts["train"]], name="train")
    if sets.streamed:
        learned = _as_files(counts["train"], classes, folder)
    outliers = _part(sets, "outliers", counts["outliers"], 0) if sets.images("outliers") else None
    test = _part(sets, "test", counts["test"], classes)
    return SuiteData(learned, known.subset(every[counts["train"] :], name="held out"), test, (), outliers)


def _part(sets: Wanted, role: str, count: int, classes: int) -> ImageSet:
    """Images of a role, evenly spaced over its set, or made; with labels if there are classes."""
    shape, images = sets.shape, sets.found.get(role)
    labels = _labels(count, classes) if classes else None
    if images is None or len(images) < count:
        generator = torch.Generator().manual_seed(len(role))
        pixels = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
        return ImageSet(pixels, labels, name=role)
    few = images.subset(torch.linspace(0, len(images) - 1, count).long())
    if not isinstance(few, ImageSet) or few.images.shape[1:] != shape:
        few = gather(few, Preprocess(shape))
    return ImageSet(few.images, labels, name=role)


def _labels(count: int, classes: int) -> Tensor:
    """Labels by pairs: methods that see how images of one class vary need two of it."""
    return torch.arange(count) // 2 % classes


def _as_files(count: int, classes: int, folder: Path) -> StreamedSet:
    """Made photographs on disk: noise is coarse, so that its files are as large as those of photographs."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    names: Sequence[str] = [f"{number}.jpg" for number in range(FILES)]
    for name in names:
        coarse = rng.integers(0, 256, (FILE_SIZE[1] // 3, FILE_SIZE[0] // 3, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(FILE_SIZE, Image.Resampling.BICUBIC).save(folder / name, quality=QUALITY)
    listed = tuple(names[number % FILES] for number in range(count))
    return StreamedSet(Files(folder, listed), _labels(count, classes), name="train")
