"""The drift of a stream as a page: the martingale's wealth, the windows' p-values, and the scores over time."""

import numpy as np

from kedge.drift import History
from kedge.drift.arrays import Floats
from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import Html, figure, section, tag
from kedge.evaluation.report.tables import percent

BLOCKS = 200  # points of the line of medians


def drift_page(found: History, scores: Floats, threshold: float, *, title: str, alpha: float) -> str:
    """The whole page, which loads nothing.

    Args:
        found: What `kedge.drift.history` made of the scores.
        scores: One per image, in the order they came.
        threshold: Above which the detector flags an image.
        title: Of the page.
        alpha: The chance of a false alarm that was asked for.
    """
    parts = (
        ("wealth", "Martingale", _wealth(found, alpha)),
        ("windows", "Windows", _windows(found)),
        ("scores", "Scores", _scores(scores, threshold)),
    )
    return document(title, finding(found), [f"{len(scores):,} images, in the order of the rows."], parts)


def finding(found: History) -> str:
    """What the instruments say, in a sentence."""
    by = {"the martingale": found.wealth_since, "the windows": found.window_since}
    alarms = [f"by {name} at image {since:,}" for name, since in by.items() if since is not None]
    if not alarms:
        return "No drift: neither the martingale nor the windows raise an alarm."
    return f"Drift: an alarm {' and '.join(alarms)}."


def _wealth(found: History, alpha: float) -> Html:
    log10 = found.log_wealth / np.log(10)
    limit, last = found.log_limit / np.log(10), log10[-1]
    label = (
        f"Wealth of the martingale over the stream, as a power of ten; it ends at {last:.1f}, the limit is {limit:.1f}."
    )
    drawn = figures.trace(
        "wealth",
        [(np.arange(len(log10)), log10)],
        limit=limit,
        since=found.wealth_since,
        value="wealth, power of 10",
        label=label,
    )
    words = (
        "A gambler bets on every score that it is larger, smaller or elsewhere than all before it. Without drift "
        "nothing can be won on average: the wealth ever reaches the dashed line with a chance of at most "
        f"{percent(alpha)} %."
    )
    return section("wealth", "The martingale", tag("p", words), figure(drawn, label))


def _windows(found: History) -> Html | None:
    if not len(found.windows):
        return None
    low = 1e-12  # a p-value of 0 has no logarithm
    logs = [np.log10(np.maximum(p, low)) for p in (found.p_any, found.p_up)]
    limit = float(np.log10(found.threshold))
    label = (
        f"P-values of {len(found.windows)} windows as powers of ten: the smallest is "
        f"{min(p.min() for p in logs):.1f}, the limit {limit:.1f}."
    )
    drawn = figures.trace(
        "windows",
        [(found.windows, p) for p in logs],
        limit=limit,
        since=found.window_since,
        value="p-value, power of 10",
        label=label,
    )
    words = (
        "The newest scores against the calibration scores, again and again: for any change (blue) and for scores "
        "that have become larger (orange). An alarm is a p-value below the dashed line."
    )
    return section("windows", "The windows", tag("p", words), figure(drawn, label))


def _scores(scores: Floats, threshold: float) -> Html:
    parts = np.array_split(scores, min(BLOCKS, len(scores)))
    places = np.cumsum([len(part) for part in parts]) - 1
    lines = [np.array([np.quantile(part, share) for part in parts]) for share in (0.5, 0.95)]
    label = f"Median and 95 % quantile of the scores over the stream, in {len(parts)} parts."
    drawn = figures.trace(
        "scores", [(places, line) for line in lines], limit=threshold, since=None, value="score", label=label
    )
    words = (
        "The median of the scores and their 95 % quantile. Above the dashed line, the threshold, an image is flagged."
    )
    return section("scores", "The scores", tag("p", words), figure(drawn, label))
