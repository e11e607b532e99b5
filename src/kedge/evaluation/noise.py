"""How much of a difference is noise: of the anchors drawn, of the training, of the images tested on."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.errors import InputError
from kedge.evaluation.paired import redraw
from kedge.evaluation.result import METRICS, Evaluation
from kedge.evaluation.summary import HEADS, Summary
from kedge.evaluation.table import Table

SHOWN = ("auroc", "fpr95")
RESAMPLES = 200


@dataclass(frozen=True)
class Noise:
    """Standard deviations of a metric's mean over the OOD sets, as shares.

    Attributes:
        mean: Over trainings and draws of anchors.
        anchors: Over draws of anchors for the same network, or None without other draws.
        trainings: Over trainings, less what the anchors contribute to it; None for one training.
        images: Over redrawn test images, of the first training.
    """

    mean: float
    anchors: float | None
    trainings: float | None
    images: float


def noise(
    summary: Summary, label: str, draws: Sequence[str], metric: str = "auroc", *, resamples: int = RESAMPLES
) -> Noise:
    """Take the noise of a method apart.

    Args:
        summary: Of one or more trainings.
        label: The method.
        draws: Labels of the same method on the same networks with other anchors.
        metric: Of detection.
        resamples: Of the bootstrap over images.
    """
    labels = [label, *draws]
    unknown = [each for each in labels if each not in summary.first.results]
    if unknown:
        raise InputError(f"label and draws must be methods of the summary; got {', '.join(unknown)}")
    values = [  # by training, then by draw
        [evaluation.results[each].mean(metric) for each in labels] for evaluation in summary.evaluations.values()
    ]
    means = [statistics.fmean(row) for row in values]
    within = statistics.fmean(statistics.variance(row) for row in values) if draws else None
    trainings = None
    if len(values) > 1:
        # A mean over D draws still varies by a D-th of the anchors' variance: that much is not the training's.
        own = statistics.variance(means) - (within or 0.0) / len(labels)
        trainings = max(own, 0.0) ** 0.5
    return Noise(
        statistics.fmean(means),
        None if within is None else within**0.5,
        trainings,
        _over_images(summary.first, label, metric, resamples),
    )


def noise_table(summary: Summary, draws: Mapping[str, Sequence[str]], *, resamples: int = RESAMPLES) -> Table:
    """Two rows, of AUROC and FPR95, for each method with other draws of its anchors."""
    rows = []
    for label, others in draws.items():
        for metric in SHOWN:
            found = noise(summary, label, others, metric, resamples=resamples)
            parts = (found.mean, found.anchors, found.trainings, found.images)
            cells = ("" if part is None else f"{100 * part:.2f}" for part in parts)
            rows.append((label, HEADS[metric], *cells))
    number = len(summary.evaluations)
    trained = f"over {number} trainings" if number > 1 else "over trainings (none for one)"
    caption = (
        f"Noise of the mean over {summary.first.over}, in points: its standard deviation over draws of the anchors, "
        f"{trained}, and over redrawn test images."
    )
    return Table(caption, ("method", "metric", "mean", "± anchors", "± training", "± images"), tuple(rows))


def _over_images(evaluation: Evaluation, label: str, metric: str, resamples: int) -> float:
    said, pairs = evaluation.results[label].detections, evaluation.pairs()
    scores = [[said[name].score.double().numpy() for name in evaluation.sets]]
    drawn = redraw(scores, resamples=resamples, pairs=pairs)[:, 0, :, METRICS.index(metric)]  # (resamples, OOD sets)
    return float(np.std(drawn[:, evaluation.averaged].mean(axis=1), ddof=1))
