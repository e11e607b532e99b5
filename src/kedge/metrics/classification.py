"""The classifier itself on in-distribution images: accuracy, calibration, and how far its scores tell when it errs."""

import numpy as np

from kedge.checks import at_least, shape_of
from kedge.errors import InputError
from kedge.metrics.arrays import Numbers, as_array, class_numbers, no_nan, sorted_scores, whole


def accuracy(logits_or_labels: Numbers, labels: Numbers) -> float:
    """Share of right predictions, given as class numbers (N,) or as one value per class (N, C).

    Example:
        >>> accuracy([[2.0, 1.0], [0.0, 3.0]], [0, 0]), accuracy([0, 1, 1, 1], [0, 1, 1, 0])
        (0.5, 0.75)
    """
    predicted = as_array("logits_or_labels", logits_or_labels)
    if predicted.ndim == 2:
        true = class_numbers(labels, *predicted.shape)
        return float(np.mean(no_nan("logits_or_labels", predicted).argmax(axis=-1) == true))
    predicted = whole("logits_or_labels", predicted)
    return float(np.mean(predicted == class_numbers(labels, len(predicted))))


def ece(probabilities: Numbers, labels: Numbers, *, bins: int = 15) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy over equal-width bins of confidence.

    Example:
        >>> ece([[0.75, 0.25], [0.25, 0.75]], [0, 0])  # sure to 75 %, right in 50 %
        0.25
    """
    at_least("bins", bins, 1)
    p = no_nan("probabilities", as_array("probabilities", probabilities)).astype(np.float64)
    if p.ndim != 2:
        raise InputError(f"probabilities must be (N, C), got {shape_of(p)}; pass one row per image")
    true = class_numbers(labels, *p.shape)
    low, sums = p.min(), p.sum(axis=-1)
    if low < 0 or not np.allclose(sums, 1, rtol=0, atol=1e-3):
        came = f"values from {low:.4g} and sums from {sums.min():.4g} to {sums.max():.4g}"
        raise InputError(f"probabilities must be at least 0 with rows that sum to 1, got {came}; pass a softmax")
    confidence = p.max(axis=-1)  # (N,)
    edges = np.arange(1, bins) / bins  # the inner ones: bins are (low, high], and rounding above 1 is harmless
    gaps = np.bincount(np.searchsorted(edges, confidence), weights=(p.argmax(axis=-1) == true) - confidence)
    return float(np.abs(gaps).sum() / len(p))


def aurc(scores: Numbers, right: Numbers) -> float:
    """Area under the risk-coverage curve: the mean error rate when only the images of lowest score are answered.

    Images of equal score are answered in any order, of which the mean is taken.

    Args:
        scores: One per image, larger for less trust (N,).
        right: Whether the image was classified rightly (N,).

    Example:
        >>> aurc([1, 2, 3], [True, True, False])  # error rates 0, 0 and 1/3 at coverage 1/3, 2/3 and 1
        0.1111111111111111
    """
    sorted_scores("scores", scores)  # checks them
    order = np.argsort(values := as_array("scores", scores), kind="stable")
    correct = as_array("right", right)
    if correct.shape != values.shape or correct.dtype.kind != "b":
        raise InputError(
            f"right must be one truth value per score, {values.shape}; got {correct.dtype} {correct.shape}"
        )
    ranked, wrong = values[order], (~correct[order]).astype(np.float64)
    groups = np.cumsum(np.append(True, ranked[1:] != ranked[:-1])) - 1  # equal scores share a group
    share = np.bincount(groups, wrong) / np.bincount(groups)
    return float((np.cumsum(share[groups]) / np.arange(1, len(wrong) + 1)).mean())
