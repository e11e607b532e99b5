"""Heads on frozen features: whether anchors add to the same head without them, and what their tau measures.

A column is a task and a group of its OOD sets, as in `comparison`. Options of the head are chosen on held-out classes
of the in-distribution images; no OOD set has a part in the choice.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kedge import metrics, scores
from kedge.anchoring import Anchored
from kedge.checks import one_of
from kedge.data import class_split
from kedge.errors import NotReadyError
from kedge.studies import kernel_of_heads
from kedge.studies.comparison import MethodTable
from kedge.studies.feature_run import FeatureRun, Written
from kedge.studies.head_scores import (
    ANCHORED,
    LOGIT_SCORES,
    MOST_TRAINED,
    OF_VIEWS,
    READINGS,
    UNANCHORED,
    WIDTH,
    K,
    Scored,
    disagreement,
    per_anchor_logits,
    score_all,
    some_of,
    trained_heads,
    with_anchors,
)
from kedge.studies.head_tables import draw, tables_of_heads
from kedge.studies.photo_tasks import PHOTOS, photo_task
from kedge.studies.study import Setting
from kedge.studies.task import GROUPS, Task
from kedge.studies.tasks import DEPTHS, TASKS, TOYS, Loader
from kedge.training import AnchoredHead

BINS = 10  # of distance from the training features
CHOICES: tuple[dict[str, Any], ...] = (
    {"init": "fresh", "noise": 0.0},
    {"init": "fresh", "noise": 0.5},
    {"init": "fresh", "noise": 0.5, "every": 1},
    {"init": "preserve", "noise": 0.0},
    {"init": "preserve", "noise": 0.5},
)
SINGLE = (*(f"{UNANCHORED}: {score}" for score in LOGIT_SCORES), "MDS++")  # to which all rows are compared
ON_FEATURES = (*PHOTOS, *(f"cifar10-resnet{depth}" for depth in DEPTHS), "digits")
FAILURES = ("aurc", "augrc")


def loaders_of(setting: Setting) -> dict[str, Loader]:
    """The tasks of the study, by name; those of photographs with other conditions and augmented views."""
    if setting.scale == "smoke":
        return TOYS
    photos = {name: partial(photo_task, name, shifted=True, augmented=True) for name in PHOTOS}
    return {name: photos.get(name, TASKS[name]) for name in ON_FEATURES}


def judged(found: Scored, task: Task) -> dict[str, Any]:
    """AUROC and FPR95 of every row by OOD set, AURC and AUGRC on test images as they are and shifted.

    And the accuracy of every kind of head, and the AUROC of readings by the number of anchors.
    """
    known = task.test.name
    groups = {group: list(names) for group, names in task.groups.items()}
    truth = {each.name: labels for each in (task.test, *task.shifted) if (labels := some_of(each).labels) is not None}
    right = {
        kind: {name: predicted[name] == labels for name, labels in truth.items()}
        for kind, predicted in found.predicted.items()
    }

    def aurocs(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {name: metrics.auroc(values[known], values[name]) for names in groups.values() for name in names}

    def failures(label: str, name: str) -> dict[str, float]:
        of = right[found.kind(label)][name]
        return {metric: float(getattr(metrics, metric)(found.rows[label][name], of)) for metric in FAILURES}

    results = {
        label: {
            "sets": {
                name: {"auroc": auroc, "fpr95": metrics.fpr95(values[known], values[name])}
                for name, auroc in aurocs(values).items()
            },
            "groups": groups,
            "id": failures(label, known),
            "shifted": {each.name: failures(label, each.name) for each in task.shifted},
        }
        for label, values in found.rows.items()
    }
    counts = {
        reading: {
            str(count): {group: statistics.fmean(aurocs(values)[name] for name in groups[group]) for group in GROUPS}
            for count, values in by.items()
        }
        for reading, by in found.by_count.items()
    }
    accuracy = {
        kind: {name: float(each.double().mean()) for name, each in by_set.items()} for kind, by_set in right.items()
    }
    return {"results": results, "by count": counts, "accuracy": accuracy}


@torch.no_grad()
def by_distance(found: Scored, task: Task) -> dict[str, list[float]]:
    """Means of the readings in bins of equally many images by distance from the data, in units of held-out images'.

    The distance is one less the cosine to the nearest training feature.
    """
    train = F.normalize(some_of(task.train, MOST_TRAINED).features.float(), dim=1)
    names = [task.test.name, *(name for names in task.groups.values() for name in names)]
    parts = [F.normalize(some_of(task.tested[name]).features.float(), dim=1) for name in names]
    distance = torch.cat([1 - (part @ train.T).amax(dim=1) for part in parts])
    bins = distance.argsort().tensor_split(BINS)
    curves = {"distance": [float(distance[each].mean()) for each in bins]}
    for reading in READINGS:
        values = found.rows[f"{ANCHORED}: {reading}"]
        together = torch.cat([values[name] for name in names]) / values["held out"].mean()
        curves[reading] = [float(together[each].mean()) for each in bins]
    return curves


@torch.no_grad()
def choose_head(task: Task) -> dict[str, Any]:
    """By option, how well the readings and AMP tell held-out classes of the ID images: near OOD without OOD images."""
    names = tuple(str(number) for number in range(int(task.train.labels.max()) + 1))  # type: ignore[union-attr]
    known, others = class_split(replace(task.train, classes=task.train.classes or names))
    fit, test = known.split(0.7, seed=task.seed)
    judged_by: dict[str, Any] = {}
    for options in CHOICES:
        head = AnchoredHead(width=WIDTH, seed=task.seed, **options).train(fit)
        assert isinstance(head, Anchored)
        with_anchors(head, fit, K, task.seed)
        inside, outside = (per_anchor_logits(head, each.features.float()) for each in (test, others))
        found = zip(disagreement(inside).items(), disagreement(outside).values(), strict=True)
        aurocs = {label: float(metrics.auroc(values, far)) for (label, values), far in found}
        aurocs["gen"] = float(metrics.auroc(*(scores.gen(each.mean(dim=0)) for each in (inside, outside))))
        judged_by[", ".join(f"{key} {value}" for key, value in options.items())] = aurocs
    return judged_by


def run_heads(run: FeatureRun) -> Written:
    """Run what is missing, with a cell for each task and seed, and write metrics.json, tables.md and heads.svg."""
    loaders, missing, cells = loaders_of(run.setting), {}, {}
    if run.only:
        loaders = {one_of("--tasks", name, tuple(loaders)): loaders[name] for name in run.only}
    todo = [(name, seed) for seed in run.setting.seeds for name in loaders]

    def measure(name: str, seed: int) -> dict[str, Any]:
        task = loaders[name](run.setting, run.features, seed)
        return head_cell(task, options_of(run)[1])

    for done, (name, seed) in enumerate(todo):
        if run.progress is not None:
            run.progress(f"{name}, seed {seed}", done, len(todo))
        if name in missing:
            continue
        try:
            cells[name, seed] = run.once(f"{name}-{seed}", partial(measure, name, seed))
        except NotReadyError as error:
            missing[name] = str(error)
    if not cells:
        return run.write({}, (), missing)
    whole = {**compared(cells, missing, run.patterns).as_dict(), "choice": options_of(run)[0], **extras(cells)}
    written = run.write(whole, tables_of_heads(whole).values(), missing)
    draw(whole, run.out / "heads.svg")
    return written


def head_cell(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is measured on a task and seed, as plain data."""
    heads = trained_heads(task, options)
    found = score_all(heads, task)
    return {
        **judged(found, task),
        "options": dict(options),
        "by distance": by_distance(found, task),
        "theory": kernel_of_heads.compare_kernels(task, heads.anchored),
    }


def options_of(run: FeatureRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """AUROC on held-out classes of the first task by option, and the options with which AMP has the largest."""

    def choose() -> dict[str, Any]:
        load = next(iter(loaders_of(run.setting).values()))
        return choose_head(load(run.setting, run.features, run.setting.seeds[0]))

    found = run.once("choice", choose)
    best = max(found, key=lambda name: float(found[name]["AMP"]))
    return found, dict(CHOICES[list(found).index(best)])


def compared(
    cells: Mapping[tuple[str, int], Any], missing: Mapping[str, str], patterns: tuple[str, ...] = ()
) -> MethodTable:
    """The rows of all cells as a table, in which the unanchored scores and the distance are the single methods."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, seed), each in cells.items():
        for label, result in each["results"].items():
            kept = label in SINGLE or not patterns or any(fnmatchcase(label, pattern) for pattern in patterns)
            if kept and label.partition(":")[0] != OF_VIEWS:
                results.setdefault(label, {}).setdefault(name, {})[str(seed)] = result
    return MethodTable(results, SINGLE, dict(missing))


def extras(cells: Mapping[tuple[str, int], Any]) -> dict[str, Any]:
    """What else was measured, by task: means over seeds; the kernel's prediction and T of views by seed."""
    by_task = {name: [each for (task, _), each in cells.items() if task == name] for name, _ in cells}
    of_views: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, seed), each in cells.items():
        for label, result in each["results"].items():
            if label.partition(":")[0] == OF_VIEWS:
                of_views.setdefault(label, {}).setdefault(name, {})[str(seed)] = result
    return {
        key: {name: _mean([each[key] for each in every]) for name, every in by_task.items()}
        for key in ("by count", "accuracy", "by distance")
    } | {"theory": {name: [each["theory"] for each in every] for name, every in by_task.items()}, "views": of_views}


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, element by element, inside equal structures."""
    if isinstance(values[0], dict):
        return {key: _mean([each[key] for each in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [_mean(list(each)) for each in zip(*values, strict=True)]
    return statistics.fmean(values)
