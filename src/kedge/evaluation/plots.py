"""Plots of an evaluation with matplotlib, for notebooks; the report draws its own."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kedge.checks import needs, one_of
from kedge.errors import InputError
from kedge.evaluation.result import Evaluation
from kedge.metrics import roc_curve

BINS = 40


def plot_evaluation(evaluation: Evaluation, kind: str, detector: str | None) -> Any:
    """See `Evaluation.plot`."""
    draw = DRAWN[one_of("kind", kind, tuple(DRAWN))]
    name = next(iter(evaluation.results)) if detector is None else detector
    one_of("detector", name, tuple(evaluation.results))
    figure = needs("matplotlib.figure", "report", "plot").Figure(layout="constrained")
    draw(figure, evaluation, name)
    return figure


def _roc(figure: Any, evaluation: Evaluation, name: str) -> None:
    figure.set_size_inches(5, 4.5)
    axes = figure.add_subplot()
    for ood in evaluation.ood_names:
        result = evaluation.results[name]
        flagged_id, flagged_ood = roc_curve(evaluation.inside(name, ood), result.detections[ood].score)
        axes.plot(flagged_id, flagged_ood, label=f"{ood}: AUROC {result.metrics[ood]['auroc']:.1%}")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8, linestyle="--")
    axes.set(title=name, xlabel=f"share of {evaluation.id_name} flagged", ylabel="share of OOD images flagged")
    axes.legend(loc="lower right")


def _scores(figure: Any, evaluation: Evaluation, name: str) -> None:
    names = evaluation.ood_names
    columns = min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    figure.set_size_inches(4 * columns, 2.6 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    for axes, ood in zip(panels, names, strict=False):
        detections = evaluation.results[name].detections
        sets = {evaluation.id_name: evaluation.inside(name, ood).numpy(), ood: detections[ood].score.numpy()}
        finite = np.concatenate([values[np.isfinite(values)] for values in sets.values()])
        low, high = np.quantile(finite, [0.005, 0.995]).tolist()
        bins = np.linspace(low, high, BINS + 1)
        for label, values in sets.items():
            clipped = np.clip(values, bins[0], bins[-1])
            axes.hist(clipped, bins, weights=np.full(len(values), 1 / len(values)), alpha=0.5, label=label)
        axes.set(yticks=[], xlabel="score: further right is further out of distribution")
        axes.legend()
    for axes in panels[len(names) :]:
        axes.axis("off")
    figure.suptitle(name)


def _reliability(figure: Any, evaluation: Evaluation, name: str) -> None:
    labels = evaluation.sets[evaluation.id_name].labels
    if labels is None or not bool((labels >= 0).any()):
        raise InputError(f"a reliability diagram needs labels; {evaluation.id_name!r} has none")
    probability, known = evaluation.results[name].detections[evaluation.id_name].probability, labels >= 0
    sure = probability.amax(dim=1)[known].double().numpy()
    right = (probability.argmax(dim=1) == labels)[known].double().numpy()
    place = np.minimum((sure * 15).astype(int), 14)
    used = np.unique(place)
    figure.set_size_inches(4.5, 4.2)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8, linestyle="--")
    axes.scatter(
        [sure[place == b].mean() for b in used],
        [right[place == b].mean() for b in used],
        s=[12 + 130 * (place == b).mean() for b in used],
    )
    axes.set(title=name, xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="share of correct predictions")


DRAWN: dict[str, Callable[[Any, Evaluation, str], None]] = {
    "roc": _roc,
    "scores": _scores,
    "reliability": _reliability,
}
