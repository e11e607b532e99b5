"""The scores before this one: all of them, or how many there were in each cell of a fixed grid."""

from array import array
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.drift.arrays import Floats

CELLS = 1 << 16
LARGEST = 65_504.0  # of float16


def cells(numbers: Floats) -> NDArray[np.int64]:
    """The cell of each number: its float16, counted in ascending order; beyond 65,504 all share the outermost one.

    Example:
        >>> cells(np.array([-1.0, -0.0, 0.0, 1e-7, 1.0])).tolist()
        [17407, 32768, 32768, 32770, 48128]
    """
    half = np.clip(numbers, -LARGEST, LARGEST).astype(np.float16) + np.float16(0)  # of the two zeros the one above
    bits = half.view(np.uint16).astype(np.int64)
    return np.where(bits < CELLS // 2, bits + CELLS // 2, CELLS - 1 - bits)


class Everything:
    """Keeps each score, 8 bytes, in order: making room for one is a move of memory, which grows with them."""

    def __init__(self, scores: Floats) -> None:
        self._scores = array("d", np.sort(scores).tolist())

    def add(self, score: float) -> tuple[int, int, int]:
        """Take in a score; return how many are above it, how many equal it, itself included, and how many there are."""
        low, high = bisect_left(self._scores, score), bisect_right(self._scores, score)
        self._scores.insert(high, score)
        size = len(self._scores)
        return size - 1 - high, high - low + 1, size

    def state(self) -> list[float]:
        """As plain data: the scores, which make it again."""
        return self._scores.tolist()


class Grid:
    """Counts scores by `cells`, in memory and time that do not grow with them; those of one cell count as equal.

    The cells are finest about one score, drawn at random, which is then no part of the past: a grid that came from
    scores of the past would treat them otherwise than those to come.

    Args:
        scores: To begin with, one at least.
        seed: Of the draw.
    """

    def __init__(self, scores: Floats, seed: int) -> None:
        drawn = np.random.default_rng([seed, 1]).integers(len(scores))
        self.centre = float(scores[drawn])
        self._counts = np.bincount(cells(np.delete(scores, drawn) - self.centre), minlength=CELLS)
        self._size = len(scores) - 1

    def add(self, score: float) -> tuple[int, int, int]:
        """As `Everything.add`."""
        cell = int(cells(np.array(score - self.centre)))
        self._counts[cell] += 1
        self._size += 1
        return int(self._counts[cell + 1 :].sum()), int(self._counts[cell]), self._size

    def state(self) -> list[Any]:
        """As plain data: the centre, the cells that are not empty, and their counts."""
        (used,) = np.nonzero(self._counts)
        return [self.centre, used.tolist(), self._counts[used].tolist()]

    def restore(self, state: list[Any]) -> None:
        """Go on from what `state` returned."""
        self.centre, used, counts = state
        self._counts[:] = 0
        self._counts[used] = counts
        self._size = sum(counts)
