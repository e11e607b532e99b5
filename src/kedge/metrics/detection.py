"""Detection: how well scores separate ID from OOD images.

Each metric has two functions: of scores, and (``_of``) of the counts that all metrics share.
"""

import numpy as np
from numpy.typing import NDArray

from kedge.metrics.arrays import Numbers
from kedge.metrics.counts import Counts, count


def auroc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Probability that an OOD image scores above an ID image; a tie counts one half.

    Example:
        >>> auroc([1, 2], [2, 3])
        0.875
    """
    return auroc_of(count(id_scores, ood_scores))


def auroc_of(counts: Counts) -> float:
    """`auroc`."""
    pairs = np.diff(counts.ood) @ (counts.id[1:] + counts.id[:-1])  # twice the ID scores below, once the equal ones
    return int(pairs) / (2 * counts.n * counts.m)


def fpr95(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Share of OOD images accepted by the lowest threshold that accepts at least 95 % of the ID images.

    Example:
        >>> fpr95(range(20), [0, 18, 19, 30])  # 19 of 20 ID scores are 18 or less
        0.5
    """
    return fpr95_of(count(id_scores, ood_scores))


def fpr95_ood(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Share of ID images flagged by the highest threshold that flags at least 95 % of the OOD images.

    Several libraries call this one FPR95; the paper's is `fpr95`.

    Example:
        >>> fpr95_ood([-5, 0, 1, 2], range(20))  # 19 of 20 OOD scores are 1 or more
        0.5
    """
    return fpr95_of(count(id_scores, ood_scores).mirrored)


def fpr95_of(counts: Counts) -> float:
    """`fpr95`."""
    enough = (95 * counts.n + 99) // 100
    return int(counts.ood[np.searchsorted(counts.id, enough)]) / counts.m


def dtacc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Detection accuracy at the best threshold: the mean of the ID share accepted and the OOD share flagged.

    Example:
        >>> dtacc([1, 2, 3, 4], [4, 5])  # accept up to 3: (3/4 + 1) / 2
        0.875
    """
    return dtacc_of(count(id_scores, ood_scores))


def dtacc_of(counts: Counts) -> float:
    """`dtacc`."""
    n, m = counts.n, counts.m
    return (n * m + int(counts.lead.max())) / (2 * n * m)


def aupr_in(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Average precision of finding ID images by a low score; no interpolation.

    Example:
        >>> aupr_in([1, 3], [2, 4, 5])  # precision 1 at score 1, 2/3 at score 3
        0.8333333333333333
    """
    return aupr_in_of(count(id_scores, ood_scores))


def aupr_out(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Average precision of finding OOD images by a high score; no interpolation.

    Example:
        >>> aupr_out([1, 2, 4], [3, 5])  # precision 1 at score 5, 2/3 at score 3
        0.8333333333333333
    """
    return aupr_in_of(count(id_scores, ood_scores).mirrored)


def aupr_in_of(counts: Counts) -> float:
    """`aupr_in`."""
    accepted = np.maximum(counts.id + counts.ood, 1)[1:]  # a resample may accept none at first, and then gains none
    gains = np.diff(counts.id) * (counts.id[1:] / accepted)
    return float(gains.sum()) / counts.n  # a float dot product would wait for BLAS threads, and depend on them


def autc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Area under the threshold curve: the mean of the two error rates over all thresholds in the range of the scores.

    With scores scaled to 0..1, ``(integral of FPR(t) + integral of FNR(t)) / 2``, where FPR is the share of ID images
    above t and FNR the share of OOD images up to t. It rewards a wide gap between the two sets, and depends on the
    scale of the scores: a monotone transform or one extreme image changes it. Infinite scores are the limit of ever
    larger ones. https://arxiv.org/abs/2306.14658

    Example:
        >>> autc([0, 1], [3, 4]), autc([0, 4], [4, 4])
        (0.125, 0.25)
    """
    return autc_of(count(id_scores, ood_scores))


def autc_of(counts: Counts) -> float:
    """`autc`."""
    assert counts.scores is not None
    # A resample may lack the lowest and the highest scores.
    low = min(np.searchsorted(part, 1) for part in (counts.id, counts.ood))
    high = max(np.searchsorted(part, part[-1]) for part in (counts.id, counts.ood))
    scores = counts.scores[low - 1 : high]
    if np.isinf(scores[0]) or np.isinf(scores[-1]):
        scores = np.isposinf(scores).astype(np.float64) - np.isneginf(scores)
    span = scores[-1] - scores[0]
    if span == 0:
        return 0.5
    between = np.diff(scores) * counts.lead[low:high]  # each pair of neighboring scores
    return float(0.5 - between.sum() / span / (2 * counts.n * counts.m))


def roc_curve(id_scores: Numbers, ood_scores: Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of ID and of OOD images flagged, from the threshold that flags none to the one that flags all.

    Example:
        >>> roc_curve([1, 2], [2, 3])
        (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]))
    """
    counts = count(id_scores, ood_scores)
    return counts.mirrored.ood / counts.n, counts.mirrored.id / counts.m
