"""How well scores separate in-distribution (ID) from out-of-distribution (OOD) images.

A larger score means further out of distribution. Every detection metric is a short function of the same cumulative
counts at the distinct scores, so ties are exact, six metrics cost one sort, and a bootstrap needs none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kedge.checks import at_least, between
from kedge.metrics.arrays import Numbers, as_array, sorted_scores

FULL = 200_000  # distinct scores up to which a bootstrap redraws every one of them
GRID = 20_000  # thresholds that stand for more: what lies between two of them is far less than what a draw changes


@dataclass(frozen=True)
class Estimate:
    """A metric's value and, if one was asked for, its bootstrap interval.

    Example:
        >>> Estimate(0.9, low=0.88, high=0.93)
        Estimate(value=0.9, low=0.88, high=0.93)
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class _Counts:
    """How many scores are accepted (at or below the threshold): none first, then at each distinct score upwards."""

    id: NDArray[np.int64]
    ood: NDArray[np.int64]

    @property
    def n(self) -> int:
        return int(self.id[-1])

    @property
    def m(self) -> int:
        return int(self.ood[-1])

    @cached_property
    def mirrored(self) -> Self:
        """The same problem with negated scores and exchanged roles: here "accepted ID" is "flagged OOD"."""
        return type(self)(id=(self.m - self.ood)[::-1], ood=(self.n - self.id)[::-1])

    def resampled(self, rng: np.random.Generator) -> Self:
        """Draw ID and OOD scores anew, each with replacement; a score's rank stands for it, so nothing is sorted."""

        def redraw(accepted: NDArray[np.int64]) -> NDArray[np.int64]:
            size = int(accepted[-1])
            drawn = np.bincount(rng.integers(size, size=size), minlength=size)  # how often each rank
            return np.append(0, drawn.cumsum())[accepted]

        return type(self)(id=redraw(self.id), ood=redraw(self.ood))

    def thinned(self, points: int) -> Self:
        """The same counts at so many thresholds, with as good as equally many scores between them."""
        accepted = self.id + self.ood
        places = np.unique(np.searchsorted(accepted, np.linspace(0, accepted[-1], points + 1)))
        return type(self)(id=self.id[places], ood=self.ood[places])

    def regrouped(self, rng: np.random.Generator) -> Self:
        """Draw ID and OOD scores anew as `resampled` does, in a time that depends on the thresholds alone."""

        def redraw(accepted: NDArray[np.int64]) -> NDArray[np.int64]:
            size = int(accepted[-1])
            return np.append(0, rng.multinomial(size, np.diff(accepted) / size).cumsum())

        return type(self)(id=redraw(self.id), ood=redraw(self.ood))


def _count(id_scores: Numbers, ood_scores: Numbers) -> _Counts:
    inside, outside = sorted_scores("id_scores", id_scores), sorted_scores("ood_scores", ood_scores)
    both = np.concatenate([inside, outside])
    order = np.argsort(both, kind="stable")  # two sorted runs: the stable sort merges them in linear time
    both = both[order]
    last = np.flatnonzero(np.append(both[1:] != both[:-1], True))  # the last place of each distinct score
    ood = np.zeros(len(last) + 1, dtype=np.int64)
    ood[1:] = np.cumsum(order >= len(inside))[last]
    accepted = np.zeros_like(ood)
    accepted[1:] = last + 1
    return _Counts(id=accepted - ood, ood=ood)


def _auroc(counts: _Counts) -> float:
    pairs = np.diff(counts.ood) @ (counts.id[1:] + counts.id[:-1])  # twice the ID scores below, once the equal ones
    return int(pairs) / (2 * counts.n * counts.m)


def _aupr_in(counts: _Counts) -> float:
    accepted = np.maximum(counts.id + counts.ood, 1)[1:]  # a resample may have none yet; then it gains none either
    gains = np.diff(counts.id) * (counts.id[1:] / accepted)
    return float(gains.sum()) / counts.n  # a float dot product would wait for BLAS threads, and depend on them


def _fpr95(counts: _Counts) -> float:
    enough = (95 * counts.n + 99) // 100
    return int(counts.ood[np.searchsorted(counts.id, enough)]) / counts.m


def _dtacc(counts: _Counts) -> float:
    n, m = counts.n, counts.m
    return (n * m + int((m * counts.id - n * counts.ood).max())) / (2 * n * m)


_METRICS: dict[str, Callable[[_Counts], float]] = {
    "auroc": _auroc,
    "aupr_in": _aupr_in,
    "aupr_out": lambda counts: _aupr_in(counts.mirrored),
    "fpr95": _fpr95,
    "fpr95_ood": lambda counts: _fpr95(counts.mirrored),
    "dtacc": _dtacc,
}


def auroc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Chance that an OOD image scores above an ID image; a tie counts one half.

    Example:
        >>> auroc([1, 2], [2, 3])
        0.875
    """
    return _auroc(_count(id_scores, ood_scores))


def aupr_in(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Average precision of finding ID images by a low score; no interpolation.

    Example:
        >>> aupr_in([1, 3], [2, 4, 5])  # precision 1 at score 1, 2/3 at score 3
        0.8333333333333333
    """
    return _aupr_in(_count(id_scores, ood_scores))


def aupr_out(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Average precision of finding OOD images by a high score; no interpolation.

    Example:
        >>> aupr_out([1, 2, 4], [3, 5])  # precision 1 at score 5, 2/3 at score 3
        0.8333333333333333
    """
    return _aupr_in(_count(id_scores, ood_scores).mirrored)


def fpr95(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Share of OOD images accepted by the lowest threshold that accepts at least 95 % of the ID images.

    Example:
        >>> fpr95(range(20), [0, 18, 19, 30])  # 19 of 20 ID scores are 18 or less
        0.5
    """
    return _fpr95(_count(id_scores, ood_scores))


def fpr95_ood(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Share of ID images flagged by the highest threshold that flags at least 95 % of the OOD images.

    Several libraries call this one FPR95; the paper's is `fpr95`.

    Example:
        >>> fpr95_ood([-5, 0, 1, 2], range(20))  # 19 of 20 OOD scores are 1 or more
        0.5
    """
    return _fpr95(_count(id_scores, ood_scores).mirrored)


def dtacc(id_scores: Numbers, ood_scores: Numbers) -> float:
    """Detection accuracy at the best threshold: the mean of the ID share accepted and the OOD share flagged.

    Example:
        >>> dtacc([1, 2, 3, 4], [4, 5])  # accept up to 3: (3/4 + 1) / 2
        0.875
    """
    return _dtacc(_count(id_scores, ood_scores))


def roc_curve(id_scores: Numbers, ood_scores: Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of ID and of OOD images flagged, from the threshold that flags none to the one that flags all.

    Example:
        >>> roc_curve([1, 2], [2, 3])
        (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]))
    """
    counts = _count(id_scores, ood_scores)
    return counts.mirrored.ood / counts.n, counts.mirrored.id / counts.m


class Repeated:
    """The detection metrics of a sample in which every image may stand several times, or not at all.

    The scores are sorted once; each sample after that takes linear time.

    Args:
        id_scores: One score per in-distribution image.
        ood_scores: One score per out-of-distribution image.

    Example:
        >>> Repeated([1, 2, 9], [2, 3])(np.array([1, 1, 0]), np.array([1, 1]))["auroc"]
        0.875
    """

    def __init__(self, id_scores: Numbers, ood_scores: Numbers) -> None:
        self._counts = _count(id_scores, ood_scores)
        self._orders = tuple(
            np.argsort(as_array(name, scores), kind="stable")
            for name, scores in (("id_scores", id_scores), ("ood_scores", ood_scores))
        )

    def __call__(self, id_times: NDArray[np.int64], ood_times: NDArray[np.int64]) -> dict[str, float]:
        """The metrics when each image stands so many times; at least one on either side must."""
        inside, outside = (
            np.append(0, times[order].cumsum())
            for times, order in zip((id_times, ood_times), self._orders, strict=True)
        )
        counts = _Counts(id=inside[self._counts.id], ood=outside[self._counts.ood])
        return {name: metric(counts) for name, metric in _METRICS.items()}


def detection_metrics(
    id_scores: Numbers, ood_scores: Numbers, *, resamples: int = 0, level: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """All six detection metrics from one sort, with bootstrap intervals if ``resamples`` is above zero.

    Args:
        id_scores: One score per in-distribution image.
        ood_scores: One score per out-of-distribution image.
        resamples: How often ID and OOD scores are each redrawn with replacement; of more than 200,000 distinct scores,
            in groups of neighbours, so that the time of a draw does not grow with them.
        level: Share of the resamples that the percentile interval spans.
        seed: The same seed gives the same interval.

    Returns:
        An `Estimate` by the name of each metric's function. A best threshold and a precision look better on a
        resample than they are, so on few scores the intervals of ``dtacc`` and ``aupr`` lean upwards.

    Example:
        >>> metrics = detection_metrics([1, 2, 3], [3, 4, 5], resamples=200)
        >>> f"{metrics['auroc'].value:.3f}", metrics["auroc"].high
        ('0.944', 1.0)
    """
    at_least("resamples", resamples, 0)
    at_least("seed", seed, 0)
    between("level", level, 0, 1, open_ends=True)
    counts = _count(id_scores, ood_scores)
    values = {name: metric(counts) for name, metric in _METRICS.items()}
    if resamples == 0:
        return {name: Estimate(value) for name, value in values.items()}
    rng = np.random.default_rng(seed)
    many = len(counts.id) > FULL
    base = counts.thinned(GRID) if many else counts
    redrawn = (base.regrouped(rng) if many else base.resampled(rng) for _ in range(resamples))
    drawn = np.array([[metric(each) for metric in _METRICS.values()] for each in redrawn])  # (resamples, 6)
    if many:  # a threshold of few to choose from lies a little off the best one, in the sample as in every draw
        drawn += [value - metric(base) for value, metric in zip(values.values(), _METRICS.values(), strict=True)]
    lows, highs = np.quantile(drawn.clip(0, 1), [(1 - level) / 2, (1 + level) / 2], axis=0)  # (6,) each
    return {
        name: Estimate(value, float(low), float(high))
        for (name, value), low, high in zip(values.items(), lows, highs, strict=True)
    }
