"""Both tests over a whole array of scores, and the scores of rows."""

import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.drift.arrays import Floats, Ints, Numbers, as_scores
from kedge.drift.martingale import Martingale
from kedge.drift.window import WindowTest
from kedge.errors import InputError
from kedge.io.artifact import read_header


@dataclass(frozen=True)
class DriftHistory:
    """`Martingale` and `WindowTest` over a stream of H images and T windows."""

    log_wealth: Floats  # (H,), of the martingale after each image
    p_values: Floats  # (H,), smoothed conformal p-values
    wealth_since: int | None  # the image at which the martingale raised the alarm
    log_limit: float  # the log-wealth that raises it
    windows: Ints  # (T,), last image of each window
    p_any: Floats  # (T,), for any change
    p_up: Floats  # (T,), for a shift upwards
    window_since: int | None  # the last image of the first window to raise the alarm
    threshold: float  # the p-value at or below which a window raises it

    @property
    def start(self) -> int | None:
        """An estimate of the first image after the change; None without an alarm.

        It follows the last minimum of the wealth before its alarm, from where the evidence only grew; without that
        alarm it is the first image of the window that raised one.
        """
        if self.wealth_since is not None:
            before = self.log_wealth[: self.wealth_since]
            if not len(before) or before.min() > 0:  # the wealth begins at 1
                return 0
            return len(before) - int(before[::-1].argmin())
        return None if self.window_since is None else self.window_since - int(self.windows[0])

    @property
    def chance(self) -> float:
        """An upper bound of the probability that either test ever gives so much evidence without drift.

        By Ville's inequality for the wealth, a union bound over the windows' tests, and another over the two.
        """
        alpha = np.exp(-self.log_limit)
        by_wealth = np.exp(-max(0.0, float(self.log_wealth.max(initial=0.0))))
        by_windows = min(self.p_any.min(initial=1.0), self.p_up.min(initial=1.0)) * alpha / self.threshold
        return float(min(1.0, 2 * min(by_wealth, by_windows)))


def history(
    scores: Numbers,
    calibration: Numbers,
    *,
    window: int = 100,
    every: int | None = None,
    horizon: int | None = None,
    alpha: float = 0.01,
    seed: int = 0,
) -> DriftHistory:
    """Run a `Martingale` and a `WindowTest`, whose arguments these are, over the scores (H,) of a stream, in order.

    Each of the two raises a false alarm with probability at most ``alpha``, so either does with at most twice that.
    The horizon is by default the whole stream.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> stream = np.append(rng.normal(size=300), rng.normal(loc=1, size=200))
        >>> h = history(stream, rng.normal(size=500), window=40)
        >>> h.log_wealth.shape, h.p_any.shape, h.wealth_since, h.window_since
        ((500,), (47,), 336, 329)
    """
    stream = as_scores("scores", scores)
    horizon = max(len(stream), window) if horizon is None else horizon
    test = WindowTest(calibration, window=window, every=every, horizon=horizon, alpha=alpha, seed=seed)
    martingale = Martingale(calibration, alpha=alpha, seed=seed)
    bets, compared = martingale.update(stream), test.update(stream)
    return DriftHistory(
        log_wealth=np.array([bet.log_wealth for bet in bets]),
        p_values=np.array([bet.p_value for bet in bets]),
        wealth_since=martingale.since,
        log_limit=-float(np.log(alpha)),
        windows=np.array([c.index for c in compared], dtype=np.int64),
        p_any=np.array([c.p_any for c in compared]),
        p_up=np.array([c.p_up for c in compared]),
        window_since=test.since,
        threshold=test.threshold,
    )


def scores_of(
    rows: Iterable[Mapping[str, Any]], detector: str | os.PathLike[str], *, any_detector: bool = False
) -> Floats:
    """The scores of rows that a detector wrote, in order, (H,); rows with an error are left out.

    Args:
        rows: From `kedge.scoring.read_rows`, with the sha256 of the detector that wrote them; of older rows, which have
            none, the names of the classes are compared.
        detector: The detector's file, or the name of one that comes with kedge.
        any_detector: Whether to accept rows of another detector.
    """
    header, scores = read_header(detector), array("d")
    classes = set(header["classes"])
    for row in rows:
        if row["error"]:
            continue
        written_by, predicted = row.get("detector"), row["class"]
        foreign = written_by != header["sha256"] if written_by else predicted is not None and predicted not in classes
        if foreign and not any_detector:
            reason = f"the detector {written_by:.12}..." if written_by else f"the class {predicted!r}"
            raise InputError(
                f"rows must be of {detector}, the detector {header['sha256']:.12}...; {row['name']} has {reason}: name "
                "the detector that wrote it, or pass any_detector=True if the scores can be compared"
            )
        scores.append(row["score"])
    return as_scores("scores", scores)


def rows_at(rows: Iterable[Mapping[str, Any]], places: Iterable[int]) -> dict[int, Mapping[str, Any]]:
    """The rows at these places of the scores, by place."""
    wanted = set(places)
    return {i: row for i, row in enumerate(row for row in rows if not row["error"]) if i in wanted}
