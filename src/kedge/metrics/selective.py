"""Selective classification: errors of the classifier among the images that a detector accepts.

The images of lowest score are answered first, those of equal scores in a random order: a result is the mean over all of
these orders.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.checks import between
from kedge.errors import InputError
from kedge.metrics.arrays import Numbers, as_array, score_per_image
from kedge.metrics.counts import Counts, count


def aurc(scores: Numbers, right: Numbers) -> float:
    """Area under the risk-coverage curve: the mean error rate when only the images of lowest score are answered.

    Args:
        scores: One per image, larger for less trust (N,).
        right: Whether the image was classified correctly (N,).

    Example:
        >>> aurc([1, 2, 3], [True, True, False])  # error rates 0, 0 and 1/3 at coverage 1/3, 2/3 and 1
        0.1111111111111111
    """
    return _mean_risk(*_errors(scores, right))


def augrc(scores: Numbers, right: Numbers) -> float:
    """Area under the generalized risk-coverage curve: the mean share of images that are answered wrongly.

    The generalized risk is the number of errors among the answered images over that of *all* images. Its area over
    coverage, at most 0.5, is the risk of an undetected error when the coverage is random. Unlike `aurc`, it does not
    give the errors of lowest score the most weight. https://arxiv.org/abs/2407.01032

    Args:
        scores: One per image, larger for less trust (N,).
        right: Whether the image was classified correctly (N,).

    Example:
        >>> augrc([1, 2, 3, 4], [True, True, True, False])  # 0 up to coverage 3/4, then up to 1/4
        0.03125
    """
    answered, wrong = _errors(scores, right)
    return float((np.diff(answered) * (wrong[1:] + wrong[:-1])).sum()) / (2 * int(answered[-1]) ** 2)


def scod_risk(
    id_scores: Numbers, ood_scores: Numbers, right: Numbers, *, coverage: float, ood_cost: float = 1.0
) -> float:
    """Risk of selective classification in the presence of OOD images (SCOD), at a coverage.

    Of ID and OOD images together the share ``coverage`` of lowest score is answered. The risk is their mean cost: 0 for
    a correct prediction, 1 for a wrong one, and ``ood_cost`` for any answer to an OOD image: beta of Xia and Bouganis
    (https://arxiv.org/abs/2207.07506). Divided by ``1 + ood_cost`` it is the joint risk of Narasimhan et al. with
    ``c_fn = ood_cost / (1 + ood_cost)`` (https://arxiv.org/abs/2301.12386). It depends on the number of OOD images for
    each ID image.

    Args:
        id_scores: One score per in-distribution image (N,).
        ood_scores: One score per out-of-distribution image (M,).
        right: Whether each ID image was classified correctly (N,); -1 leaves out an image without a label.
        coverage: The share to answer, above 0. Between two images the cost is interpolated.
        ood_cost: The cost of answering an OOD image, where that of a misclassification is 1.

    Example:
        >>> scod_risk([1, 2, 4], [3, 5], [True, False, True], coverage=0.6)  # answers 1, 2 and 3
        0.6666666666666666
    """
    between("coverage", coverage, 0, 1)
    if coverage == 0:
        raise InputError("coverage must be above 0 to answer any image, got 0")
    answered, cost = _joint_cost(count(id_scores, ood_scores, right), ood_cost)
    number = coverage * float(answered[-1])
    return float(np.interp(number, answered, cost)) / number


def scod_aurc(id_scores: Numbers, ood_scores: Numbers, right: Numbers, *, ood_cost: float = 1.0) -> float:
    """Area under the risk-coverage curve of ID and OOD images together: the mean of `scod_risk` over coverage.

    With ``ood_cost=1`` it is `aurc` of all images, where an OOD image is never right.

    Args:
        id_scores: One score per in-distribution image (N,).
        ood_scores: One score per out-of-distribution image (M,).
        right: Whether each ID image was classified correctly (N,); -1 leaves out an image without a label.
        ood_cost: The cost of answering an OOD image, where that of a misclassification is 1.

    Example:
        >>> scod_aurc([1, 2], [3], [True, True])  # risks 0, 0 and 1/3
        0.1111111111111111
    """
    return scod_aurc_of(count(id_scores, ood_scores, right), ood_cost)


def scod_aurc_of(counts: Counts, ood_cost: float = 1.0) -> float:
    """`scod_aurc`."""
    return _mean_risk(*_joint_cost(counts, ood_cost))


def oscr(id_scores: Numbers, ood_scores: Numbers, right: Numbers) -> float:
    """Area under the open-set classification rate curve: ID images accepted and right against OOD images accepted.

    The probability that an ID image is classified correctly and scores below an OOD image, a tie counting one half: the
    AUROC of a perfect classifier, the accuracy of a perfect detector. It does not depend on the number of OOD images or
    of their classes (openness). https://arxiv.org/abs/1811.04110

    Args:
        id_scores: One score per in-distribution image (N,).
        ood_scores: One score per out-of-distribution image (M,).
        right: Whether each ID image was classified correctly (N,); -1 leaves out an image without a label.

    Example:
        >>> oscr([1, 2], [2, 3], [True, False])  # of four pairs the two with the first ID image
        0.5
    """
    return oscr_of(count(id_scores, ood_scores, right))


def oscr_of(counts: Counts) -> float:
    """`oscr`."""
    right, wrong = counts.labelled
    pairs = np.diff(counts.ood) @ (right[1:] + right[:-1])
    return int(pairs) / (2 * max(int(right[-1] + wrong[-1]), 1) * counts.m)  # a resample may lack labels


def _errors(scores: Numbers, right: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many images are answered, and how many of them wrongly: none, then up to each distinct score."""
    values, correct = score_per_image("scores", scores), as_array("right", right)
    if correct.shape != values.shape or correct.dtype.kind != "b":
        raise InputError(
            f"right must be one truth value per score, {values.shape}; got {correct.dtype} {correct.shape}"
        )
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    last = np.append(
        np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1
    )  # the last place of each distinct score
    return np.append(0, last + 1), np.append(0, np.cumsum(~correct[order])[last])


def _joint_cost(counts: Counts, ood_cost: float) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """How many images of either kind are answered, and what they cost."""
    between("ood_cost", ood_cost, 0, float("inf"), open_ends=True)
    right, wrong = counts.labelled
    return right + wrong + counts.ood, wrong + ood_cost * counts.ood


def _mean_risk(answered: NDArray[np.int64], cost: NDArray[Any]) -> float:
    """The mean of cost / answered over 1, 2, ... images answered, where the cost grows evenly over equal scores."""
    size, rise = np.diff(answered), np.diff(cost)
    areas = size * (cost[1:] / np.maximum(answered[1:], 1))  # of one image at a score, or none in a resample
    tied = size > 1
    first, last, each = answered[:-1][tied], answered[1:][tied], rise[tied] / size[tied]
    # The sum over k = first + 1 .. last of (cost + (k - first) * each) / k, with harmonic numbers for that of 1 / k.
    areas[tied] = rise[tied] + (cost[:-1][tied] - first * each) * (_harmonic(last) - _harmonic(first))
    return float(areas.sum()) / int(answered[-1])


def _harmonic(n: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 + 1/2 + ... + 1/n: sums up to 31, then the asymptotic series, whose error is below that of rounding."""
    first = np.append(0.0, np.cumsum(1 / np.arange(1, 32)))
    x = np.maximum(n, 31) + 0.5
    y = 1 / (x * x)
    series = np.euler_gamma + np.log(x) + y * (1 / 24 - y * (7 / 960 - y * (31 / 8064 - y * (127 / 30720))))
    return np.where(n < 32, first[np.minimum(n, 31)], series)
