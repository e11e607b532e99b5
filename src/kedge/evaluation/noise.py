"""How much of a difference is noise: of the anchors drawn, of the training, of the test images."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.errors import InputError
from kedge.evaluation.paired import redrawn_results
from kedge.evaluation.result import Evaluation
from kedge.evaluation.summary import SeedSummary, TextTable
from kedge.metrics import METRICS

RESAMPLES = 200


@dataclass(frozen=True)
class Noise:
    """Standard deviations of a metric's mean over the OOD sets, as shares.

    Attributes:
        mean: Over trainings and draws of anchors.
        anchors: Over draws of anchors for the same network, or None without other draws.
        trainings: Over trainings, less the contribution of the anchors; None for one training.
        images: Over redrawn test images, of the first training.
    """

    mean: float
    anchors: float | None
    trainings: float | None
    images: float


def noise_parts(
    summary: SeedSummary, label: str, draws: Sequence[str], metric: str = "auroc", *, resamples: int = RESAMPLES
) -> Noise:
    """Split the noise of a method into its parts.

    Args:
        summary: Of one or more trainings.
        label: The method.
        draws: Labels of the same method on the same networks with other anchors.
        metric: Of ID against OOD images.
        resamples: Number of bootstrap resamples of the images.
    """
    labels = [label, *draws]
    if unknown := [each for each in labels if each not in summary.first.results]:
        raise InputError(f"label and draws must be methods of the summary; got {', '.join(unknown)}")
    values = [  # by training, then by draw
        [evaluation.results[each].mean(metric) for each in labels] for evaluation in summary.evaluations.values()
    ]
    means = [statistics.fmean(row) for row in values]
    within = statistics.fmean(statistics.variance(row) for row in values) if draws else None
    trainings = None
    if len(values) > 1:
        # A mean over D draws still varies by a D-th of the anchors' variance, which the training does not cause.
        trainings = max(statistics.variance(means) - (within or 0.0) / len(labels), 0.0) ** 0.5
    return Noise(
        statistics.fmean(means),
        None if within is None else within**0.5,
        trainings,
        _over_images(summary.first, label, metric, resamples),
    )


def noise_table(summary: SeedSummary, draws: Mapping[str, Sequence[str]], *, resamples: int = RESAMPLES) -> TextTable:
    """Two rows, of AUROC and FPR95, for each method with other draws of its anchors."""
    rows = []
    for label, others in draws.items():
        for metric in ("auroc", "fpr95"):
            noise = noise_parts(summary, label, others, metric, resamples=resamples)
            parts = (noise.mean, noise.anchors, noise.trainings, noise.images)
            cells = ("" if part is None else METRICS[metric].text(part, 2) for part in parts)
            rows.append((label, METRICS[metric].head, *cells))
    number = len(summary.evaluations)
    trained = f"over {number} trainings" if number > 1 else "over trainings (none for one)"
    caption = (
        f"Noise of the mean over {summary.first.over}, in points: its standard deviation over draws of the anchors, "
        f"{trained}, and over redrawn test images."
    )
    return TextTable(caption, ("method", "metric", "mean", "± anchors", "± training", "± images"), tuple(rows))


def _over_images(evaluation: Evaluation, label: str, metric: str, resamples: int) -> float:
    drawn = redrawn_results(evaluation, [label], [metric], resamples, seed=0)[:, 0, :, 0]
    return float(np.std(drawn[:, evaluation.averaged].mean(axis=1), ddof=1))
