"""The table of metrics: for each its name, its meaning, its direction, and how it is computed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.metrics.arrays import Numbers, as_array
from kedge.metrics.classification import accuracy, brier, ece, nll, smooth_ece
from kedge.metrics.counts import Counts
from kedge.metrics.detection import aupr_in_of, auroc_of, autc_of, dtacc_of, fpr95_of
from kedge.metrics.selective import augrc, aurc, oscr_of, scod_aurc_of


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
