"""A conformal test martingale: its wealth grows only if the scores drift."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kedge.checks import at_least, between
from kedge.drift.arrays import Floats, Ints, Numbers, as_scores, check_state
from kedge.errors import InputError

CELLS = 1 << 16
LARGEST = 65_504.0  # of float16
# The rate J at which wealth moves from one bet to another. A drift after t images costs about log(1 / J) + J t of
# log-wealth until its bet has wealth again, so small rates suit late drifts, and large ones early drifts; a quarter of
# the wealth starts with each.
JUMPS = np.array([[1e-2], [1e-3], [1e-4], [1e-5]])


@dataclass(frozen=True)
class Bet:
    """The martingale after one image."""

    index: int  # the image, counted from 0 in the stream
    p_value: float  # smoothed conformal p-value of its score among all scores before; small for a large score
    log_wealth: float  # natural logarithm of the wealth, which starts at 1
    alarm: bool  # whether the wealth has reached 1 / alpha by now


def payoffs(p: Floats) -> Floats:
    """The payoff of one unit on each bet: densities on [0, 1], so that no bet gains on average if p is uniform."""
    # No bet; larger, far larger and smaller scores; narrower and wider spread.
    larger, smaller = 2 * (1 - p), 2 * p
    return np.array(
        [np.ones_like(p), larger, 0.5 / np.sqrt(p), smaller, 1.5 * larger * smaller, 3 * (1 - smaller) ** 2]
    ).T


def play(shares: Floats, p: Floats) -> tuple[Floats, Floats]:
    """Play one round of one game, shares (jumps, bets) and p (), or of G games at once, (G, jumps, bets) and (G,).

    The simple jumper of Vovk et al. (2021), with more bets and a mixture of jump rates: the wealth on each bet is
    multiplied by its payoff, then a part J of it is spread evenly over all bets.

    Returns:
        The new shares of the wealth, which sum to 1, and the factor by which the wealth grew.
    """
    paid = shares * payoffs(p)[..., None, :]
    by_rate = paid.sum(axis=-1, keepdims=True)
    growth = by_rate.sum(axis=-2, keepdims=True)
    moved = (1 - JUMPS) * paid + JUMPS / paid.shape[-1] * by_rate
    return moved / growth, growth[..., 0, 0]


def first_shares() -> Floats:
    """The shares before the first round: equal on each bet, at each jump rate."""
    bets = payoffs(np.ones(1)).shape[-1]
    return np.full((len(JUMPS), bets), 1 / (len(JUMPS) * bets))


def float16_cells(numbers: Floats) -> Ints:
    """The rank of each number's float16 among all of them; numbers beyond 65,504 share the outermost one."""
    half = np.clip(numbers, -LARGEST, LARGEST).astype(np.float16) + np.float16(0)  # turns -0 into 0
    bits = half.view(np.uint16).astype(np.int64)
    return np.where(bits < CELLS // 2, bits + CELLS // 2, CELLS - 1 - bits)


class SortedPast:
    """All scores so far, 8 bytes each, in order."""

    def __init__(self, scores: Floats) -> None:
        self._scores = array("d", np.sort(scores).tolist())

    def add(self, score: float) -> tuple[int, int, int]:
        """Add a score; return the number above it, the number equal to it (with itself), and the total."""
        low, high = bisect_left(self._scores, score), bisect_right(self._scores, score)
        self._scores.insert(high, score)
        size = len(self._scores)
        return size - 1 - high, high - low + 1, size

    def state(self) -> list[float]:
        """The scores, as plain data."""
        return self._scores.tolist()


class GridPast:
    """Counts of scores by `float16_cells`, in constant memory and time; scores of one cell count as equal.

    The cells are finest around one score, drawn at random, which is then no part of the past: a grid derived from
    scores of the past would treat them differently from future ones.
    """

    def __init__(self, center: float, counts: Ints) -> None:
        self.center, self._counts, self._size = center, counts, int(counts.sum())

    @classmethod
    def of(cls, scores: Floats, seed: int) -> Self:
        """The grid around one of these scores."""
        drawn = np.random.default_rng([seed, 1]).integers(len(scores))
        center = float(scores[drawn])
        return cls(center, np.bincount(float16_cells(np.delete(scores, drawn) - center), minlength=CELLS))

    def add(self, score: float) -> tuple[int, int, int]:
        """See `SortedPast.add`."""
        cell = int(float16_cells(np.array(score - self.center)))
        self._counts[cell] += 1
        self._size += 1
        return int(self._counts[cell + 1 :].sum()), int(self._counts[cell]), self._size

    def state(self) -> list[Any]:
        """The center, the cells that are not empty, and their counts, as plain data."""
        (used,) = np.nonzero(self._counts)
        return [self.center, used.tolist(), self._counts[used].tolist()]


class Martingale:
    """Bets on every score of a stream against exchangeability with all scores before it.

    The smoothed conformal p-value of a score is its rank, with ties broken at random, among calibration scores and
    earlier stream scores together. Without drift these p-values are exactly independent and uniform, for any
    distribution and with any ties (against a fixed calibration set they would share its accidents). Bets on them win
    nothing on average, so by Ville's inequality the wealth ever reaches ``1 / alpha`` with probability at most
    ``alpha``, however long the stream.

    All scores are kept, 8 bytes each; a past cut to its newest scores would break the guarantee. With ``bounded`` they
    are rounded to float16, relative to one calibration score that is drawn at random and left out, and counted in half
    a megabyte. The guarantee is the same, since it holds with any ties. The past comes to hold the drifted scores too,
    so a drift is noticed while it is new or not at all.

    Args:
        calibration: One score per held-out in-distribution image.
        alpha: Probability of ever raising a false alarm.
        seed: Random seed of the smoothing.
        bounded: Whether memory, and the time for a score, must not grow with the stream.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> martingale = Martingale(rng.normal(size=500))
        >>> martingale.update(rng.normal(size=500))[-1].alarm
        False
        >>> bets = martingale.update(rng.normal(loc=1, size=100))
        >>> martingale.alarm, martingale.since
        (True, 534)
    """

    def __init__(self, calibration: Numbers, *, alpha: float = 0.01, seed: int = 0, bounded: bool = False) -> None:
        scores = as_scores("calibration", calibration, fewest=1)
        self._past: SortedPast | GridPast = GridPast.of(scores, seed) if bounded else SortedPast(scores)
        self.alpha = between("alpha", alpha, 0, 1, open_ends=True)
        self.seed = at_least("seed", seed, 0)
        self.seen = 0
        self.since: int | None = None
        self.log_wealth = 0.0
        self._shares = first_shares()
        self._rng = np.random.Generator(np.random.PCG64(seed))

    @property
    def alarm(self) -> bool:
        """Whether the wealth ever reached ``1 / alpha``; ``since`` is the first image after which it had."""
        return self.since is not None

    def update(self, scores: Numbers) -> list[Bet]:
        """Take the next scores, one or many, and return the state after each."""
        return [self._bet(score) for score in as_scores("scores", scores).tolist()]

    def _bet(self, score: float) -> Bet:
        p = self._p_value(score)
        self._shares, growth = play(self._shares, np.array(p))
        self.log_wealth += math.log(growth)
        if self.since is None and self.log_wealth >= -math.log(self.alpha):
            self.since = self.seen
        self.seen += 1
        return Bet(self.seen - 1, p, self.log_wealth, self.alarm)

    def _p_value(self, score: float) -> float:
        """Smoothed p-value of a score among the past, which it joins."""
        above, ties, size = self._past.add(score)
        return (above + ties * (1 - self._rng.random())) / size  # in (0, 1]: p = 0 would pay infinitely much

    def state(self) -> dict[str, Any]:
        """Everything, as plain data for JSON; `restore` continues from it."""
        values = {name: getattr(self, name) for name in _VALUES} | {"bounded": isinstance(self._past, GridPast)}
        return values | {"past": self._past.state(), "shares": self._shares.tolist()}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Make a martingale from what `state` returned."""
        check_state(state, ["past", "bounded", *_VALUES, "shares"])
        past, shares = state["past"], np.array(state["shares"])
        if shares.shape != first_shares().shape:
            raise InputError(
                f"state must hold shares of shape {first_shares().shape}, got {shares.shape}; "
                "it was saved by a version of kedge with other bets: start anew"
            )
        martingale = cls([0.0] if state["bounded"] else past, alpha=state["alpha"], seed=state["seed"])
        if state["bounded"]:
            center, used, counts = past
            martingale._past = GridPast(center, np.bincount(used, counts, minlength=CELLS).astype(np.int64))
        for name in ("seen", "since", "log_wealth"):
            setattr(martingale, name, state[name])
        martingale._shares = shares
        martingale._rng.bit_generator.advance(martingale.seen)  # type: ignore[attr-defined]  # one draw per score
        return martingale


_VALUES = ("alpha", "seed", "seen", "since", "log_wealth")
