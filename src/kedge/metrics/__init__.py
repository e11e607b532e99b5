"""Metrics: how well scores separate ID from OOD images, how good the classifier is on ID images, and both together.

A larger score means further out of distribution. To add a metric, write its function in a module of this package and a
row of `METRICS` in `table.py`; evaluations, tables and reports iterate over that table.
"""

import numpy as np

from kedge.checks import at_least, between
from kedge.metrics.arrays import Numbers
from kedge.metrics.classification import accuracy, brier, ece, nll, smooth_ece
from kedge.metrics.counts import Repeated, count
from kedge.metrics.detection import aupr_in, aupr_out, auroc, autc, dtacc, fpr95, fpr95_ood, roc_curve
from kedge.metrics.selective import augrc, aurc, oscr, scod_aurc, scod_risk
from kedge.metrics.table import CLASSIFIER_METRICS, COUNTED, DETECTION_METRICS, METRICS, Metric, Predictions

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
