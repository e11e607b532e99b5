"""A study: the suites behind one table of the paper, one for each in-distribution set, and what they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kedge.checks import one_of
from kedge.data import ImageSet, StreamedSet, sources
from kedge.detectors import AMP, MSP, ODIN, Energy
from kedge.evaluation.paired import RESAMPLES
from kedge.studies import sets
from kedge.studies.corruptions import corrupt
from kedge.studies.plan import MethodPlan, NetworkPlan, Suite, SuiteData
from kedge.training import Recipe, recipe

SCALES = ("full", "small", "smoke")
SMOKE_IMAGES = 96
SMOKE_SIDE = 16
SMOKE_CLASSES = 4
SMOKE_COMPARISONS = 20
HELD_OUT = 0.1  # of the training images, to calibrate on
SMALL_TEST, SMALL_OOD = 2_500, 1_000  # images of a set at the small scale, drawn from all of it

DRAWS = (1001, 1002, 1003)  # seeds of other anchors for the same network, to see their noise
SHIFTS = (("brightness", 3), ("gaussian_noise", 3))  # under which known classes stay known

CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}


@dataclass(frozen=True)
class Setting:
    """What a study is run with.

    Args:
        scale: ``"full"``: the paper's networks, epochs and data. ``"small"``: what two cores do in a few hours with the
            data at hand. ``"smoke"``: tiny made images and networks, in seconds.
        seeds: One training of everything each.
        data_dir: The folder of all data sets.

    Example:
        >>> Setting("smoke").epochs(200)
        1
    """

    scale: str = "small"
    seeds: tuple[int, ...] = (0,)
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALES)

    @property
    def comparisons(self) -> int:
        """Resamples of the paired bootstrap: a few where nothing is to be learned from it."""
        return SMOKE_COMPARISONS if self.scale == "smoke" else RESAMPLES

    def epochs(self, full: int, small: int = 6) -> int:
        """The number of epochs at this scale."""
        return {"full": full, "small": small, "smoke": 1}[self.scale]

    def recipe(self, full: str = "cifar") -> Recipe:
        """The paper's recipe, or a short one."""
        if self.scale == "full":
            return recipe(full)
        if self.scale == "small":
            return Recipe(epochs=self.epochs(200), lr=0.2, nesterov=True, schedule="one-cycle")
        return Recipe(epochs=1, batch=16, lr=0.02, crop=1)

    def network(self, full: str, classes: int, **plan: Any) -> NetworkPlan:
        """The paper's network, or the compact one, of 16 channels on two cores and 4 in tests."""
        extra: dict[str, Any] = dict(plan.pop("arguments", {}))
        if self.scale == "full":
            how = recipe("imagenet") if full == "resnet50" else recipe("cifar")
            return NetworkPlan(full, how, {"classes": classes} | extra, **plan)
        width = 16 if self.scale == "small" else 4
        known = classes if self.scale == "small" else SMOKE_CLASSES
        return NetworkPlan("compact", self.recipe(), {"width": width, "classes": known} | extra, **plan)

    def twins(self, full: str, classes: int, **plan: Any) -> dict[str, NetworkPlan]:
        """An anchored network and its plain twin."""
        return {
            "anchored": self.network(full, classes, anchored=True, **plan),
            "plain": self.network(full, classes, **plan),
        }

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
    ) -> Callable[[int], SuiteData]:
        """A function that loads the sets for a seed; at the small scale the files at hand are added to the OOD sets.

        ``shifts`` are corruptions with their severity; test images so corrupted become sets of shifted images.
        ``most`` are the ID images to test on, and to calibrate on, and those of any other set, at the small scale.
        """

        def shifted(data: SuiteData) -> SuiteData:
            clean = _some(data.test, most[1]) if self.scale == "small" else data.test
            return replace(data, shifted=tuple(corrupt(clean, name, severity) for name, severity in shifts))

        def load(seed: int) -> SuiteData:
            if self.scale == "smoke":
                return shifted(smoke_data(seed, outliers is not None))
            train: ImageSet | StreamedSet
            if id_name == "imagenet":  # too large for memory
                train = sources.load_dataset(id_name, "train", data_dir=self.data_dir)
            else:
                train = sets.load(id_name, side=side, data_dir=self.data_dir, split="train")
            test = sets.load(id_name, side=side, data_dir=self.data_dir)
            part, held_out = train.split(1 - HELD_OUT, seed=seed)
            wanted = [*ood, *(sets.FILES if files and self.scale == "small" else ())]
            found = sets.find(wanted, side=side, data_dir=self.data_dir)
            beside = sets.find([outliers] if outliers else [], side=side, data_dir=self.data_dir)
            outside = beside.sets[0] if beside.sets else None
            missing = {**found.missing, **beside.missing}
            if self.scale == "full":
                return shifted(SuiteData(part, held_out, test, found.sets, outside, missing=missing))
            few = tuple(_some(images, most[1]) for images in found.sets)
            kept = _some(held_out, most[0]) if isinstance(held_out, ImageSet) else held_out
            return shifted(SuiteData(part, kept, _some(test, most[0]), few, outside, missing=missing))

        return load


def _some(images: ImageSet, n: int) -> ImageSet:
    """So many images of a set, the same ones each time; all where there are no more."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images if len(images) <= n else images.subset(order[:n])


def smoke_data(seed: int, outliers: bool = False) -> SuiteData:
    """Made images of four classes, and made images of none.

    Example:
        >>> [s.name for s in smoke_data(0).ood]
        ['made noise', 'made clouds']
    """
    train, held_out, test = (
        sets.made(SMOKE_IMAGES, name, classes=SMOKE_CLASSES, side=SMOKE_SIDE, seed=seed)
        for name in ("made train", "made held out", "made test")
    )
    ood = tuple(sets.made_ood(SMOKE_IMAGES, name, side=SMOKE_SIDE, seed=seed) for name in ("made noise", "made clouds"))
    beside = sets.made_ood(SMOKE_IMAGES, "made outliers", side=SMOKE_SIDE, seed=seed) if outliers else None
    return SuiteData(train, held_out, test, ood, beside)


def draw_label(seed: int) -> str:
    """What the row of other anchors is called."""
    return f"AMP, other anchors, draw {seed}"


def common(*more: tuple[str, MethodPlan]) -> dict[str, MethodPlan]:
    """The methods of most tables, and more."""
    return {
        "MSP": MethodPlan(MSP, ("plain",), paper="MSP"),
        "ODIN": MethodPlan(ODIN, ("plain",), paper="ODIN"),
        "Energy": MethodPlan(Energy, ("plain",), paper="Energy"),
        **dict(more),
        "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
        # Where does a gain come from: the anchored network, or the temperature?
        "Energy (anchored)": MethodPlan(Energy, ("anchored",)),
    }


@dataclass(frozen=True)
class Study:
    """The suites of one table of the paper.

    Args:
        name: For the command.
        title: Of the report.
        about: What is studied, in a sentence.
        suites: By in-distribution set.
    """

    name: str
    title: str
    about: str
    suites: tuple[Suite, ...]
