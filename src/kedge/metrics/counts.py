"""Cumulative counts at the distinct scores: every detection metric is a short function of them.

So ties are exact, all metrics cost one sort, and a bootstrap needs none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kedge.metrics.arrays import Numbers, right_per_image, score_per_image


@dataclass(frozen=True)
class Counts:
    """How many images are accepted (score at or below the threshold): none first, then at each distinct score upwards.

    Attributes:
        id: ID images, (T + 1,).
        ood: OOD images, (T + 1,).
        scores: The distinct scores, ascending, (T,); None where only their order is known.
        right: ID images that are known to be classified correctly, (T + 1,); None without labels.
        wrong: ID images that are known to be misclassified, (T + 1,); None without labels.
    """

    id: NDArray[np.int64]
    ood: NDArray[np.int64]
    scores: NDArray[np.float64] | None = None
    right: NDArray[np.int64] | None = None
    wrong: NDArray[np.int64] | None = None

    @property
    def n(self) -> int:
        """Number of ID scores."""
        return int(self.id[-1])

    @property
    def m(self) -> int:
        """Number of OOD scores."""
        return int(self.ood[-1])

    @cached_property
    def lead(self) -> NDArray[np.int64]:
        """By how much the share of ID images accepted is above that of OOD images, times n and m, (T + 1,)."""
        return self.m * self.id - self.n * self.ood

    @property
    def labelled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``right`` and ``wrong``, for metrics that need labels."""
        assert self.right is not None
        assert self.wrong is not None
        return self.right, self.wrong

    @cached_property
    def mirrored(self) -> Self:
        """The same problem with negated scores and exchanged roles: here "accepted ID" is "flagged OOD"."""
        return type(self)(id=(self.m - self.ood)[::-1], ood=(self.n - self.id)[::-1])

    def thinned(self, points: int) -> Self:
        """The same counts at that many thresholds, with about equally many scores between them."""
        accepted = self.id + self.ood
        places = np.unique(np.searchsorted(accepted, np.linspace(0, accepted[-1], points + 1)))
        right, wrong = (None if part is None else part[places] for part in (self.right, self.wrong))
        scores = None if self.scores is None else self.scores[places[1:] - 1]
        return type(self)(self.id[places], self.ood[places], scores, right, wrong)

    def resampled(self, rng: np.random.Generator, *, grouped: bool = False) -> Self:
        """Redraw ID and OOD images with replacement; ``grouped`` takes time in the thresholds, not in the images."""
        if grouped:
            inside, outside = (
                np.append(0, rng.multinomial(part[-1], np.diff(part) / part[-1]).cumsum())
                for part in (self.id, self.ood)
            )
            return type(self)(inside, outside, self.scores, *self._split(inside, rng.spawn(1)[0]))
        ranks, outer = (  # how many draws are below each rank
            np.append(0, np.bincount(rng.integers(size, size=size), minlength=size).cumsum())
            for size in (self.n, self.m)
        )
        right = wrong = None
        if self.right is not None and self.wrong is not None:  # of equal scores, the right ones have the first ranks
            first = self.id[:-1] + np.diff(self.right)
            second = first + np.diff(self.wrong)
            right = np.append(0, (ranks[first] - ranks[self.id[:-1]]).cumsum())
            wrong = np.append(0, (ranks[second] - ranks[first]).cumsum())
        return type(self)(ranks[self.id], outer[self.ood], self.scores, right, wrong)

    def _split(self, inside: NDArray[np.int64], rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """How many of the ID images that were drawn in groups are right, and how many wrong; nothing without labels."""
        left, size = np.diff(inside), np.diff(self.id)
        for part in (self.right, self.wrong):
            if part is not None:
                drawn = rng.binomial(left, np.diff(part) / np.maximum(size, 1))
                yield np.append(0, drawn.cumsum())
                left, size = left - drawn, size - np.diff(part)


def count(id_scores: Numbers, ood_scores: Numbers, right: Numbers | None = None) -> Counts:
    """Count the accepted ID and OOD images at each distinct score; ``right`` is that of `right_per_image`."""
    inside, outside = score_per_image("id_scores", id_scores), score_per_image("ood_scores", ood_scores)
    n, known = len(inside), None
    if right is None:
        inside = np.sort(inside)
    else:
        order = np.argsort(inside, kind="stable")
        inside, known = inside[order], right_per_image(right, n)[order]
    both = np.concatenate([inside, np.sort(outside)])
    order = np.argsort(both, kind="stable")  # two sorted runs: the stable sort merges them in linear time
    both = both[order]
    last = np.flatnonzero(np.append(both[1:] != both[:-1], True))  # the last place of each distinct score
    ood = np.append(0, np.cumsum(order >= n)[last])
    id_ = np.append(0, last + 1) - ood
    parts = () if known is None else (np.append(0, np.cumsum(known == value))[id_] for value in (1, 0))
    return Counts(id_, ood, both[last].astype(np.float64, copy=False), *parts)


class Repeated:
    """Counts of samples in which each image stands any number of times: sorted once, then linear time per sample.

    Example:
        >>> Repeated([1, 2, 9], [2, 3])(np.array([1, 1, 0]), np.array([1, 1])).id
        array([0, 1, 2, 2, 2])
    """

    def __init__(self, id_scores: Numbers, ood_scores: Numbers, right: Numbers | None = None) -> None:
        self._counts = count(id_scores, ood_scores, right)
        self._orders = tuple(
            np.argsort(score_per_image("scores", scores), kind="stable") for scores in (id_scores, ood_scores)
        )
        self._right = None if right is None else right_per_image(right, self._counts.n)[self._orders[0]]

    def __call__(self, id_times: NDArray[np.int64], ood_times: NDArray[np.int64]) -> Counts:
        """Counts when each image stands that many times; at least one on either side must."""
        times, outer = (each[order] for each, order in zip((id_times, ood_times), self._orders, strict=True))
        parts = [times] if self._right is None else [times, times * (self._right == 1), times * (self._right == 0)]
        inside, *known = (np.append(0, part.cumsum())[self._counts.id] for part in parts)
        return Counts(inside, np.append(0, outer.cumsum())[self._counts.ood], self._counts.scores, *known)
