"""Cumulative counts at the distinct scores: every detection metric is a short function of them.

So ties are exact, all metrics cost one sort, and a bootstrap needs none.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kedge.metrics.arrays import Numbers, score_per_image


@dataclass(frozen=True)
class Counts:
    """How many scores are accepted (at or below the threshold): none first, then at each distinct score upwards."""

    id: NDArray[np.int64]
    ood: NDArray[np.int64]

    @property
    def n(self) -> int:
        """Number of ID scores."""
        return int(self.id[-1])

    @property
    def m(self) -> int:
        """Number of OOD scores."""
        return int(self.ood[-1])

    @cached_property
    def mirrored(self) -> Self:
        """The same problem with negated scores and exchanged roles: here "accepted ID" is "flagged OOD"."""
        return type(self)(id=(self.m - self.ood)[::-1], ood=(self.n - self.id)[::-1])

    def thinned(self, points: int) -> Self:
        """The same counts at that many thresholds, with about equally many scores between them."""
        accepted = self.id + self.ood
        places = np.unique(np.searchsorted(accepted, np.linspace(0, accepted[-1], points + 1)))
        return type(self)(id=self.id[places], ood=self.ood[places])

    def resampled(self, rng: np.random.Generator, *, grouped: bool = False) -> Self:
        """Redraw ID and OOD scores with replacement; ``grouped`` takes time in the thresholds, not in the scores."""

        def redraw(accepted: NDArray[np.int64]) -> NDArray[np.int64]:
            size = int(accepted[-1])
            if grouped:
                return np.append(0, rng.multinomial(size, np.diff(accepted) / size).cumsum())
            times = np.bincount(rng.integers(size, size=size), minlength=size)  # how often each rank is drawn
            return np.append(0, times.cumsum())[accepted]

        return type(self)(id=redraw(self.id), ood=redraw(self.ood))


def count(id_scores: Numbers, ood_scores: Numbers) -> Counts:
    """Count the accepted ID and OOD scores at each distinct score."""
    inside, outside = (
        np.sort(score_per_image(name, scores))
        for name, scores in (("id_scores", id_scores), ("ood_scores", ood_scores))
    )
    both = np.concatenate([inside, outside])
    order = np.argsort(both, kind="stable")  # two sorted runs: the stable sort merges them in linear time
    both = both[order]
    last = np.flatnonzero(np.append(both[1:] != both[:-1], True))  # the last place of each distinct score
    ood = np.append(0, np.cumsum(order >= len(inside))[last])
    return Counts(id=np.append(0, last + 1) - ood, ood=ood)


class Repeated:
    """Counts of samples in which each image stands any number of times: sorted once, then linear time per sample.

    Example:
        >>> Repeated([1, 2, 9], [2, 3])(np.array([1, 1, 0]), np.array([1, 1]))
        Counts(id=array([0, 1, 2, 2, 2]), ood=array([0, 0, 1, 2, 2]))
    """

    def __init__(self, id_scores: Numbers, ood_scores: Numbers) -> None:
        self._counts = count(id_scores, ood_scores)
        self._orders = tuple(
            np.argsort(score_per_image("scores", scores), kind="stable") for scores in (id_scores, ood_scores)
        )

    def __call__(self, id_times: NDArray[np.int64], ood_times: NDArray[np.int64]) -> Counts:
        """Counts when each image stands that many times; at least one on either side must."""
        inside, outside = (
            np.append(0, times[order].cumsum())
            for times, order in zip((id_times, ood_times), self._orders, strict=True)
        )
        return Counts(id=inside[self._counts.id], ood=outside[self._counts.ood])
