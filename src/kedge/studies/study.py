"""A study: the suites behind one table of the paper, one for each in-distribution set, and what they share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kedge.checks import one_of
from kedge.data import ImageSet, StreamedSet, sources
from kedge.detectors import AMP, MSP, ODIN, Energy
from kedge.evaluation.paired import RESAMPLES
from kedge.studies import sets
from kedge.studies.corruptions import corrupt
from kedge.studies.plan import MethodPlan, Need, NetworkPlan, Sets, Suite, SuiteData
from kedge.training import Recipe, recipe

S = TypeVar("S", ImageSet, StreamedSet)

SCALES = ("full", "small", "smoke")
SMOKE_IMAGES = 96
SMOKE_SIDE = 16
SMOKE_CLASSES = 4
SMOKE_COMPARISONS = 20
HELD_OUT = 0.1  # share of the training images, to calibrate on
SMALL_TEST, SMALL_OOD = 2_500, 1_000  # images of a set at the small scale, drawn from all of it

DRAWS = (1001, 1002, 1003)  # seeds of other anchors for the same network, to measure their noise
SHIFTS = (("brightness", 3), ("gaussian_noise", 3))  # corruptions under which known classes stay known

CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
OTHER = {"cifar10": "cifar100", "cifar100": "cifar10"}


@dataclass(frozen=True)
class Setting:
    """The scale, seeds and data of a study.

    Args:
        scale: ``"full"``: the paper's networks, epochs and data. ``"small"``: for two cores and a few hours, with the
            data at hand. ``"smoke"``: tiny generated images and networks, in seconds.
        seeds: One training of everything each.
        data_dir: The folder of all data sets.
        weights: Files of trained weights, one by seed, for studies that can do without training.
        pixels: A folder for test images that are too many for memory, memory-mapped; by default they are in memory.

    Example:
        >>> Setting("smoke").recipe().epochs
        1
    """

    scale: str = "small"
    seeds: tuple[int, ...] = (0,)
    data_dir: Path | None = None
    weights: tuple[Path, ...] = ()
    pixels: Path | None = None

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALES)

    def suite(self, name: str, title: str, **parts: Any) -> Suite:
        """A suite with the setting's seeds; at the smoke scale with few resamples of the paired bootstrap."""
        comparisons = SMOKE_COMPARISONS if self.scale == "smoke" else RESAMPLES
        return Suite(name, title, seeds=self.seeds, comparisons=comparisons, **parts)

    def recipe(self, full: str = "cifar") -> Recipe:
        """The paper's recipe, or a short one."""
        if self.scale == "full":
            return recipe(full)
        if self.scale == "small":
            return Recipe(epochs=6, lr=0.2, nesterov=True, schedule="one-cycle")
        return Recipe(epochs=1, batch=16, lr=0.02, crop=1)

    def network(self, full: str, classes: int, **plan: Any) -> NetworkPlan:
        """The paper's network, or the compact one, of 16 channels on two cores and 4 in tests."""
        extra: dict[str, Any] = dict(plan.pop("arguments", {}))
        if self.scale == "full":
            how = self.recipe("imagenet" if full == "resnet50" else "cifar")
            return NetworkPlan(full, how, {"classes": classes} | extra, **plan)
        size = {"width": 16, "classes": classes} if self.scale == "small" else {"width": 4, "classes": SMOKE_CLASSES}
        return NetworkPlan("compact", self.recipe(), size | extra, **plan)

    def networks(self, full: str, classes: int, members: int = 1) -> dict[str, NetworkPlan]:
        """An anchored network and its unanchored baseline, with more of the latter as members of an ensemble."""
        plans = {"anchored": self.network(full, classes, anchored=True), "unanchored": self.network(full, classes)}
        for number in range(1, members):
            plans[f"unanchored {number}"] = self.network(full, classes, member=1000 * number)
        return plans

    def data(
        self,
        id_name: str,
        ood: Sequence[str],
        *,
        side: int = 32,
        outliers: str | None = None,
        files: bool = True,
        shifts: Sequence[tuple[str, int]] = (),
        most: tuple[int, int] = (SMALL_TEST, SMALL_OOD),
    ) -> Sets:
        """A function that loads the sets for a seed; at the small scale the files at hand are added to the OOD sets.

        ``shifts`` are corruptions with their severity; test images so corrupted become shifted sets.
        ``most`` are the ID images to test on, and to calibrate on, and those of any other set, at the small scale.
        """

        def shifted(data: SuiteData) -> SuiteData:
            clean = some(data.test, most[1]) if self.scale == "small" else data.test
            return replace(data, shifted=tuple(corrupt(clean, name, severity) for name, severity in shifts))

        def load(seed: int) -> SuiteData:
            if self.scale == "smoke":
                return shifted(smoke_data(seed, outliers is not None))
            train: ImageSet | StreamedSet
            if id_name == "imagenet":  # too large for memory
                train = sources.load_dataset(id_name, "train", data_dir=self.data_dir)
            else:
                train = sets.load_set(id_name, side=side, data_dir=self.data_dir, split="train")
            test = sets.load_set(id_name, side=side, data_dir=self.data_dir, folder=self.pixels)
            part, held_out = train.split(1 - HELD_OUT, seed=seed)
            wanted = [*ood, *(sets.FILES if files and self.scale == "small" else ())]
            others = sets.find(wanted, side=side, data_dir=self.data_dir)
            learned = sets.find([outliers] if outliers else [], side=side, data_dir=self.data_dir)
            outside = learned.sets[0] if learned.sets else None
            data = SuiteData(part, held_out, test, others.sets, outside, missing={**others.missing, **learned.missing})
            if self.scale == "small":
                few = tuple(some(images, most[1]) for images in data.ood)
                kept = some(held_out, most[0]) if isinstance(held_out, ImageSet) else held_out
                data = replace(data, held_out=kept, test=some(test, most[0]), ood=few)
            return shifted(data)

        needs = self._needs(id_name, ood, outliers, files, shifts, most)
        return Sets(load, needs, (3, side, side), streamed=id_name == "imagenet")

    def _needs(
        self,
        id_name: str,
        ood: Sequence[str],
        outliers: str | None,
        files: bool,
        shifts: Sequence[tuple[str, int]],
        most: tuple[int, int],
    ) -> tuple[Need, ...]:
        """What the function of `data` reads, apart from generated images."""
        if self.scale == "smoke":
            return ()
        small = self.scale == "small"
        whole = sets.IMAGES[f"{id_name} train"]

        def need(role: str, name: str, most: int, split: str | None = None) -> Need:
            images = sets.IMAGES[f"{name} {split}" if split else name]
            find = partial(sets.read_set, name, data_dir=self.data_dir, split=split)
            return Need(role, name, min(images, most) if small else images, find)

        test = need("test", id_name, most[0])
        train = replace(need("train", id_name, whole, "train"), images=round((1 - HELD_OUT) * whole))
        held_out = whole - train.images
        clean = min(test.images, most[1]) if small else test.images
        return (
            train,
            Need("held out", f"{id_name}, part of the training images", min(held_out, most[0]) if small else held_out),
            test,
            *(need("ood", name, most[1]) for name in (*ood, *(sets.FILES if files and small else ()))),
            *(Need("test", f"{id_name}, {name}", clean) for name, _ in shifts),
            *([need("outliers", outliers, whole)] if outliers else []),
        )


def some(images: S, n: int) -> S:
    """At most n images of a set, the same ones each time."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images if len(images) <= n else images.subset(order[:n])


def smoke_data(seed: int, outliers: bool = False) -> SuiteData:
    """Toy images of four classes, and toy images of none."""
    train, held_out, test = (
        sets.toy_images(SMOKE_IMAGES, name, classes=SMOKE_CLASSES, side=SMOKE_SIDE, seed=seed)
        for name in ("toy train", "toy held out", "toy test")
    )
    ood = tuple(sets.toy_ood(SMOKE_IMAGES, name, side=SMOKE_SIDE, seed=seed) for name in ("toy noise", "toy clouds"))
    outside = sets.toy_ood(SMOKE_IMAGES, "toy outliers", side=SMOKE_SIDE, seed=seed) if outliers else None
    return SuiteData(train, held_out, test, ood, outside)


def draw_label(seed: int) -> str:
    """The label of a row with other anchors."""
    return f"AMP, other anchors, draw {seed}"


def common_rows(**more: MethodPlan) -> dict[str, MethodPlan]:
    """The methods of most tables, and more."""
    return {
        **{kind.__name__: MethodPlan(kind, ("unanchored",), paper=kind.__name__) for kind in (MSP, ODIN, Energy)},
        **more,
        "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
        # Does a gain come from the anchored network, or from tau?
        "Energy (anchored)": MethodPlan(Energy, ("anchored",)),
    }


@dataclass(frozen=True)
class Study:
    """The suites of one table of the paper, one by in-distribution set, with the study's name, title and question."""

    name: str
    title: str
    about: str
    suites: tuple[Suite, ...]
