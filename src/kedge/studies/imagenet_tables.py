"""Intervals over images and tables of the study of ImageNet's classes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kedge.evaluation.summary import SeedValues, TextTable
from kedge.metrics import METRICS
from kedge.metrics.counts import Repeated
from kedge.studies.comparison import Fitted, MethodTable, Row, cell, interval
from kedge.studies.corruptions import SEVERITIES
from kedge.studies.imagenet_images import KNOWN, Pictures, level_name
from kedge.studies.paper import reported
from kedge.studies.task import Task

STRONGEST = f"blur {SEVERITIES[-1]}"
TABLE_5 = ("auroc", "dtacc", "aupr_in", "aupr_out")
IN_PAPER = {"msp": "unanchored", "temperature_scaling": "TemperatureScaling"}  # rows that its Table 5 has too


def bootstrap(
    pictures: Pictures, rows: Mapping[str, Row], tasks: Sequence[Task], folder: Path, resamples: int
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """By row and OOD set, AUROC as the mean over seeds with the ends of the 95 % interval over redrawn images.

    Of the strongest blur it has all metrics of the paper's Table 5. A redraw takes each image equally often for all
    seeds, rows and sets, and a blurred image as often as the clean one.
    """
    rng, n = np.random.default_rng(0), len(pictures.known)
    sizes = {each.name: len(each) for each in pictures.others}
    times = [np.ones(n, np.int64), *(rng.multinomial(n, np.full(n, 1 / n)) for _ in range(resamples))]
    outside = {
        name: [np.ones(m, np.int64), *(rng.multinomial(m, np.full(m, 1 / m)) for _ in range(resamples))]
        for name, m in sizes.items()
    }
    found: dict[str, dict[str, dict[str, list[float]]]] = {label: {} for label in rows}
    fitted = [Fitted(task) for task in tasks]
    for label, row in rows.items():
        scores = [dict(cell(label, row, each, folder).scores) for each in fitted]
        for name in (*sizes, *map(level_name, SEVERITIES)):
            metrics = TABLE_5 if name == STRONGEST else TABLE_5[:1]
            values = np.zeros((len(metrics), resamples + 1))
            for task, by_set in zip(tasks, scores, strict=True):
                tested = pictures.parts(task.seed)[2].numpy()
                repeated = Repeated(by_set[task.test.name], by_set[name])
                for draw, drawn in enumerate(times):
                    counts = repeated(drawn[tested], outside[name][draw] if name in outside else drawn[tested])
                    values[:, draw] += [_of_counts(metric)(counts) / len(tasks) for metric in metrics]
            ends = np.quantile(values[:, 1:], (0.025, 0.975), axis=1)
            found[label][name] = {
                metric: [float(values[k, 0]), *map(float, ends[:, k])] for k, metric in enumerate(metrics)
            }
    return found


def _of_counts(metric: str) -> Callable[..., float]:
    of = METRICS[metric].of_counts
    assert of is not None
    return of


def interval_tables(results: Mapping[str, Any]) -> tuple[TextTable, ...]:
    """AUROC by OOD set, what is flagged, and Table 5 beside the paper's numbers; the largest mean AUROC first."""
    found, table = results["bootstrap"], MethodTable.from_record(results)
    sets = list(next(iter(found.values())))
    ordered = sorted(found, key=lambda label: -sum(found[label][name]["auroc"][0] for name in sets))
    by_set = [(label, *(_ranged(found[label][name]["auroc"]) for name in sets)) for label in ordered]

    def shares(label: str, name: str) -> SeedValues:
        (by_seed,) = table.results[label].values()
        return SeedValues(
            tuple(
                each["id"]["flagged"] if name == KNOWN else each["sets"][name]["flagged"] for each in by_seed.values()
            )
        )

    flagged = [(label, *(interval(shares(label, name), 0) for name in (KNOWN, *sets))) for label in ordered]
    right = results["accuracy by level of blur"]
    levels = list(next(iter(right.values())))
    accuracies = tuple((net, *(interval(SeedValues(tuple(of[each]))) for each in levels)) for net, of in right.items())
    table_5 = [(label, *(_ranged(found[label][STRONGEST][metric]) for metric in TABLE_5)) for label in ordered]
    paper = {
        method: [
            f"{number.value:.1f}" for metric in TABLE_5 for number in reported(table="5", method=method, metric=metric)
        ]
        for method in (*IN_PAPER.values(), "AMP")
    }
    table_5 += [(f"paper, ResNet-50: {method}", *values) for method, values in paper.items()]
    within = "means over seeds and 95 % intervals of the bootstrap over images."
    return (
        TextTable(f"AUROC in %, {within}", ("method", *sets), tuple(by_set)),
        TextTable(
            "Share of images that are flagged at alpha 0.05, in %, with half the width of 95 % intervals over seeds.",
            ("method", KNOWN, *sets),
            tuple(flagged),
        ),
        TextTable(
            "Accuracy in % on the test images, as they are (0) and by level of blur.",
            ("network", *levels),
            accuracies,
        ),
        TextTable(
            f"{STRONGEST}, in %, {within}", ("method", *(METRICS[metric].head for metric in TABLE_5)), tuple(table_5)
        ),
    )


def _ranged(values: Sequence[float]) -> str:
    middle, low, high = (100 * value for value in values)
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def tables_of_imagenet(record: Mapping[str, Any]) -> dict[str, TextTable]:
    """The tables of the project's pages, from what metrics.json holds."""
    names = ("AUROC", "flagged", "accuracy", "Table 5")
    return {f"imagenet, {name}": table for name, table in zip(names, interval_tables(record), strict=True)}
