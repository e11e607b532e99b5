"""A dry run of a suite: is its data here, and what do hours, memory and disk come to on this machine?

A few real steps of every training and one batch of every row are run, with the suite's own networks, on images of the
true size; where a set is missing they are made. Everything is scaled up by the numbers of images and epochs.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from kedge.data import Features, Preprocess
from kedge.detectors import Detector
from kedge.errors import KedgeError
from kedge.evaluation import TextTable
from kedge.models.classifier import Classifier
from kedge.provenance import processor
from kedge.studies.plan import NetworkPlan, Suite
from kedge.studies.run import SuiteRun
from kedge.studies.stand_ins import Wanted, few_images, wanted
from kedge.training import Recipe
from kedge.training.losses import Loss

STEPS = 6  # of a training; the first is not timed, and five are a cycle of the corruption of anchors
STEP_PIXELS, FEWEST = 2**14, 4  # a step on a processor has at most so many pixels, but at least this many images
CALIBRATE = 24  # images, of which some methods learn from half
ROWS = 1024  # features that a row is timed on: those of a few images, repeated with some noise
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Line:
    """What one training, one row, or one pass for several rows takes.

    Args:
        name: Of the network, or label of the row.
        images: That it passes over in all.
        milliseconds: For one of them.
        gigabytes: Of memory, at the batch of the whole run.
        note: Why it was not measured.
    """

    name: str
    images: int
    milliseconds: float = 0.0
    gigabytes: float = 0.0
    note: str = ""

    @property
    def hours(self) -> float:
        """For all images."""
        return self.images * self.milliseconds / 3.6e6

    def cells(self, kind: str) -> tuple[str, ...]:
        """As a row of a table."""
        if self.note:
            return (self.name, kind, f"{self.images:,}", "", self.note, "")
        memory = f"{self.gigabytes:,.1f}" if self.gigabytes else ""
        return (self.name, kind, f"{self.images:,}", f"{self.milliseconds:,.3g}", f"{self.hours:,.2f}", memory)


@dataclass
class DryRun:
    """The outcome; memory and disk in bytes, by what they are for."""

    title: str
    sets: Wanted
    trainings: list[Line] = field(default_factory=list)
    scorings: list[Line] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)

    @property
    def hours(self) -> tuple[float, float]:
        """Of training and of scoring."""
        training, scoring = (sum(line.hours for line in lines) for lines in (self.trainings, self.scorings))
        return training, scoring

    def tables(self) -> tuple[TextTable, ...]:
        """The sets; trainings and scorings; and the sums."""
        sets = []
        for need in self.sets.needs:
            here = "no" if need.name in self.sets.missing else "" if need.find is None else "yes"
            sets.append((need.name, need.role, f"{need.images:,}", here))
        lines = [line.cells("training") for line in self.trainings] + [line.cells("row") for line in self.scorings]
        hours = dict(zip(("training", "scoring"), self.hours, strict=True))
        giga = {
            f"GB of {kind}": {what: value / 1e9 for what, value in parts.items()}
            for kind, parts in (("memory", self.memory), ("disk", self.disk))
        }
        sums = [
            (what, f"{sum(parts.values()):,.1f}", "; ".join(f"{name} {value:,.1f}" for name, value in parts.items()))
            for what, parts in {"hours": hours, **giga}.items()
        ]
        machine = f"{processor()}, {torch.get_num_threads()} threads"
        machine += f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", in processor time"
        caption = (
            f"On {machine}. A row's images are those that it learns from, calibrates on and scores; what a method that "
            "searches its training images, such as KNN, takes for them all is not in it."
        )
        return (
            TextTable(f"What {self.title} reads.", ("set", "role", "images", "here"), tuple(sets)),
            TextTable(caption, ("", "kind", "images", "ms an image", "hours", "GB"), tuple(lines)),
            TextTable("Beside the data sets themselves.", ("for one seed", "in all", "of which"), tuple(sums)),
        )


def dry_run(suite: Suite, how: Mapping[str, Any], report: Callable[[str], None]) -> DryRun:
    """Measure what a suite would take.

    Args:
        suite: With its networks, rows and sets.
        how: More arguments of `kedge.train`, as for `SuiteRun`.
        report: Called with what is being done.
    """
    outcome = DryRun(suite.title, wanted(suite, report))
    with TemporaryDirectory(prefix="kedge-dry-run-") as scratch:
        _Measuring(suite, outcome, how, Path(scratch), report).run()
    return outcome


class _Measuring:
    """The steps of a dry run in a folder that is deleted afterwards."""

    def __init__(
        self, suite: Suite, outcome: DryRun, how: Mapping[str, Any], scratch: Path, report: Callable[[str], None]
    ) -> None:
        self.suite, self.outcome, self.sets, self.report = suite, outcome, outcome.sets, report
        self.scratch = scratch
        self.same = _same_networks(suite)
        plans = {name: suite.networks[name] for name in dict.fromkeys(self.same.values())}
        shape = self.sets.shape
        on_gpu = torch.cuda.is_available() and how.get("accelerator") != "cpu"
        most = max(FEWEST, STEP_PIXELS // prod(shape[1:]))
        self.batch = {name: (_batch(plan) if on_gpu else min(_batch(plan), most)) for name, plan in plans.items()}
        self.classes = max(int(plan.arguments.get("classes", 2)) for plan in plans.values())
        steps = STEPS * max(self.batch.values())
        groups = max(int(plan.prepare.get("groups", 0)) for plan in plans.values())
        counts = {"train": steps, "held out": CALIBRATE, "test": most, "outliers": max(steps, groups)}
        self.few = few_images(self.sets, counts, self.classes, scratch / "files")
        self.times: dict[str, list[float]] = {}
        short = {  # each with a seed of its own: plans that differ in their length alone would share one training
            name: replace(plan, share=1.0, recipe=self._few_steps(plan.recipe, self.batch[name]), seed=seed)
            for seed, (name, plan) in enumerate(plans.items())
        }
        rows = {
            label: replace(row, networks=tuple(self.same[name] for name in row.networks))
            for label, row in suite.methods.items()
        }
        self.runs = SuiteRun(
            replace(suite, networks=short, methods=rows, draws={}, leads=(), data=lambda _: self.few), scratch,
            networks=scratch / "networks", training=how,
            on_training=lambda name, _: self.times.setdefault(name, []).append(_now()),
        )  # fmt: skip

    @staticmethod
    def _few_steps(recipe: Recipe, batch: int) -> Recipe:
        """One epoch of small batches; its rate is low, or noise and few images would make a training diverge."""
        return replace(recipe, epochs=1, milestones=(), batch=batch, lr=recipe.lr / 1000)

    def run(self) -> None:
        """Fill in the outcome."""
        sizes = {name: self._train(name) for name in self.batch}
        self._score()
        outcome, pixels = self.outcome, prod(self.sets.shape)
        outcome.disk["networks"] = sum(sizes[name] for name in self.same.values())
        tested = self.sets.images("test", "ood", "outliers") * pixels
        if self.sets.streamed:
            outcome.disk["test images"] = tested
        else:  # training images are read whole and then divided
            outcome.memory["images"] = tested + 2 * self.sets.images("train", "held out") * pixels
        lines = (*outcome.trainings, *outcome.scorings)
        outcome.memory = {"network and batch": 1e9 * max(line.gigabytes for line in lines)} | outcome.memory

    def _train(self, name: str) -> float:
        """A few steps of a training, or of several alike; returns the bytes of a network on disk."""
        plan, sets = self.suite.networks[name], self.sets
        self.report(f"training {name}")
        with _peak() as memory:
            net = self.runs.network(name, 0)
        if plan.weights is not None:
            return 0.0
        milliseconds = 1000 * fmean(np.diff(self.times[name])) / self.batch[name]
        total = sets.images("train")
        milliseconds += self._each_epoch(plan, net) * (total + sets.images("outliers")) / total
        weights = 2.0 * sum(p.numel() * p.element_size() for p in net.parameters())  # gradients and momentum
        activations = max(0.0, memory[1] - memory[0] - weights) * _batch(plan) / self.batch[name]
        gigabytes = (memory[0] + weights + activations) / 1e9
        images = round(total * plan.share) * plan.recipe.epochs
        alike = [other for other, kind in self.same.items() if kind == name]
        self.outcome.trainings += [Line(other, images, milliseconds, gigabytes) for other in alike]
        files = (self.scratch / "networks").rglob("*")
        return float(max((each.stat().st_size for each in files if each.is_file()), default=0))

    def _each_epoch(self, plan: NetworkPlan, net: Classifier) -> float:
        """Milliseconds for an image of what a loss computes before each epoch."""
        loss, few = plan.training_loss(), self.few
        if loss is None or type(loss).begin_epoch is Loss.begin_epoch:
            return 0.0
        last, images = plan.recipe.epochs - 1, len(few.train) + len(few.outliers or ())
        seconds = _seconds(lambda: loss.begin_epoch(net, few.train, few.outliers, Preprocess(self.sets.shape), last))
        return 1000 * seconds / images

    def _score(self) -> None:
        """One batch of every row, and one pass through each network whose features rows share."""
        sets, outcome = self.sets, self.outcome
        scored = sets.images("held out", "test", "ood")
        passes: dict[str, Line] = {}
        features = 0.0
        for label, row in self.runs.suite.methods.items():
            self.report(f"scoring {label}")
            learned = 0
            try:
                detector = self.runs.unfitted(label, 0)
                learned = sets.images("train") if detector.reads_train else 0
                with _peak() as memory:
                    seconds, read = self._time_row(label, detector)
            except (KedgeError, RuntimeError) as error:
                outcome.scorings.append(Line(label, learned + scored, note=f"not measured: {error}"))
                continue
            mean = (learned * seconds["fit"] + scored * seconds["score"]) / (learned + scored)
            outcome.scorings.append(Line(label, learned + scored, 1000 * mean, memory[1] / 1e9))
            if not isinstance(read, Features):
                continue
            images = scored + (0 if detector.anchored else learned)
            known = passes.get(read.network)
            if known is None or known.images < images:
                alone = _seconds(partial(detector.net, detector.net.as_input(self.few.test.images)))
                name = f"pass of {row.networks[0]} for its rows"
                passes[read.network] = Line(name, images, 1000 * alone / len(self.few.test))
                features += (images - (known.images if known else 0)) * _bytes(read)
        outcome.scorings += passes.values()
        where = outcome.disk if self.suite.extract else outcome.memory
        where["features"] = features
        one_row = sets.images("test", "ood") * (2 * self.classes * 4 + 40)  # logits, probabilities, and a few numbers
        outcome.disk["scores"] = one_row * len(self.suite.methods)
        outcome.memory["scores of a row, and a copy"] = 2 * one_row

    def _time_row(self, label: str, detector: Detector) -> tuple[dict[str, float], Any]:
        """Seconds for an image to fit and to score; and the test images as the row reads them."""
        few, preprocess = self.few, Preprocess(self.sets.shape)
        train = self.runs.read(label, detector, 0, few.train) if detector.reads_train else few.train
        train = _repeated(train, detector.net)
        fit = _seconds(lambda: detector.fit(train, preprocess=preprocess)) / len(train)
        detector.calibrate(self.runs.read(label, detector, 0, few.held_out))
        read = self.runs.read(label, detector, 0, few.test)
        test = _repeated(read, detector.net)
        return {"fit": fit, "score": _seconds(lambda: detector(test)) / len(test)}, read


def _batch(plan: NetworkPlan) -> int:
    return 64 if isinstance(plan.recipe.batch, str) else plan.recipe.batch  # "auto" takes at most 64


def _same_networks(suite: Suite) -> dict[str, str]:
    """By network that a row reads, the first of the suite that is trained alike, but for its seed."""
    first: dict[str, str] = {}
    same = {}
    used = {name for row in suite.methods.values() for name in row.networks}
    used |= {start for name in used if (start := suite.networks[name].start)}
    for name, plan in suite.networks.items():
        if name not in used:
            continue
        key = json.dumps(plan.described() | {"member": 0}, sort_keys=True)
        same[name] = first.setdefault(key, name)
    return same


def _seconds(work: Callable[[], object]) -> float:
    with torch.no_grad():
        begun = _now()
        work()
        return _now() - begun


def _now() -> float:
    """A clock; on a processor it counts the time of this process, by threads, so that other work does not count."""
    if not torch.cuda.is_available():
        return time.process_time() / torch.get_num_threads()
    torch.cuda.synchronize()
    return time.perf_counter()


def _repeated(images: Any, net: Classifier) -> Any:
    """Features of a few images as those of many, with the logits that the network has for them; images as they are."""
    if not isinstance(images, Features):
        return images
    many = images.subset(torch.arange(max(ROWS, len(images))) % len(images))
    draw = torch.Generator().manual_seed(0)
    features = many.features + 0.1 * many.features.std() * torch.randn(many.features.shape, generator=draw)
    prints = torch.randint(0, 256, many.prints.shape, generator=draw, dtype=torch.uint8)
    with torch.no_grad():
        logits = net.network.get_submodule(images.head)(features.to(net.mean)).to(many.logits)
    return replace(many, features=features, logits=logits, prints=prints)


def _bytes(features: Features) -> int:
    """Of one image's features."""
    columns = (features.logits, features.features, features.prints, features.per_anchor)
    return sum(column.element_size() * prod(column.shape[1:]) for column in columns if column is not None)


@contextmanager
def _peak() -> Iterator[list[float]]:
    """A list of the process's memory in bytes before the block and, after it, at its peak; zeros without /proc."""
    if not RESET.exists():
        yield [0.0, 0.0]
        return
    RESET.write_text("5")  # the peak is counted from here
    memory = [_status("VmRSS"), 0.0]
    yield memory
    memory[1] = _status("VmHWM")


def _status(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024.0 * int(line.split()[1])
