"""Methods on tasks of frozen features: cells that are computed once, tables, and the plot of worst case against mean.

A column is a task and a group of its OOD sets, near or far; its value is the mean over the sets of the group. The
shortfall of a method in a column is how far its AUROC lies below that of the best single method there.
"""

import copy
import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.data import Features
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.combined import Combined
from kedge.detectors.detection import Detection
from kedge.detectors.registry import make, post_hoc
from kedge.errors import InputError, NotReadyError
from kedge.evaluation.report.figures import require
from kedge.evaluation.summary import SeedValues, TextTable
from kedge.files import atomic, file_name
from kedge.io import artifact
from kedge.metrics import METRICS, Predictions, auroc, fpr95
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.provenance import provenance
from kedge.studies.sets import PRIVATE
from kedge.studies.task import GROUPS, Task

ON_ID = ("accuracy", "ece", "aurc", "augrc")  # metrics of the classifier on the ID test images
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # quantiles of Student's t, 1 to 9 d.o.f.
Column = tuple[str, str]  # a task and a group


@dataclass(frozen=True)
class Row:
    """A row of the table: a method by name, or a detector made of several.

    Args:
        method: A name of `named_methods`, or of the detector that ``parts`` make up.
        options: Arguments of the detector, plain data.
        parts: The methods that it is made of, by name or with options; none for a single method.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple["str | Row", ...] = ()

    def described(self) -> dict[str, Any]:
        """The row as plain data."""
        parts = [part.described() if isinstance(part, Row) else part for part in self.parts]
        return {"method": self.method, "options": dict(self.options), "parts": parts}


class Remembering(Combined):
    """Combined, with the outputs of its parts on extracted features kept in ``known``, which detectors share."""

    fitted: Sequence[Detector]
    known: dict[tuple[int, int], tuple[Features, Outputs]]

    def of_extracted(self, features: Features, size: int) -> Iterator[Outputs]:
        """The outputs of all parts, combined."""
        yield self._combined([self._known(part, features, size) for part in self.fitted])

    def _known(self, part: Detector, features: Features, size: int) -> Outputs:
        key = id(part), id(features)
        if key not in self.known:
            out = Outputs.joined(list(part.of_extracted(features, size)))
            self.known[key] = features, out  # with the features, whose number no others get while they live
        return self.known[key][1]


@dataclass
class Fitted:
    """The detectors of a task: a method is fitted once, and scores each set once, for all rows that it is a part of."""

    task: Task
    detectors: dict[str, Detector] = field(default_factory=dict)
    outputs: dict[tuple[int, int], tuple[Features, Outputs]] = field(default_factory=dict)  # by detector and set

    def detector(self, row: Row) -> Detector:
        """A fitted detector, which may be calibrated."""
        if row.parts:
            parts = [self._of_one(part if isinstance(part, Row) else Row(part)) for part in row.parts]
            combined = Remembering(parts, **row.options)
            combined.fitted, combined.known = parts, self.outputs
            return combined
        return copy.copy(self._of_one(row))

    def _of_one(self, row: Row) -> Detector:
        key = json.dumps(row.described())
        if key not in self.detectors:
            self.detectors[key] = make(row.method, self.task.network, **row.options).fit(self.task.train)
        return self.detectors[key]


def single_methods() -> dict[str, Row]:
    """A row for each registered method of one network that takes features."""
    net = Classifier(build("compact", width=4))
    return {name: Row(name) for name in post_hoc(unanchored=True) if make(name, net).takes_features}


def matching(rows: Mapping[str, Row], patterns: Collection[str]) -> dict[str, Row]:
    """The rows whose label matches a pattern, in which ``*`` is any text, or all; some must be single methods."""
    kept = {label: row for label, row in rows.items() if not patterns or any(fnmatchcase(label, p) for p in patterns)}
    if not any(not row.parts for row in kept.values()):
        raise InputError(f"rows must match some single method; got {', '.join(patterns)}; there are {', '.join(rows)}")
    return kept


@dataclass(frozen=True)
class Cell:
    """The result of a row on a task: numbers as plain data, and the scores of each set."""

    result: Mapping[str, Any]
    scores: Mapping[str, Tensor]


def cell(label: str, row: Row, fitted: Fitted, folder: Path, *, alpha: float = 0.05) -> Cell:
    """The result of a row on a task, read from ``folder`` if it is there; of other images or options is an error."""
    task = fitted.task
    path = folder / task.name / f"seed-{task.seed}" / f"{file_name(label)}.cell"
    identity = {"row": row.described(), "alpha": alpha, **task.identity}
    if path.exists():
        header, scores = artifact.read(path)
        if changed := [key for key, value in identity.items() if header["cell"].get(key) != value]:
            raise InputError(
                f"{path} was made with other {', '.join(changed)} than the study has now; choose another folder, or "
                "delete the file to run it again"
            )
        return Cell(header["result"], scores)
    done = scored(fitted.detector(row), task, alpha)
    artifact.write(path, {"cell": identity, "result": done.result, "made with": provenance()}, done.scores)
    return done


def scored(detector: Detector, task: Task, alpha: float = 0.05) -> Cell:
    """Calibrate a fitted detector, and score the sets of a task."""
    detector.calibrate(task.held_out, alpha=alpha)
    others = {name: detector(each) for name, each in task.tested.items()}
    known = others.pop(task.test.name)
    shifted = {each.name: each.labels for each in task.shifted if each.labels is not None}
    result = {
        "id": on_known(known, task.test.labels) | {"flagged": float(known.is_ood.double().mean())},
        "sets": {
            name: {
                "auroc": auroc(known.score, found.score),
                "fpr95": fpr95(known.score, found.score),
                "flagged": float(found.is_ood.double().mean()),
            }
            for name, found in others.items()
            if name not in shifted
        },
        "shifted": {
            name: on_known(others[name], labels) | {"flagged": float(others[name].is_ood.double().mean())}
            for name, labels in shifted.items()
        },
        "groups": {group: list(names) for group, names in task.groups.items()},
        "images": {"fit": len(task.train), "calibration": len(task.held_out)},
    }
    return Cell(result, {task.test.name: known.score, **{name: found.score for name, found in others.items()}})


def on_known(found: Detection, truth: Tensor | None) -> dict[str, float]:
    """Metrics of the classifier, and of its score as a predictor of errors, on labelled ID images."""
    assert truth is not None
    predictions = Predictions(found.label, found.probability, found.score, truth)
    return {name: of(predictions) for name in ON_ID if (of := METRICS[name].of_predictions) is not None}


@dataclass(frozen=True)
class MethodTable:
    """Results by row, task and seed, as plain data that a file holds.

    Args:
        results: By label, task and seed (as text), what `scored` gives.
        single: Labels of the single methods, to which all rows are compared.
        missing: Tasks whose data is not on this machine, with how to get it.
    """

    results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
    single: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "MethodTable":
        """What `as_dict` returned."""
        return cls(record["results"], tuple(record["single"]))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the results, and the summary of each row, without sets that are private."""
        public = self.public()
        summary = {
            label: {
                "mean auroc": public.mean(label).values,
                "mean fpr95": public.mean(label, "fpr95").values,
                "worst shortfall": public.worst(label)[1],
                "worst column": " ".join(public.worst(label)[0]),
            }
            for label in public.ordered
        }
        return {"single": list(self.single), "results": self.results, "summary": summary}

    def of_tasks(self, names: Collection[str]) -> "MethodTable":
        """The table of some tasks."""
        kept = {
            label: {name: by_task[name] for name in by_task if name in names} for label, by_task in self.results.items()
        }
        return MethodTable(kept, self.single)

    def public(self) -> "MethodTable":
        """The table without OOD sets that only exist as private archives."""

        def kept(result: Mapping[str, Any]) -> dict[str, Any]:
            groups = {
                group: [each for each in names if each not in PRIVATE] for group, names in result["groups"].items()
            }
            return {**result, "groups": groups}

        results = {
            label: {task: {seed: kept(each) for seed, each in by_seed.items()} for task, by_seed in by_task.items()}
            for label, by_task in self.results.items()
        }
        return MethodTable(results, self.single, self.missing)

    @property
    def columns(self) -> tuple[Column, ...]:
        """All tasks and groups."""
        tasks = next(iter(self.results.values()))
        return tuple((task, group) for task in tasks for group in GROUPS)

    @property
    def by_group(self) -> dict[str, list[Column]]:
        """The columns of near and of far OOD sets."""
        return {group: [column for column in self.columns if column[1] == group] for group in GROUPS}

    def value(self, label: str, column: Column, metric: str = "auroc") -> SeedValues:
        """A metric in a column, by seed: the mean over the sets of the group."""
        task, group = column
        return SeedValues(
            tuple(
                statistics.fmean(result["sets"][name][metric] for name in result["groups"][group])
                for result in self.results[label][task].values()
            )
        )

    def mean(self, label: str, metric: str = "auroc", columns: Sequence[Column] = ()) -> SeedValues:
        """The mean over columns, by default all of them, by seed."""
        return SeedValues.averaged(self.value(label, column, metric).values for column in columns or self.columns)

    def words(self, label: str, columns: Sequence[Column] = ()) -> str:
        """AUROC / FPR95 as tables show them: means over columns, with their intervals."""
        auroc, fpr95 = (self.mean(label, metric, columns) for metric in ("auroc", "fpr95"))
        return f"{interval(auroc)} / {interval(fpr95, 0)}"

    def shortfall(self, label: str, column: Column) -> SeedValues:
        """How far the AUROC lies below that of the single method with the best mean over seeds, by seed."""
        best = max((self.value(each, column) for each in self.single), key=lambda values: values.mean)
        return best - self.value(label, column)

    def worst(self, label: str) -> tuple[Column, float]:
        """The column in which a row falls furthest below the best single method, and by how much."""
        shortfalls = {column: self.shortfall(label, column).mean for column in self.columns}
        column = max(shortfalls, key=shortfalls.__getitem__)
        return column, shortfalls[column]

    @property
    def ordered(self) -> list[str]:
        """All labels, the smallest worst shortfall first."""
        return sorted(self.results, key=lambda label: self.worst(label)[1])

    @property
    def tables(self) -> tuple[TextTable, ...]:
        """The summary, and every column."""
        return self.summary(), self.by_column()

    def summary(self, only: Collection[str] = ()) -> TextTable:
        """Means over near, far and all columns, and the worst shortfall, of all rows or some; the smallest first."""
        rows = []
        for label in (label for label in self.ordered if not only or label in only):
            means = [self.words(label, part) for part in (*self.by_group.values(), self.columns)]
            column = self.worst(label)[0]
            rows.append((label, *means, f"{interval(self.shortfall(label, column))} ({' '.join(column)})"))
        heads = ("method", "near", "far", "all", "worst shortfall")
        caption = (
            "AUROC / FPR95 in %, means over columns, with half the width of 95 % intervals over seeds; the largest "
            "shortfall in AUROC to the best single method of a column, in points."
        )
        return TextTable(caption, heads, tuple(rows))

    def less(self, reference: str, only: Collection[str] = ()) -> TextTable:
        """What all rows or some have more than a reference, paired by seed: means over near, far and all columns."""
        rows = []
        for label in (label for label in self.ordered if label != reference and (not only or label in only)):
            cells = [
                interval(self.mean(label, metric, part) - self.mean(reference, metric, part), 2)
                for metric in ("auroc", "fpr95")
                for part in (*self.by_group.values(), self.columns)
            ]
            rows.append((label, *cells))
        heads = ("method", *(f"{metric}, {part}" for metric in ("AUROC", "FPR95") for part in ("near", "far", "all")))
        caption = f"Difference to {reference} in points, with half the width of 95 % intervals over seeds, paired."
        return TextTable(caption, heads, tuple(rows))

    def by_column(self, only: Collection[str] = ()) -> TextTable:
        """AUROC / FPR95 in every column, of all rows or some; means over seeds."""
        rows = []
        for label in (label for label in self.ordered if not only or label in only):
            values = [(self.value(label, column), self.value(label, column, "fpr95")) for column in self.columns]
            rows.append((label, *(f"{100 * a.mean:.1f} / {100 * f.mean:.0f}" for a, f in values)))
        heads = ("method", *(f"{task} {group}" for task, group in self.columns))
        return TextTable("AUROC / FPR95 in %, means over seeds.", heads, tuple(rows))


def by_set(table: MethodTable, only: Collection[str] = ()) -> TextTable | None:
    """AUROC / FPR95 on every set, of all rows or some, on tasks with private sets; None where there are none."""
    (first, *_) = table.results.values()
    by_task = {task: next(iter(by_seed.values()))["groups"] for task, by_seed in first.items()}
    columns = [
        (task, name)
        for task, groups in by_task.items()
        if any(name in PRIVATE for names in groups.values() for name in names)
        for names in groups.values()
        for name in names
    ]
    if not columns:
        return None
    rows = []
    for label in (label for label in table.public().ordered if not only or label in only):
        cells = []
        for task, name in columns:
            found = [result["sets"][name] for result in table.results[label][task].values()]
            auroc, fpr95 = (100 * statistics.fmean(each[metric] for each in found) for metric in ("auroc", "fpr95"))
            cells.append(f"{auroc:.1f} / {fpr95:.0f}")
        rows.append((label, *cells))
    heads = (f"{task}: {name}" + (" (private)" if name in PRIVATE else "") for task, name in columns)
    caption = (
        "AUROC / FPR95 in %, means over seeds. Private sets only exist as reduced copies that a reader cannot get; "
        "they are in no other table."
    )
    return TextTable(caption, ("method", *heads), tuple(rows))


def interval(values: SeedValues, digits: int = 1) -> str:
    """A mean in percent and half the width of its 95 % interval over seeds, if there are several."""
    n = len(values.values)
    text = f"{100 * values.mean:.{digits}f}"
    if values.deviation is None:
        return text
    return f"{text} ± {100 * T_975[min(n - 2, 8)] * values.deviation / n**0.5:.{digits}f}"


def run_rows(
    rows: Mapping[str, Row],
    tasks: Mapping[str, Callable[[int], Task]],
    seeds: Sequence[int],
    folder: Path,
    progress: Callable[[str, int, int], None] | None = None,
) -> MethodTable:
    """Every row on every task and seed, task by task; finished cells are read from ``folder``."""
    results: dict[str, dict[str, dict[str, Any]]] = {label: {} for label in rows}
    missing, total = {}, len(rows) * len(tasks) * len(seeds)
    for number, (name, load) in enumerate(tasks.items()):
        for place, seed in enumerate(seeds):
            try:
                task = load(seed)
            except NotReadyError as error:
                missing[name] = str(error)
                break
            fitted = Fitted(task)
            for done, (label, row) in enumerate(rows.items(), (number * len(seeds) + place) * len(rows)):
                if progress is not None:
                    progress(f"{name}, seed {seed}: {label}", done, total)
                results[label].setdefault(name, {})[str(seed)] = dict(cell(label, row, fitted, folder).result)
    return MethodTable(results, tuple(label for label, row in rows.items() if not row.parts), missing)


def draw_worst_against_mean(comparison: MethodTable, path: Path, named: str = "") -> None:
    """The worst shortfall of every row against its mean AUROC; of rows made of several methods only one is named."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for label in comparison.results:
        x, y = 100 * comparison.mean(label).mean, 100 * comparison.worst(label)[1]
        single = label in comparison.single
        axis.plot(x, y, "o", color="C0" if single else "C1", fillstyle="none" if single else "full")
        if single:
            axis.annotate(label, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
        elif label == named:
            axis.annotate(label, (x, y), xytext=(-8, -3), textcoords="offset points", fontsize=9, ha="right")
    axis.plot([], [], "o", color="C0", fillstyle="none", label="single methods")
    axis.plot([], [], "o", color="C1", label="combinations")
    axis.legend(loc="upper left")
    axis.set(xlabel="mean AUROC over columns, percent", ylabel="worst shortfall to the best single method, points")
    axis.set_yscale("symlog", linthresh=1)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:])
