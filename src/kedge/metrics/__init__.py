"""Metrics: how well scores separate ID from OOD images, how good the classifier is on ID images, and both together.

A larger score means further out of distribution. To add a metric, write its function in a module of this package and a
row of `METRICS`; evaluations, tables and reports iterate over that table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.checks import at_least, between
from kedge.metrics.arrays import Numbers, as_array
from kedge.metrics.classification import accuracy, brier, ece, nll, smooth_ece
from kedge.metrics.counts import Counts, Repeated, count
from kedge.metrics.detection import aupr_in, aupr_out, auroc, autc, dtacc, fpr95, fpr95_ood, roc_curve

from kedge.metrics.detection import aupr_in_of, auroc_of, autc_of, dtacc_of, fpr95_of  # isort: skip
from kedge.metrics.selective import augrc, aurc, oscr, oscr_of, scod_aurc, scod_aurc_of, scod_risk

__all__ = [
    "CLASSIFIER_METRICS", "COUNTED", "DETECTION_METRICS", "METRICS", "Estimate", "Metric", "Numbers", "Predictions",
    "Repeated", "accuracy", "augrc", "aupr_in", "aupr_out", "aurc", "auroc", "autc", "brier", "detection_metrics",
    "dtacc", "ece", "fpr95", "fpr95_ood", "nll", "oscr", "roc_curve", "scod_aurc", "scod_risk", "smooth_ece",
]  # fmt: skip

FULL = 200_000  # distinct scores up to which a bootstrap redraws every one of them
GRID = 20_000  # thresholds that replace a larger number: their spacing is far below the noise of a draw


class Estimate(float):
    """A metric's value, which is a number, with the ends of its bootstrap interval if there is one.

    Example:
        >>> auroc = Estimate(0.912, 0.905, 0.92)
        >>> auroc, f"{auroc:.1%}", auroc > 0.9
        (0.912 (0.905 to 0.92), '91.2%', True)
    """

    value: float
    low: float | None
    high: float | None

    def __new__(cls, value: float, low: float | None = None, high: float | None = None) -> "Estimate":  # noqa: D102
        self = super().__new__(cls, value)
        self.value, self.low, self.high = float(value), low, high
        return self

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Estimate) else float.__eq__(self, other)

    __hash__ = float.__hash__

    def __repr__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.low is None else f" ({self.low:.4g} to {self.high:.4g})")


@dataclass(frozen=True)
class Predictions:
    """Labelled images as a metric of the classifier reads them: (N,), (N, C), (N,) and (N,)."""

    label: Numbers
    probability: Numbers
    score: Numbers
    truth: Numbers

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each image was classified correctly, (N,)."""
        right: NDArray[np.bool_] = as_array("label", self.label) == as_array("truth", self.truth)
        return right


@dataclass(frozen=True)
class Metric:
    """A row of `METRICS`.

    Attributes:
        label: The name in tables.
        meaning: One sentence for the reader of a report.
        of_counts: The value of a metric of ID and OOD images, from `Counts`; None for a metric of the classifier.
        of_predictions: The value of a metric of the classifier, on labelled ID images; None for the others.
        joint: Whether ``of_counts`` needs to know which ID images are classified correctly.
        ranks: Whether ``of_predictions`` depends on the detector's score.
        higher_is_better: The direction.
        percent: Whether tables show it times 100.
        interval: Whether a bootstrap interval holds its level.
        shown: Whether summary tables have a column for it by default.
    """

    label: str
    meaning: str
    of_counts: Callable[[Counts], float] | None = None
    of_predictions: Callable[[Predictions], float] | None = None
    joint: bool = False
    ranks: bool = False
    higher_is_better: bool = True
    percent: bool = True
    interval: bool = True
    shown: bool = True

    @property
    def head(self) -> str:
        """Label and direction, for the head of a column."""
        return f"{self.label} {'↑' if self.higher_is_better else '↓'}"

    @property
    def better(self) -> str:
        """The direction in a word: higher or lower."""
        return "higher" if self.higher_is_better else "lower"

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 otherwise."""
        return 1 if self.higher_is_better else -1

    def text(self, value: float, digits: int = 1) -> str:
        """A value, or a deviation, as tables show it: ``digits`` are those of a percentage."""
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:.{digits + 2}f}"


METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        "Accuracy",
        "The share of ID test images that are classified correctly.",
        of_predictions=lambda p: accuracy(p.label, p.truth),
    ),
    "auroc": Metric("AUROC", "The probability that an OOD image scores above an ID image: 50 % is guessing.", auroc_of),
    "fpr95": Metric(
        "FPR95",
        "The share of OOD images that are accepted when 95 % of the ID images are.",
        fpr95_of,
        higher_is_better=False,
    ),
    "dtacc": Metric(
        "DTACC",
        "The mean of ID accepted and OOD flagged at the best threshold in hindsight. It has no interval: a best "
        "threshold is biased upwards, and bootstrap intervals of it cover the truth too rarely.",
        dtacc_of,
        interval=False,
    ),
    "aupr_in": Metric(
        "AUPR-in", "Average precision of finding ID images by a low score; depends on the sets' sizes.", aupr_in_of
    ),
    "aupr_out": Metric(
        "AUPR-out",
        "Average precision of finding OOD images by a high score; depends on the sets' sizes.",
        lambda counts: aupr_in_of(counts.mirrored),
    ),
    "fpr95_ood": Metric(
        "FPR95 (OOD)",
        "The share of ID images that are flagged when 95 % of the OOD images are.",
        lambda counts: fpr95_of(counts.mirrored),
        higher_is_better=False,
        shown=False,
    ),
    "ece": Metric(
        "ECE",
        "The gap between the confidence of the classifier and its accuracy, on ID images.",
        of_predictions=lambda p: ece(p.probability, p.truth),
        higher_is_better=False,
    ),
    "aurc": Metric(
        "AURC",
        "The mean error rate on ID images over all shares of images kept, those with low scores first.",
        of_predictions=lambda p: aurc(p.score, p.right),
        ranks=True,
        higher_is_better=False,
    ),
    "scod_aurc": Metric(
        "SCOD-AURC",
        "The mean share of errors among the ID and OOD images kept, over all shares of images kept, those with low "
        "scores first; to keep an OOD image is an error. It depends on the sets' sizes.",
        scod_aurc_of,
        joint=True,
        higher_is_better=False,
        shown=False,
    ),
    "oscr": Metric(
        "OSCR",
        "The probability that an ID image is classified correctly and scores below an OOD image.",
        oscr_of,
        joint=True,
        shown=False,
    ),
    "autc": Metric(
        "AUTC",
        "The mean of ID flagged and OOD accepted over all thresholds in the range of the scores. It has no interval: "
        "the range depends on the most extreme images of a sample.",
        autc_of,
        higher_is_better=False,
        interval=False,
        shown=False,
    ),
    "augrc": Metric(
        "AUGRC",
        "The mean share of ID images that are kept and misclassified, over all shares of images kept.",
        of_predictions=lambda p: augrc(p.score, p.right),
        ranks=True,
        higher_is_better=False,
        shown=False,
    ),
    "smooth_ece": Metric(
        "smECE",
        "The gap between confidence and accuracy on ID images, smoothed by a kernel instead of bins.",
        of_predictions=lambda p: smooth_ece(p.probability, p.truth),
        higher_is_better=False,
        shown=False,
    ),
    "brier": Metric(
        "Brier",
        "The squared distance between the probabilities and the true class, on ID images: 0 to 2.",
        of_predictions=lambda p: brier(p.probability, p.truth),
        higher_is_better=False,
        percent=False,
        shown=False,
    ),
    "nll": Metric(
        "NLL",
        "The negative log likelihood of the true class, on ID images, in nats.",
        of_predictions=lambda p: nll(p.probability, p.truth),
        higher_is_better=False,
        percent=False,
        shown=False,
    ),
}
COUNTED = {name: metric.of_counts for name, metric in METRICS.items() if metric.of_counts is not None}
DETECTION_METRICS = {name: metric for name, metric in COUNTED.items() if not METRICS[name].joint}
CLASSIFIER_METRICS = {
    name: metric.of_predictions for name, metric in METRICS.items() if metric.of_predictions is not None
}


def detection_metrics(
    id_scores: Numbers,
    ood_scores: Numbers,
    right: Numbers | None = None,
    *,
    resamples: int = 0,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Estimate]:
    """All metrics of ID against OOD images from one sort, with bootstrap intervals if ``resamples`` is above zero.

    Args:
        id_scores: One score per in-distribution image (N,).
        ood_scores: One score per out-of-distribution image (M,).
        right: Whether each ID image was classified correctly (N,): True or False, or 1, 0, and -1 if it has no label.
            None leaves out the metrics that need it.
        resamples: How often ID and OOD images are each redrawn with replacement; above 200,000 distinct scores they
            are redrawn in groups of neighbors, so that the time of a draw stays constant.
        level: Share of the resamples that the percentile interval spans.
        seed: The same seed gives the same interval.

    Returns:
        An `Estimate` by the name of each metric's function. ``dtacc`` has no interval: the best threshold of a sample
        is biased upwards, and more so on a resample, so that percentile intervals at 95 % cover the truth in 53 to
        92 % of samples and bias-corrected ones in 81 to 94 %. ``autc`` has none either: it depends on the most extreme
        scores, which a bootstrap cannot redraw. Intervals of ``aupr`` on few scores lean upwards.

    Example:
        >>> metrics = detection_metrics([1, 2, 3], [3, 4, 5], resamples=200)
        >>> f"{metrics['auroc'].value:.3f}", metrics["auroc"].high
        ('0.944', 1.0)
    """
    at_least("resamples", resamples, 0)
    at_least("seed", seed, 0)
    between("level", level, 0, 1, open_ends=True)
    counts = count(id_scores, ood_scores, right)
    measured = DETECTION_METRICS if right is None else COUNTED
    estimates = {name: Estimate(metric(counts)) for name, metric in measured.items()}
    if resamples == 0:
        return estimates
    bounded = {name: metric for name, metric in measured.items() if METRICS[name].interval}
    rng = np.random.default_rng(seed)
    grouped = len(counts.id) > FULL
    base = counts.thinned(GRID) if grouped else counts
    redrawn = (base.resampled(rng, grouped=grouped) for _ in range(resamples))
    drawn = np.array([[metric(each) for metric in bounded.values()] for each in redrawn])  # (resamples, metrics)
    if grouped:  # fewer thresholds shift a metric a little, in the sample as in every draw
        drawn += [estimates[name].value - metric(base) for name, metric in bounded.items()]
    lows, highs = np.quantile(drawn.clip(0, 1), [(1 - level) / 2, (1 + level) / 2], axis=0)
    intervals = zip(bounded, lows.tolist(), highs.tolist(), strict=True)
    return estimates | {name: Estimate(estimates[name].value, low, high) for name, low, high in intervals}
