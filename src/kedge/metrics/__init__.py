"""Metrics: how well scores separate ID from OOD images, and how good the classifier is on ID images.

A larger score means further out of distribution. To add a metric, write its function here and a row of `METRICS`;
evaluations, tables and reports iterate over that table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.checks import at_least, between, shape_of
from kedge.errors import InputError
from kedge.metrics.arrays import Numbers as Numbers
from kedge.metrics.arrays import as_array, class_per_image, labels_of, no_nan, score_per_image
from kedge.metrics.counts import Counts, count
from kedge.metrics.counts import Repeated as Repeated

FULL = 200_000  # distinct scores up to which a bootstrap redraws every one of them
GRID = 20_000  # thresholds that replace a larger number: their spacing is far below the noise of a draw


@dataclass(frozen=True)
class Estimate:
    """A metric's value, and its bootstrap interval if there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Predictions:
    """Labelled images as a metric of the classifier reads them: (N,), (N, C), (N,) and (N,)."""

    label: Numbers
    probability: Numbers
    score: Numbers
    truth: Numbers


@dataclass(frozen=True)
class Metric:
    """A row of `METRICS`.

    Attributes:
        label: The name in tables.
        meaning: One sentence for the reader of a report.
        of_counts: The value of a detection metric, from `Counts`; None for a metric of the classifier.
        of_predictions: The value of a metric of the classifier, which needs labels; None for a detection metric.
        higher_is_better: The direction.
        percent: Whether tables show it times 100.
        interval: Whether a bootstrap interval holds its level.
        shown: Whether summary tables have a column for it.
    """

    label: str
    meaning: str
    of_counts: Callable[[Counts], float] | None = None
    of_predictions: Callable[[Predictions], float] | None = None
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
        """A value, or a deviation, as tables show it."""
        return f"{100 * value if self.percent else value:.{digits}f}"


def auroc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Probability that an OOD image scores above an ID image; a tie counts one half.

    Example:
        >>> auroc([1, 2], [2, 3])
        0.875
    """
    return _auroc(count(id_scores, ood_scores))


def _auroc(counts: Counts) -> float:
    pairs = np.diff(counts.ood) @ (counts.id[1:] + counts.id[:-1])  # twice the ID scores below, once the equal ones
    return int(pairs) / (2 * counts.n * counts.m)


def fpr95(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Share of OOD images accepted by the lowest threshold that accepts at least 95 % of the ID images.

    Example:
        >>> fpr95(range(20), [0, 18, 19, 30])  # 19 of 20 ID scores are 18 or less
        0.5
    """
    return _fpr95(count(id_scores, ood_scores))


def fpr95_ood(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Share of ID images flagged by the highest threshold that flags at least 95 % of the OOD images.

    Several libraries call this one FPR95; the paper's is `fpr95`.

    Example:
        >>> fpr95_ood([-5, 0, 1, 2], range(20))  # 19 of 20 OOD scores are 1 or more
        0.5
    """
    return _fpr95(count(id_scores, ood_scores).mirrored)


def _fpr95(counts: Counts) -> float:
    enough = (95 * counts.n + 99) // 100
    return int(counts.ood[np.searchsorted(counts.id, enough)]) / counts.m


def dtacc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Detection accuracy at the best threshold: the mean of the ID share accepted and the OOD share flagged.

    Example:
        >>> dtacc([1, 2, 3, 4], [4, 5])  # accept up to 3: (3/4 + 1) / 2
        0.875
    """
    return _dtacc(count(id_scores, ood_scores))


def _dtacc(counts: Counts) -> float:
    n, m = counts.n, counts.m
    return (n * m + int((m * counts.id - n * counts.ood).max())) / (2 * n * m)


def aupr_in(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Average precision of finding ID images by a low score; no interpolation.

    Example:
        >>> aupr_in([1, 3], [2, 4, 5])  # precision 1 at score 1, 2/3 at score 3
        0.8333333333333333
    """
    return _aupr_in(count(id_scores, ood_scores))


def aupr_out(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Average precision of finding OOD images by a high score; no interpolation.

    Example:
        >>> aupr_out([1, 2, 4], [3, 5])  # precision 1 at score 5, 2/3 at score 3
        0.8333333333333333
    """
    return _aupr_in(count(id_scores, ood_scores).mirrored)


def _aupr_in(counts: Counts) -> float:
    accepted = np.maximum(counts.id + counts.ood, 1)[1:]  # a resample may accept none at first, and then gains none
    gains = np.diff(counts.id) * (counts.id[1:] / accepted)
    return float(gains.sum()) / counts.n  # a float dot product would wait for BLAS threads, and depend on them


def accuracy(logits_or_labels: Numbers, labels: Numbers) -> float:
    """Share of correct predictions, given as class numbers (N,) or as one value per class (N, C).

    Example:
        >>> accuracy([[2.0, 1.0], [0.0, 3.0]], [0, 0]), accuracy([0, 1, 1, 1], [0, 1, 1, 0])
        (0.5, 0.75)
    """
    predicted = as_array("logits_or_labels", logits_or_labels)
    if predicted.ndim == 2:
        truth = labels_of(labels, *predicted.shape)
        return float(np.mean(no_nan("logits_or_labels", predicted).argmax(axis=-1) == truth))
    predicted = class_per_image("logits_or_labels", predicted)
    return float(np.mean(predicted == labels_of(labels, len(predicted))))


def ece(probabilities: Numbers, labels: Numbers, *, bins: int = 15) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy over equal-width bins of confidence.

    Example:
        >>> ece([[0.75, 0.25], [0.25, 0.75]], [0, 0])  # confidence 75 %, accuracy 50 %
        0.25
    """
    at_least("bins", bins, 1)
    p = no_nan("probabilities", as_array("probabilities", probabilities)).astype(np.float64)
    if p.ndim != 2:
        raise InputError(f"probabilities must be (N, C), got {shape_of(p)}; pass one row per image")
    truth = labels_of(labels, *p.shape)
    low, sums = p.min(), p.sum(axis=-1)
    if low < 0 or not np.allclose(sums, 1, rtol=0, atol=1e-3):
        got = f"values from {low:.4g} and sums from {sums.min():.4g} to {sums.max():.4g}"
        raise InputError(f"probabilities must be at least 0 with rows that sum to 1, got {got}; pass a softmax")
    confidence = p.max(axis=-1)  # (N,)
    edges = np.arange(1, bins) / bins  # the inner ones: bins are (low, high], and rounding above 1 is harmless
    gaps = np.bincount(np.searchsorted(edges, confidence), weights=(p.argmax(axis=-1) == truth) - confidence)
    return float(np.abs(gaps).sum() / len(p))


def aurc(scores: Numbers, right: Numbers) -> float:
    """Area under the risk-coverage curve: the mean error rate when only the images of lowest score are answered.

    The result is the mean over all orders of images with equal scores.

    Args:
        scores: One per image, larger for less trust (N,).
        right: Whether the image was classified correctly (N,).

    Example:
        >>> aurc([1, 2, 3], [True, True, False])  # error rates 0, 0 and 1/3 at coverage 1/3, 2/3 and 1
        0.1111111111111111
    """
    values, correct = score_per_image("scores", scores), as_array("right", right)
    if correct.shape != values.shape or correct.dtype.kind != "b":
        raise InputError(
            f"right must be one truth value per score, {values.shape}; got {correct.dtype} {correct.shape}"
        )
    order = np.argsort(values, kind="stable")
    ranked, wrong = values[order], (~correct[order]).astype(np.float64)
    groups = np.cumsum(np.append(True, ranked[1:] != ranked[:-1])) - 1  # equal scores share a group
    share = np.bincount(groups, wrong) / np.bincount(groups)
    return float((np.cumsum(share[groups]) / np.arange(1, len(wrong) + 1)).mean())


def roc_curve(id_scores: Numbers, ood_scores: Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of ID and of OOD images flagged, from the threshold that flags none to the one that flags all.

    Example:
        >>> roc_curve([1, 2], [2, 3])
        (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]))
    """
    counts = count(id_scores, ood_scores)
    return counts.mirrored.ood / counts.n, counts.mirrored.id / counts.m


METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        "Accuracy",
        "The share of ID test images that are classified correctly.",
        of_predictions=lambda p: accuracy(p.label, p.truth),
    ),
    "auroc": Metric("AUROC", "The probability that an OOD image scores above an ID image: 50 % is guessing.", _auroc),
    "fpr95": Metric(
        "FPR95",
        "The share of OOD images that are accepted when 95 % of the ID images are.",
        _fpr95,
        higher_is_better=False,
    ),
    "dtacc": Metric(
        "DTACC",
        "The mean of ID accepted and OOD flagged at the best threshold in hindsight. It has no interval: a best "
        "threshold is biased upwards, and bootstrap intervals of it cover the truth too rarely.",
        _dtacc,
        interval=False,
    ),
    "aupr_in": Metric(
        "AUPR-in", "Average precision of finding ID images by a low score; depends on the sets' sizes.", _aupr_in
    ),
    "aupr_out": Metric(
        "AUPR-out",
        "Average precision of finding OOD images by a high score; depends on the sets' sizes.",
        lambda counts: _aupr_in(counts.mirrored),
    ),
    "fpr95_ood": Metric(
        "FPR95 (OOD)",
        "The share of ID images that are flagged when 95 % of the OOD images are.",
        lambda counts: _fpr95(counts.mirrored),
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
        of_predictions=lambda p: aurc(p.score, as_array("label", p.label) == as_array("truth", p.truth)),
        higher_is_better=False,
    ),
}
DETECTION_METRICS = {name: metric.of_counts for name, metric in METRICS.items() if metric.of_counts is not None}
CLASSIFIER_METRICS = {
    name: metric.of_predictions for name, metric in METRICS.items() if metric.of_predictions is not None
}


def detection_metrics(
    id_scores: Numbers, ood_scores: Numbers, *, resamples: int = 0, level: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """All detection metrics from one sort, with bootstrap intervals if ``resamples`` is above zero.

    Args:
        id_scores: One score per in-distribution image.
        ood_scores: One score per out-of-distribution image.
        resamples: How often ID and OOD scores are each redrawn with replacement; above 200,000 distinct scores they
            are redrawn in groups of neighbors, so that the time of a draw stays constant.
        level: Share of the resamples that the percentile interval spans.
        seed: The same seed gives the same interval.

    Returns:
        An `Estimate` by the name of each metric's function. ``dtacc`` has no interval: the best threshold of a sample
        is biased upwards, and more so on a resample, so that percentile intervals at 95 % cover the truth in 53 to
        92 % of samples and bias-corrected ones in 81 to 94 %. Intervals of ``aupr`` on few scores lean upwards.

    Example:
        >>> metrics = detection_metrics([1, 2, 3], [3, 4, 5], resamples=200)
        >>> f"{metrics['auroc'].value:.3f}", metrics["auroc"].high
        ('0.944', 1.0)
    """
    at_least("resamples", resamples, 0)
    at_least("seed", seed, 0)
    between("level", level, 0, 1, open_ends=True)
    counts = count(id_scores, ood_scores)
    estimates = {name: Estimate(metric(counts)) for name, metric in DETECTION_METRICS.items()}
    if resamples == 0:
        return estimates
    bounded = {name: metric for name, metric in DETECTION_METRICS.items() if METRICS[name].interval}
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
