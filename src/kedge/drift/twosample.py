"""Two-sample tests of windows of scores against calibration scores: p-values for finite samples, with ties.

Letters: T windows of m scores each, n calibration scores, N = n + m. Under the null hypothesis all orders of the N
scores are equally likely; every p-value here is a share of those orders, given the values, ties included.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.drift.arrays import Floats, Ints

MOST_TIES = 1e-4  # share of the rank variance lost to ties, from which on the normal tail is no longer safe
ENOUGH = 50  # permutations that reach the observed sum, after which the p-value is precise enough


@dataclass(frozen=True)
class Ranks:
    """Rank statistics of T windows, each pooled with the same calibration scores."""

    n: int  # calibration scores
    m: int  # scores in a window
    distance: Ints  # (T,), Kolmogorov-Smirnov distance of the distribution functions, times n m: a whole number
    wins: Floats  # (T,), Mann-Whitney statistic: pairs in which the window's score is larger, ties one half
    deviation: Floats  # (T,), standard deviation of ``wins`` over all orders, given the ties
    ties: Floats  # (T,), share of the variance of the ranks that ties remove: 1 if all scores are equal
    ends: NDArray[np.bool_]  # (T, N), whether a place of the pooled scores, in rising order, is the last of its ties


def ranks(windows: Floats, calibration: Floats) -> Ranks:
    """Rank each window (T, m) among the calibration scores (n,), which must be sorted."""
    (T, m), n = windows.shape, len(calibration)
    N = n + m
    pooled = np.concatenate([np.broadcast_to(calibration, (T, n)), windows], axis=1)  # (T, N)
    order = np.argsort(pooled, axis=1, kind="stable")
    pooled = np.take_along_axis(pooled, order, axis=1)
    ends = np.ones((T, N), dtype=np.bool_)
    ends[:, :-1] = pooled[:, 1:] != pooled[:, :-1]
    in_window = np.cumsum(order >= n, axis=1)  # scores of the window among the first 1, 2, ..., N
    gaps = np.abs(N * in_window - m * np.arange(1, N + 1))  # n m times the distance
    twice = np.searchsorted(calibration, windows, "left") + np.searchsorted(calibration, windows, "right")

    row, last = np.nonzero(ends)
    size = np.diff(row * N + last, prepend=-1)  # of each group of ties; the last place of a row always ends one
    ties = np.bincount(row, size.astype(np.float64) ** 3 - size, minlength=T) / (N**3 - N)
    return Ranks(
        n=n,
        m=m,
        distance=np.where(ends, gaps, 0).max(axis=1),
        wins=twice.sum(axis=1) / 2,
        deviation=np.sqrt(np.maximum(1 - ties, 0) * m * n * (N + 1) / 12),
        ties=ties,
        ends=ends,
    )


def p_any(r: Ranks) -> Floats:
    """Exact p-value of each Kolmogorov-Smirnov distance: the share of orders whose distance is at least as large.

    Walks through the pooled scores in rising order and keeps the probability that i of those passed belong to the
    window and the distance was never reached; it can be reached only where a group of ties ends.
    """
    N, i = r.n + r.m, np.arange(r.m + 1)
    at = np.zeros((len(r.distance), r.m + 1))  # (T, m + 1)
    at[:, 0] = 1
    reached = np.zeros_like(at)
    for d in range(1, N + 1):  # scores passed
        next_in_window = at * ((r.m - i) / (N - d + 1))
        at -= next_in_window
        at[:, 1:] += next_in_window[:, :-1]
        if r.ends[:, d - 1].any():
            far = np.abs(N * i - r.m * d) >= r.distance[:, None]
            arrived = at * (far & r.ends[:, d - 1, None])
            reached += arrived
            at -= arrived
    p: Floats = reached.sum(axis=1)
    return np.minimum(p, 1.0)  # a sum of probabilities may round above 1


def p_up(r: Ranks) -> Floats:
    """One-sided normal p-value of Mann-Whitney statistics, with continuity correction; 1 if all scores are equal.

    Conservative without ties, where the tail of the rank sum is thinner than the normal one; with ties the sum may be
    skewed or heavy-tailed: beyond `MOST_TIES` use `p_up_permuted`.
    """
    above = r.wins - r.n * r.m / 2 - 0.5
    z = [a / s if s else -math.inf for a, s in zip(above, r.deviation, strict=True)]
    return np.array([math.erfc(value / math.sqrt(2)) / 2 for value in z])


def p_up_permuted(window: Floats, calibration: Floats, draws: int, rng: np.random.Generator) -> float:
    """Monte Carlo permutation p-value of the rank sum of one window: valid for any ties and any number of draws.

    Stops early once `ENOUGH` permutations reach the observed sum (Besag and Clifford 1991), which keeps it valid.
    """
    values, sizes = np.unique(np.concatenate([calibration, window]), return_counts=True)
    twice_rank = 2 * np.cumsum(sizes) - sizes  # of each distinct value, to be summed in whole numbers
    observed = int(twice_rank[np.searchsorted(values, window)].sum())
    drawn = reached = 0
    while drawn < draws:
        batch = min(drawn + 100, max(1, 1_000_000 // len(values)), draws - drawn)  # most stop within the first
        counts = rng.multivariate_hypergeometric(sizes, len(window), size=batch, method="count")
        hits = np.flatnonzero(counts @ twice_rank >= observed)
        if reached + len(hits) >= ENOUGH:
            return ENOUGH / (drawn + int(hits[ENOUGH - reached - 1]) + 1)
        drawn, reached = drawn + batch, reached + len(hits)
    return (reached + 1) / (draws + 1)
