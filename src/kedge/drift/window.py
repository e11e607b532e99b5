"""The newest scores of a stream, tested against the calibration scores at regular intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kedge.checks import at_least, between
from kedge.drift.arrays import Floats, Ints, Numbers, as_scores, check_state
from kedge.drift.twosample import MOST_TIES, p_any, p_up, p_up_permuted, ranks
from kedge.errors import InputError

FEWEST = 20  # scores on either side, from which on the normal tail of the rank sum is conservative
TOGETHER = 64  # windows ranked at once: bounds the memory of a long batch


@dataclass(frozen=True)
class Comparison:
    """One window against the calibration scores."""

    index: int  # the window's last image, counted from 0 in the stream
    ks: float  # largest distance of the two distribution functions (Kolmogorov-Smirnov)
    auroc: float  # probability that a score of the window is above a calibration score (Mann-Whitney), ties one half
    p_any: float  # p-value of ``ks``, for a change of any kind: exact
    p_up: float  # one-sided p-value of ``auroc``: normal, or by permutations, fewer after an alarm, if ties are many
    alarm: bool  # whether an alarm has been raised by now, by this window or one before

    @property
    def p(self) -> float:
        """The smaller p-value; at or below the threshold of its `WindowTest` it raises the alarm."""
        return min(self.p_any, self.p_up)


class WindowTest:
    """Tests the last ``window`` scores of a stream against calibration scores, anew after ``every`` images.

    Each test is a Kolmogorov-Smirnov test, for any change, and a Mann-Whitney test, for a shift upwards. The alarm is
    raised by a p-value of at most ``threshold = alpha / (2 * tests)``, so the probability of any false alarm within
    ``horizon`` images is at most ``alpha``, on average over calibration sets: a union bound, which holds for any
    dependence of the tests. ``p_any`` is exact. ``p_up`` is normal and conservative while ties are rare; otherwise, as
    for scores with fewer than about 100 values, it comes from seeded permutations, at most ``draws``: with a threshold
    below ``1 / draws``, only ``p_any`` raises the alarm then.

    A window notices shifts; a change of the spread alone moves the distance little and takes larger windows, or the
    `Martingale`.

    Args:
        calibration: One score per held-out in-distribution image, at least 20.
        window: Number of newest scores that are tested, at least 20.
        every: Images from one test to the next; a quarter of the window by default.
        horizon: Images over which the guarantee holds.
        alpha: Probability of any false alarm over the horizon.
        draws: Largest number of permutations, which bounds the time of a test.
        seed: Random seed of the permutations.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> test = WindowTest(rng.normal(size=500), window=40, horizon=1000)
        >>> len(test.update(rng.normal(size=200))), test.alarm
        (17, False)
        >>> for score in rng.normal(loc=1, size=100):
        ...     states = test.update(score)  # one comparison after every ten images, otherwise none
        >>> test.alarm, test.since
        (True, 229)
    """

    def __init__(
        self,
        calibration: Numbers,
        *,
        window: int = 100,
        every: int | None = None,
        horizon: int = 10_000,
        alpha: float = 0.01,
        draws: int = 1_000_000,
        seed: int = 0,
    ) -> None:
        self._calibration = np.sort(as_scores("calibration", calibration, fewest=FEWEST))
        self.window = at_least("window", window, FEWEST)
        self.every = at_least("every", every, 1) if every is not None else window // 4
        self.horizon = at_least("horizon", horizon, 1)
        if horizon < window:
            raise InputError(f"horizon must be at least the window, {window}; got {horizon}: it holds no test")
        self.alpha = between("alpha", alpha, 0, 1, open_ends=True)
        self.draws = at_least("draws", draws, 1)
        self.seed = at_least("seed", seed, 0)
        self.seen = 0
        self.since: int | None = None
        self._recent = np.empty(0)

    @property
    def tests(self) -> int:
        """How many tests a stretch of ``horizon`` images holds at most."""
        return (self.horizon - self.window) // self.every + 1

    @property
    def threshold(self) -> float:
        """The p-value at or below which a test raises the alarm."""
        return self.alpha / (2 * self.tests)

    @property
    def alarm(self) -> bool:
        """Whether any window so far raised the alarm; ``since`` is the last image of the first that did."""
        return self.since is not None

    def update(self, scores: Numbers) -> list[Comparison]:
        """Take the next scores, one or many, and return the comparisons that came due."""
        pool = np.concatenate([self._recent, as_scores("scores", scores)])
        first = self.seen - len(self._recent)  # the image of pool[0]; windows start at multiples of `every`
        starts = np.arange(-first % self.every, len(pool) - self.window + 1, self.every)
        comparisons = []
        for part in np.split(starts, range(TOGETHER, len(starts), TOGETHER)) if len(starts) else ():
            comparisons += self._compare(pool[part[:, None] + np.arange(self.window)], first + part + self.window - 1)
        self.seen = first + len(pool)
        self._recent = pool[max(0, len(pool) - self.window + 1) :]  # every window to come ends in a new score
        return comparisons

    def _compare(self, windows: Floats, indices: Ints) -> list[Comparison]:
        """Compare windows (T, m) whose last images have these indices."""
        r = ranks(windows, self._calibration)
        any_change, up, pairs = p_any(r), p_up(r), r.n * r.m
        comparisons = []
        for t, index in enumerate(indices.tolist()):
            if MOST_TIES < r.ties[t] < 1:
                up[t] = self._permuted(windows[t], index)
            if self.since is None and min(any_change[t], up[t]) <= self.threshold:
                self.since = index
            ks, auroc = float(r.distance[t]) / pairs, float(r.wins[t]) / pairs
            comparisons.append(Comparison(index, ks, auroc, float(any_change[t]), float(up[t]), self.alarm))
        return comparisons

    def _permuted(self, window: Floats, index: int) -> float:
        """P-value by permutations; before an alarm there are enough of them to raise one."""
        rng = np.random.Generator(np.random.PCG64([self.seed, index]))  # the same in any batch
        draws = min(self.draws, 9_999 if self.alarm else math.ceil(5 / self.threshold))
        return p_up_permuted(window, self._calibration, draws, rng)

    def state(self) -> dict[str, Any]:
        """Everything, as plain data for JSON; `restore` continues from it."""
        values = {name: getattr(self, name) for name in (*_SETTINGS, "seen", "since")}
        return values | {"calibration": self._calibration.tolist(), "recent": self._recent.tolist()}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Make a test from what `state` returned."""
        check_state(state, ["calibration", *_SETTINGS, "seen", "since", "recent"])
        test = cls(state["calibration"], **{name: state[name] for name in _SETTINGS})
        test.seen, test.since = state["seen"], state["since"]
        test._recent = as_scores("recent", state["recent"])
        return test


_SETTINGS = ("window", "every", "horizon", "alpha", "draws", "seed")
