"""Heads on frozen features: whether anchors add to the same head without them, and what their tau measures.

A column is a task and a group of its OOD sets, as in `comparison`. Options of the head are chosen on held-out classes
of the in-distribution images; no OOD set has a part in the choice.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge import metrics, scores
from kedge.anchoring import Anchored
from kedge.checks import one_of
from kedge.data import Features, class_split
from kedge.detectors.registry import make
from kedge.errors import NotReadyError
from kedge.evaluation.report.figures import require
from kedge.files import atomic
from kedge.models.classifier import Classifier
from kedge.provenance import provenance
from kedge.studies import kernel_of_heads
from kedge.studies.comparison import MethodTable
from kedge.studies.laplace import LastLayerLaplace
from kedge.studies.photo_tasks import PHOTOS
from kedge.studies.study import Setting
from kedge.studies.task import GROUPS, Task
from kedge.studies.tasks import tasks
from kedge.training import AnchoredHead
from kedge.training.frozen import EPOCHS

WIDTH = 128  # units of every head
K = 50  # anchors, unless their number is varied
COUNTS = (2, 5, 10, 20, 50, 200)
MEMBERS = 3  # of the ensemble, the first of which is the unanchored baseline
MOST_TRAINED, MOST_SCORED = 5_000, 600  # features of a set
FEW_EPOCHS = 10  # for as many features
BINS = 10  # of distance from the training features
VARIED = ("tau", "mutual_information")  # readings that are taken with other numbers of anchors too
LOGIT_SCORES = ("msp", "max_logit", "energy", "kl_uniform", "gen")
OF_PROBABILITIES = ("msp", "kl_uniform", "gen")
READINGS = ("tau", "probability_deviation", "mutual_information", "relative_deviation")
CHOICES: tuple[dict[str, Any], ...] = (
    {"init": "fresh", "noise": 0.0},
    {"init": "fresh", "noise": 0.5},
    {"init": "fresh", "noise": 0.5, "every": 1},
    {"init": "preserve", "noise": 0.0},
    {"init": "preserve", "noise": 0.5},
)
UNANCHORED, ANCHORED, ENSEMBLE = "unanchored", "anchored", "ensemble"
SINGLE = (*(f"{UNANCHORED}: {score}" for score in LOGIT_SCORES), "MDS++")  # to which all rows are compared
DEFAULT, THIRD = "MDS++ + GEN", "MDS++ + GEN + tau"
Scored = dict[str, dict[str, Tensor]]  # by label and set


@dataclass(frozen=True)
class Heads:
    """The heads of one task and seed, and the unnormalised anchors of the anchored one.

    Args:
        anchored: The anchored head, with the most anchors of `COUNTS`.
        members: Unanchored heads.
        laplace: A Gaussian posterior of the first member's last layer.
    """

    anchored: Anchored
    members: tuple[Classifier, ...]
    laplace: LastLayerLaplace


def trained(task: Task, options: Mapping[str, Any]) -> Heads:
    """All heads of a task; ``options`` are those of the anchored one."""
    train = some_of(task.train, MOST_TRAINED)
    common: dict[str, Any] = {"width": WIDTH, "epochs": FEW_EPOCHS if len(train) == MOST_TRAINED else EPOCHS}
    anchored = AnchoredHead(seed=task.seed, **common, **options).train(train)
    assert isinstance(anchored, Anchored)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(task.seed))
    anchored.set_anchors(train.features[order[: COUNTS[-1]]].float())
    baseline = partial(AnchoredHead, anchored=False, **common)
    members = [baseline(seed=MEMBERS * task.seed + number).train(train) for number in range(MEMBERS)]
    hidden, logits = hidden_and_logits(members[0], train.features)
    held_out = (*hidden_and_logits(members[0], task.held_out.features), task.held_out.labels)
    return Heads(anchored, tuple(members), LastLayerLaplace.fit(hidden, logits, held_out))


@torch.no_grad()
def score_all(heads: Heads, task: Task) -> tuple[Scored, dict[str, Tensor], dict[str, Any]]:
    """Scores of every method on every set, the labels that each kind of head predicts for test images, and by K."""
    sets = {"held out": task.held_out, **{name: some_of(each) for name, each in task.tested.items()}}
    found: Scored = {}
    labels: dict[str, Tensor] = {}
    by_count: dict[str, Any] = {}

    def keep(label: str, name: str, values: Tensor) -> None:
        found.setdefault(label, {})[name] = values

    for name, each in sets.items():
        x = each.features.float()
        many = torch.cat([heads.anchored.per_anchor_logits(part) for part in x.split(256)], dim=1)  # (200, N, C)
        per_anchor, mean = many[:K], many[:K].mean(dim=0)
        logits = torch.stack([member(x) for member in heads.members])  # (M, N, C)
        kinds = {UNANCHORED: logits[0], ANCHORED: mean, ENSEMBLE: logits.softmax(dim=-1).mean(dim=0).log()}
        for kind, z in kinds.items():
            for score in LOGIT_SCORES if kind != ENSEMBLE else OF_PROBABILITIES:
                keep(f"{kind}: {score}", name, scores.SCORES[score](z))
            if name == task.test.name:
                labels[kind] = z.argmax(dim=1)
        keep(f"{ENSEMBLE}: mutual_information", name, scores.mutual_information(logits))
        for reading in READINGS:
            keep(f"{ANCHORED}: {reading}", name, getattr(scores, reading)(per_anchor))
            for count in COUNTS if reading in VARIED else ():
                by_count.setdefault(reading, {}).setdefault(count, {})[name] = getattr(scores, reading)(many[:count])
        tau, relative = scores.tau(per_anchor), scores.relative_deviation(per_anchor)
        keep("AMP", name, scores.kl_uniform(scores.rescale(mean, tau)))
        keep("AMP, tau relative", name, scores.kl_uniform(scores.rescale(mean, relative)))
        certain, variance = heads.laplace(*hidden_and_logits(heads.members[0], x))
        keep("Laplace: msp", name, scores.msp(certain))
        keep("Laplace: gen", name, scores.gen(certain))
        keep("Laplace: variance", name, variance)
    distance = make("mds++", task.network).fit(some_of(task.train, MOST_TRAINED))
    for name, each in sets.items():
        keep("MDS++", name, distance.score(each).float())
    for label, parts in {
        DEFAULT: ("MDS++", f"{UNANCHORED}: gen"),
        "MDS++ + GEN of the ensemble": ("MDS++", f"{ENSEMBLE}: gen"),
        "MDS++ + GEN under anchors": ("MDS++", f"{ANCHORED}: gen"),
        THIRD: ("MDS++", f"{UNANCHORED}: gen", f"{ANCHORED}: tau"),
        "MDS++ + GEN + mutual information": ("MDS++", f"{UNANCHORED}: gen", f"{ANCHORED}: mutual_information"),
    }.items():
        found[label] = added_scores([found[part] for part in parts])
    return found, labels, by_count


def added_scores(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of scores that are each standardised on held-out in-distribution images."""
    sums = {}
    for name in parts[0]:
        terms = [(part[name] - part["held out"].mean()) / part["held out"].std() for part in parts]
        sums[name] = torch.stack(terms).sum(dim=0)
    return sums


def judged(found: Scored, labels: Mapping[str, Tensor], by_count: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """AUROC and FPR95 for every label and set, AURC and AUGRC on test images, and AUROC by the number of anchors."""
    known, truth = task.test.name, some_of(task.test).labels
    groups = {group: list(names) for group, names in task.groups.items()}

    def sets(values: Mapping[str, Tensor]) -> dict[str, Any]:
        others = [name for name in values if name not in ("held out", known)]
        return {
            name: {
                "auroc": metrics.auroc(values[known], values[name]),
                "fpr95": metrics.fpr95(values[known], values[name]),
            }
            for name in others
        }

    results: dict[str, Any] = {}
    for label, values in found.items():
        kind = next((kind for kind in labels if label.startswith(f"{kind}:")), None)
        kind = kind or (ANCHORED if label.startswith("AMP") else UNANCHORED)
        right = labels[kind] == truth
        errors = {name: float(getattr(metrics, name)(values[known], right)) for name in ("aurc", "augrc")}
        results[label] = {"sets": sets(values), "groups": groups, "id": errors}
    counts = {
        reading: {
            str(count): {
                group: statistics.fmean(sets(values)[name]["auroc"] for name in names)
                for group, names in groups.items()
            }
            for count, values in by.items()
        }
        for reading, by in by_count.items()
    }
    assert truth is not None
    accuracy = {kind: float(torch.eq(found_labels, truth).double().mean()) for kind, found_labels in labels.items()}
    return {"results": results, "by count": counts, "accuracy": accuracy}


@torch.no_grad()
def by_distance(found: Scored, task: Task) -> dict[str, list[float]]:
    """Means of the readings in bins of equally many images by distance from the data, in units of held-out images'.

    The distance is one less the cosine to the nearest training feature.
    """
    train = F.normalize(some_of(task.train, MOST_TRAINED).features.float(), dim=1)
    names = [name for name in found["AMP"] if name != "held out"]
    parts = [F.normalize(some_of(task.tested[name]).features.float(), dim=1) for name in names]
    distance = torch.cat([1 - (part @ train.T).amax(dim=1) for part in parts])
    bins = distance.argsort().tensor_split(BINS)
    curves = {"distance": [float(distance[each].mean()) for each in bins]}
    for reading in READINGS:
        values = found[f"{ANCHORED}: {reading}"]
        together = torch.cat([values[name] for name in names]) / values["held out"].mean()
        curves[reading] = [float(together[each].mean()) for each in bins]
    return curves


def choose_head(task: Task) -> dict[str, Any]:
    """By option, how well the readings and AMP tell held-out classes of the ID images: near OOD without OOD images."""
    names = tuple(str(number) for number in range(int(task.train.labels.max()) + 1))  # type: ignore[union-attr]
    known, others = class_split(replace(task.train, classes=task.train.classes or names))
    fit, test = known.split(0.7, seed=task.seed)
    judged_by: dict[str, Any] = {}
    for options in CHOICES:
        head = AnchoredHead(width=WIDTH, seed=task.seed, **options).train(fit)
        assert isinstance(head, Anchored)
        order = torch.randperm(len(fit), generator=torch.Generator().manual_seed(task.seed))
        head.set_anchors(fit.features[order[:K]].float())
        with torch.no_grad():
            z = [head.per_anchor_logits(each.features.float()) for each in (test, others)]
        found = {reading: [getattr(scores, reading)(each) for each in z] for reading in READINGS}
        found["AMP"] = [scores.kl_uniform(scores.rescale(each.mean(dim=0), scores.tau(each))) for each in z]
        found["gen"] = [scores.gen(each.mean(dim=0)) for each in z]
        name = ", ".join(f"{key} {value}" for key, value in options.items())
        judged_by[name] = {label: float(metrics.auroc(*values)) for label, values in found.items()}
    return judged_by


def run_heads(
    setting: Setting,
    out: Path,
    features: Path,
    *,
    patterns: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> MethodTable:
    """Run what is missing, and write metrics.json, tables.md and heads.svg.

    Args:
        setting: Scale, seeds, data and weights.
        out: Folder for the cells, one for each task and seed, and the tables.
        features: Folder of extracted features, which studies on the same tasks share.
        patterns: Only rows whose label matches one of these, in which ``*`` is any text.
        only: Names of the tasks to run; by default all.
        command: The command to run it again, for the record.
        progress: Called with what is running, the number of cells done and the number in all.
    """
    loaders, missing, cells = tasks(setting), {}, {}
    if only:
        loaders = {one_of("--tasks", name, tuple(loaders)): loaders[name] for name in only}
    todo = [(name, seed) for seed in setting.seeds for name in loaders]
    options: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    for done, (name, seed) in enumerate(todo):
        if progress is not None:
            progress(f"{name}, seed {seed}", done, len(todo))
        if name in missing:
            continue
        path = out / "cells" / f"{name}-{seed}.json"
        if path.exists():
            cells[name, seed] = json.loads(path.read_text())
            continue
        try:
            task = loaders[name](setting, features, seed)
        except NotReadyError as error:
            missing[name] = str(error)
            continue
        if not options:
            choices, options = options_of(setting, out, features)
        cells[name, seed] = head_cell(task, options)
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(cells[name, seed]))
    if not cells:
        raise NotReadyError(f"heads needs the data of a task: {'; '.join(missing.values())}")
    choices = choices or options_of(setting, out, features)[0]
    comparison = compared(cells, missing, patterns)
    record = {"command": command, "scale": setting.scale, "seeds": list(setting.seeds), "made with": provenance()}
    whole = {"record": record, **comparison.as_dict(), "choice": choices, **extras(cells)}
    tables = (comparison.summary(), comparison.by_column())
    for name, text in {
        "metrics.json": json.dumps(whole, indent=1),
        "tables.md": "\n\n".join(table.markdown() for table in tables) + "\n",
    }.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    draw(whole, out / "heads.svg")
    return comparison


def head_cell(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is measured on a task and seed, as plain data."""
    heads = trained(task, options)
    found, labels, by_count = score_all(heads, task)
    measured = judged(found, labels, by_count, task)
    theory = kernel_of_heads.compare_kernels(task, heads.anchored) if task.name in PHOTOS and task.seed == 0 else None
    return {**measured, "options": dict(options), "by distance": by_distance(found, task), "theory": theory}


def options_of(setting: Setting, out: Path, features: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """AUROC on held-out classes of the first task by option, and the options with which AMP has the largest."""
    path = out / "choice.json"
    if not path.exists():
        load = next(iter(tasks(setting).values()))
        found = choose_head(load(setting, features, setting.seeds[0]))
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(found))
    found = json.loads(path.read_text())
    best = max(found, key=lambda name: float(found[name]["AMP"]))
    return found, dict(CHOICES[list(found).index(best)])


def compared(
    cells: Mapping[tuple[str, int], Any], missing: Mapping[str, str], patterns: tuple[str, ...] = ()
) -> MethodTable:
    """The cells as a table, in which the unanchored scores and the distance are the single methods."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, seed), each in cells.items():
        for label, result in each["results"].items():
            if label in SINGLE or not patterns or any(fnmatchcase(label, pattern) for pattern in patterns):
                results.setdefault(label, {}).setdefault(name, {})[str(seed)] = result
    return MethodTable(results, SINGLE, dict(missing))


def extras(cells: Mapping[tuple[str, int], Any]) -> dict[str, Any]:
    """What else was measured, by task: means over seeds."""
    names = dict.fromkeys(name for name, _ in cells)
    return {
        key: {name: _mean([each[key] for (task, _), each in cells.items() if task == name]) for name in names}
        for key in ("by count", "accuracy", "by distance")
    } | {"theory": {name: each["theory"] for (name, _), each in cells.items() if each["theory"]}}


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, element by element, inside equal structures."""
    if isinstance(values[0], dict):
        return {key: _mean([each[key] for each in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [_mean(list(each)) for each in zip(*values, strict=True)]
    return statistics.fmean(values)


def some_of(features: Features, most: int = MOST_SCORED) -> Features:
    """The features, or so many of them drawn at random, the same every time."""
    if len(features) <= most:
        return features
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    return replace(features.subset(order[:most]), name=features.name)


@torch.no_grad()
def hidden_and_logits(head: Classifier, features: Tensor) -> tuple[Tensor, Tensor]:
    """What an unanchored head's last layer reads (N, d), and its logits (N, C)."""
    logits, read = head.features(features.float(), ["fc:in"])
    return read["fc:in"], logits


def draw(whole: Mapping[str, Any], path: Path) -> None:
    """For each task, readings by distance from the data, and AUROC by the number of anchors."""
    matplotlib = require()
    from matplotlib.figure import Figure

    names = list(whole["by distance"])
    figure = Figure(figsize=(3.2 * len(names), 5.6), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False)
    for name, upper, lower in zip(names, *axes, strict=True):
        curves = whole["by distance"][name]
        for reading in READINGS:
            upper.plot(curves["distance"], curves[reading], "o-", markersize=3, label=reading.replace("_", " "))
        upper.set(title=name, xlabel="distance from the training features", yscale="log")
        for reading, style in zip(VARIED, ("-", "--"), strict=True):
            by_count = whole["by count"][name][reading]
            for color, group in enumerate(GROUPS):
                values = [100 * each[group] for each in by_count.values()]
                label = f"{reading.replace('_', ' ')}, {group}"
                lower.plot([int(k) for k in by_count], values, style, marker=".", color=f"C{color}", label=label)
        lower.set(xlabel="anchors K", xscale="log")
        for axis in (upper, lower):
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("reading / that of held-out images")
    axes[1][0].set_ylabel("AUROC of the reading alone, percent")
    for axis in axes[:, 0]:
        axis.legend(fontsize=7)
    with matplotlib.rc_context({"svg.fonttype": "none"}), atomic(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
