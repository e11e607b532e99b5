"""A conformal test martingale: money that can only be won if the scores drift."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kedge.checks import at_least, between
from kedge.drift.arrays import Floats, Numbers, as_scores, known_state
from kedge.drift.past import Everything, Grid
from kedge.errors import InputError

# How often money moves from one bet to another. A drift after t images costs about log(1 / J) + J t of log-wealth until
# its bet has money again, so small rates suit late drifts, and large ones early drifts; a quarter starts with each.
JUMPS = np.array([[1e-2], [1e-3], [1e-4], [1e-5]])


@dataclass(frozen=True)
class Bet:
    """The martingale after one image.

    Attributes:
        index: The image, counted from 0 in the stream.
        p_value: Smoothed conformal p-value of its score among all scores before; small for a large score.
        log_wealth: Natural logarithm of the wealth, which starts at 1.
        alarm: Whether the wealth has reached ``1 / alpha`` by now.
    """

    index: int
    p_value: float
    log_wealth: float
    alarm: bool


def payoffs(p: Floats) -> Floats:
    """What one unit on each bet becomes: densities on [0, 1], so that no bet gains on average if p is uniform.

    Example:
        >>> payoffs(np.array([0.25]))  # no bet; larger, far larger and smaller scores; narrower and wider spread
        array([[1.   , 1.5  , 1.   , 0.5  , 1.125, 0.75 ]])
    """
    larger, smaller = 2 * (1 - p), 2 * p
    return np.array(
        [np.ones_like(p), larger, 0.5 / np.sqrt(p), smaller, 1.5 * larger * smaller, 3 * (1 - smaller) ** 2]
    ).T


def play(shares: Floats, p: Floats) -> tuple[Floats, Floats]:
    """Play one round of one game, shares (jumps, bets) and p (), or of G games at once, (G, jumps, bets) and (G,).

    The simple jumper of Vovk et al. (2021), with more bets and a mixture of jump rates: the money on each bet becomes
    its payoff, then a part J of it is spread evenly over all bets.

    Returns:
        The new shares of the wealth, which sum to 1, and the factor by which the wealth grew.
    """
    paid = shares * payoffs(p)[..., None, :]
    by_rate = paid.sum(axis=-1, keepdims=True)
    growth = by_rate.sum(axis=-2, keepdims=True)
    moved = (1 - JUMPS) * paid + JUMPS / paid.shape[-1] * by_rate
    return moved / growth, growth[..., 0, 0]


def first_shares() -> Floats:
    """The money before the first round: as much on each bet, at each jump rate."""
    bets = payoffs(np.ones(1)).shape[-1]
    return np.full((len(JUMPS), bets), 1 / (len(JUMPS) * bets))


class Martingale:
    """Bets on every score of a stream against exchangeability with all scores before it.

    The smoothed conformal p-value of a score is its rank, with ties broken at random, among calibration scores and
    earlier stream scores together. Without drift these p-values are independent and uniform exactly, for any
    distribution and with any ties; against a fixed calibration set they would share its accidents, and a long stream
    would be sure to look like drift. Bets on them win nothing on average, so by Ville's inequality the wealth ever
    reaches ``1 / alpha`` with chance at most ``alpha``, however long the stream.

    All scores are kept, 8 bytes each, in order. A past cut to its newest scores would break the promise: earlier
    p-values tell how the scores that are kept compare with those that left, so the next p-value is not independent of
    them. With ``bounded`` scores, the calibration's too, are rounded and counted, in half a megabyte: to float16, less
    one calibration score that is drawn at random and left out. The promise is the same, since it holds with any ties.
    The past comes to hold the drifted scores too, so a drift is noticed while it is new or not at all.

    Args:
        calibration: One score per held-out in-distribution image.
        alpha: Chance of ever raising a false alarm.
        seed: Of the smoothing.
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
        known = as_scores("calibration", calibration, fewest=1)
        self._past = Grid(known, seed) if bounded else Everything(known)
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
        """Smoothed p-value among the past, of which the score is a part from now on."""
        above, ties, size = self._past.add(score)
        return (above + ties * (1 - self._rng.random())) / size  # in (0, 1]: p = 0 would pay without end

    def state(self) -> dict[str, Any]:
        """Everything, as plain data for JSON; `restore` goes on from it as if nothing had happened.

        Example:
            >>> martingale = Martingale([1, 2, 3])
            >>> _ = martingale.update([2, 5])
            >>> Martingale.restore(martingale.state()).update([9]) == martingale.update([9])
            True
        """
        return {
            "past": self._past.state(),
            "bounded": isinstance(self._past, Grid),
            "alpha": self.alpha,
            "seed": self.seed,
            "seen": self.seen,
            "since": self.since,
            "log_wealth": self.log_wealth,
            "shares": self._shares.tolist(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Make a martingale from what `state` returned."""
        known_state(state, ["past", "bounded", "alpha", "seed", "seen", "since", "log_wealth", "shares"])
        bounded = state["bounded"]
        martingale = cls([0.0] if bounded else state["past"], alpha=state["alpha"], seed=state["seed"], bounded=bounded)
        if isinstance(martingale._past, Grid):
            martingale._past.restore(state["past"])
        martingale.seen, martingale.since, martingale.log_wealth = state["seen"], state["since"], state["log_wealth"]
        martingale._shares = np.array(state["shares"])
        if martingale._shares.shape != first_shares().shape:
            raise InputError(
                f"state must hold shares of shape {first_shares().shape}, got {martingale._shares.shape}; "
                "it was saved by a version of kedge with other bets: start anew"
            )
        martingale._rng.bit_generator.advance(martingale.seen)  # type: ignore[attr-defined]  # one draw per score
        return martingale
