"""The classifier on ID images: accuracy, and how far its probabilities can be believed."""

import numpy as np
from numpy.typing import NDArray

from kedge.checks import at_least
from kedge.metrics.arrays import Numbers, as_array, class_per_image, labels_of, no_nan, probability_per_class

CELLS = 2**15  # of confidence, for kernel smoothing: far finer than any bandwidth that a test set can tell from zero


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
    confidence, gaps = _confidence_gaps(probabilities, labels)
    edges = np.arange(1, bins) / bins  # the inner ones: bins are (low, high], and rounding above 1 is harmless
    binned = np.bincount(np.searchsorted(edges, confidence), weights=gaps)
    return float(np.abs(binned).sum() / len(gaps))


def smooth_ece(probabilities: Numbers, labels: Numbers) -> float:
    """Smooth ECE: the gap between confidence and accuracy under a Gaussian kernel instead of bins.

    With the confidences ``c_i`` and the gaps ``g_i = 1[right] - c_i``,
    ``smECE(s) = integral over t in 0..1 of |mean_i g_i K_s(t, c_i)|``, where ``K_s`` is the Gaussian kernel of standard
    deviation ``s``, reflected at 0 and 1. The result is the one bandwidth with ``smECE(s) = s``, so there are no bins
    to choose. https://arxiv.org/abs/2309.12236

    Example:
        >>> round(smooth_ece([[1.0, 0.0], [0.0, 1.0]], [0, 0]), 4)  # both confidences 1, accuracy one half
        0.5
    """
    confidence, gaps = _confidence_gaps(probabilities, labels)
    place = confidence.clip(0, 1) * CELLS - 0.5  # in cells, whose centers are at 0, 1, 2, ...
    below = np.floor(place)
    share = place - below
    mass = np.zeros(CELLS)
    for cell, weight in ((below, 1 - share), (below + 1, share)):  # linear between the two nearest centers
        mass += np.bincount(cell.clip(0, CELLS - 1).astype(np.int64), weight * gaps, minlength=CELLS)
    # Reflection makes a period of 2, in which the kernel is a factor for each frequency.
    waves = np.fft.rfft(np.concatenate([mass, mass[::-1]]) / len(gaps))
    frequency = np.pi * np.arange(len(waves))
    low, high = 0.0, 1.0
    while high - low > 1e-7:  # smECE falls with the bandwidth
        bandwidth = (low + high) / 2
        smooth = np.fft.irfft(waves * np.exp(-((bandwidth * frequency) ** 2) / 2))[:CELLS]
        low, high = (bandwidth, high) if np.abs(smooth).sum() > bandwidth else (low, bandwidth)
    return high


def brier(probabilities: Numbers, labels: Numbers) -> float:
    """Brier score: the mean squared distance between the probabilities and the true class as one-hot, from 0 to 2.

    Example:
        >>> brier([[0.75, 0.25], [0.5, 0.5]], [0, 0])  # (0.125 + 0.5) / 2
        0.3125
    """
    p, truth = probability_per_class(probabilities, labels)
    own = p[np.arange(len(p)), truth].astype(np.float64)
    return float(np.mean(np.square(p, dtype=np.float64).sum(axis=-1) + 1 - 2 * own))


def nll(probabilities: Numbers, labels: Numbers) -> float:
    """Negative log likelihood: the mean of ``-log`` of the true class's probability, in nats.

    A probability of zero counts as the smallest normal number of its type (1.2e-38 for float32): the result is finite.

    Example:
        >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 0]), 4)  # (log 2 + log 4) / 2
        1.0397
    """
    p, truth = probability_per_class(probabilities, labels)
    own = p[np.arange(len(p)), truth]
    smallest = np.finfo(own.dtype if own.dtype.kind == "f" else np.float64).tiny
    return float(-np.log(np.maximum(own, smallest).astype(np.float64)).mean())


def _confidence_gaps(probabilities: Numbers, labels: Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The confidence of each prediction, and 1 for a correct one, else 0, minus it, (N,) each."""
    p, truth = probability_per_class(probabilities, labels)
    confidence = p.max(axis=-1).astype(np.float64)
    return confidence, (p.argmax(axis=-1) == truth) - confidence
