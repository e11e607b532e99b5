"""The leaderboard of OpenOOD v1.5, and tables of means over groups of OOD sets beside it."""

import functools
import importlib.resources
import json
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kedge.checks import one_of
from kedge.evaluation import SeedSummary, TextTable
from kedge.evaluation.protocol import full_spectrum
from kedge.evaluation.summary import SeedValues, starred
from kedge.metrics import METRICS
from kedge.studies.plan import Suite

STANDARD_TRAINING = "CrossEntropy"
FULL_SPECTRUM = "full-spectrum"


@dataclass(frozen=True)
class Entry:
    """A row of the leaderboard.

    Attributes:
        training: How the network was trained; `STANDARD_TRAINING` if in no special way.
        method: The leaderboard's name of the method.
        network: The leaderboard's name of the network.
        remark: The epochs, or the origin of the weights.
        near: Mean AUROC over the near OOD sets, in percent; followed by its deviation over trainings, if printed.
        far: The same over the far OOD sets.
        accuracy: On the in-distribution test set, or None. On a full-spectrum board, on the shifted sets too.
    """

    training: str
    method: str
    network: str
    remark: str
    near: tuple[float, ...]
    far: tuple[float, ...]
    accuracy: tuple[float, ...] | None


def leaderboard(board: str) -> list[Entry]:
    """The rows of a board: cifar10, cifar100, imagenet200 or imagenet, and the latter two followed by full-spectrum.

    Example:
        >>> next(row for row in leaderboard("cifar10") if row.method == "KNN").near
        (90.64, 0.2)
    """
    boards: dict[str, list[list[Any]]] = _file()["boards"]
    rows = boards[one_of("board", board, tuple(boards))]
    return [Entry(*row[:4], *(cell and tuple(cell) for cell in row[4:])) for row in rows]


def leaderboard_methods() -> dict[str, str]:
    """By the leaderboard's name of a method, kedge's."""
    names: dict[str, str] = _file()["methods"]
    return names


@functools.cache
def _file() -> dict[str, Any]:
    text = importlib.resources.files("kedge.studies").joinpath("openood.json").read_text(encoding="utf-8")
    held: dict[str, Any] = json.loads(text)
    return held


def group_tables(summary: SeedSummary, suite: Suite) -> tuple[TextTable, ...]:
    """Means over the suite's groups of OOD sets, then the same with shifted sets as in distribution, if there are any.

    The leaderboard's number is in brackets where it has the row. A group with a missing set has no mean.
    """
    if not suite.groups:
        return ()
    first = summary.first
    tables = [_table(summary, suite, "", first.id_name)]
    if first.shifted_names:
        every = SeedSummary({seed: full_spectrum(each) for seed, each in summary.evaluations.items()})
        tables.append(_table(every, suite, FULL_SPECTRUM, ", ".join((first.id_name, *first.shifted_names))))
    return tuple(tables)


def _table(summary: SeedSummary, suite: Suite, variant: str, inside: str) -> TextTable:
    entries, rows = _entries(suite, variant), []
    for label, result in summary.first.results.items():
        entry = entries.get(suite.methods[label].paper or "")
        cells = [
            _beside(_mean(summary, label, metric, oods), getattr(entry, group, None) if metric == "auroc" else None)
            for metric in suite.protocol.metrics
            for group, oods in suite.groups.items()
        ]
        accuracy = _beside(summary.words(label, "accuracy"), None if entry is None else entry.accuracy)
        rows.append((starred(label, result), *cells, accuracy))
    heads = [f"{group} {METRICS[metric].head}" for metric in suite.protocol.metrics for group in suite.groups]
    sets = "; ".join(f"{group}: {', '.join(oods)}" for group, oods in suite.groups.items())
    caption = f"In %, {variant or 'standard'}, in distribution: {inside}. Means over {sets}."
    if entries:
        network, date = next(iter(entries.values())).network, _file()["source"]["date"]
        caption += f" In brackets OpenOOD's leaderboard of {date}, {network}."
    return TextTable(caption, ("method", *heads, METRICS["accuracy"].head), tuple(rows))


def _entries(suite: Suite, variant: str) -> dict[str, Entry]:
    """The leaderboard's rows of the suite's network without special training, by method; none without a board."""
    name = "" if suite.board is None else f"{suite.board.name} {variant}".strip()
    if suite.board is None or name not in _file()["boards"]:
        return {}
    wanted = (STANDARD_TRAINING, suite.board.network)
    return {entry.method: entry for entry in leaderboard(name) if (entry.training, entry.network) == wanted}


def _mean(summary: SeedSummary, label: str, metric: str, oods: tuple[str, ...]) -> str:
    if not set(oods) <= set(summary.first.ood_names):
        return ""
    results = [evaluation.results[label] for evaluation in summary.evaluations.values()]
    means = tuple(fmean(result.detection_value(metric, ood) for ood in oods) for result in results)
    return SeedValues(means).words(metric)


def _beside(ours: str, theirs: tuple[float, ...] | None) -> str:
    return f"{ours} ({theirs[0]:g})" if ours and theirs else ours
