"""The drift of a stream as a page: the martingale's wealth, the windows' p-values, and the scores over time."""

import numpy as np

from kedge.drift.arrays import Floats
from kedge.drift.replay import DriftHistory
from kedge.evaluation.report import figures
from kedge.evaluation.report.charts import Drawing, Group, figure_section
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import Html, percent

BLOCKS = 200  # points of the lines of quantiles


def drift_page(history: DriftHistory, scores: Floats, threshold: float, *, title: str, alpha: float) -> str:
    """The whole page, which loads nothing."""
    parts = (
        ("wealth", "Martingale", _wealth(history, alpha)),
        ("windows", "Windows", _windows(history)),
        ("scores", "Scores", _scores(scores, threshold)),
    )
    return document(title, drift_finding(history), [f"{len(scores):,} images, in the order of the rows."], parts)


def drift_finding(history: DriftHistory) -> str:
    """The alarms in a sentence."""
    by = {"the martingale": history.wealth_since, "the windows": history.window_since}
    alarms = [f"by {name} at image {since:,}" for name, since in by.items() if since is not None]
    if not alarms:
        return "No drift: neither the martingale nor the windows raise an alarm."
    return f"Drift: an alarm {' and '.join(alarms)}."


def _section(identifier: str, heading: str, words: str, label: str, picture: Html) -> Html:
    return figure_section(identifier, heading, words, Group([Drawing(picture, caption=label)]), layout="wide")


def _wealth(history: DriftHistory, alpha: float) -> Html:
    log10, limit = history.log_wealth / np.log(10), history.log_limit / np.log(10)
    label = f"Wealth of the martingale as a power of ten; it ends at {log10[-1]:.1f}, the limit is {limit:.1f}."
    line, value = (np.arange(len(log10)), log10), "wealth, power of 10"
    picture = figures.trace("wealth", [line], limit=limit, since=history.wealth_since, value=value, label=label)
    words = (
        "The martingale bets that each score differs from all scores before it: larger, smaller, or otherwise "
        "distributed. Without drift it wins nothing on average: the wealth ever reaches the dashed line with a "
        f"probability of at most {percent(alpha)} %."
    )
    return _section("wealth", "The martingale", words, label, picture)


def _windows(history: DriftHistory) -> Html | None:
    if not len(history.windows):
        return None
    logs = [np.log10(np.maximum(p, 1e-12)) for p in (history.p_any, history.p_up)]  # 0 has no logarithm
    limit, lowest = float(np.log10(history.threshold)), min(p.min() for p in logs)
    number = len(history.windows)
    label = f"P-values of {number} windows as powers of ten: the smallest is {lowest:.1f}, the limit {limit:.1f}."
    lines, value = [(history.windows, p) for p in logs], "p-value, power of 10"
    picture = figures.trace("windows", lines, limit=limit, since=history.window_since, value=value, label=label)
    words = (
        "The newest scores are tested against the calibration scores at regular intervals: for any change (blue) and "
        "for larger scores (orange). A p-value below the dashed line raises the alarm."
    )
    return _section("windows", "The windows", words, label, picture)


def _scores(scores: Floats, threshold: float) -> Html:
    parts = np.array_split(scores, min(BLOCKS, len(scores)))
    places = np.cumsum([len(part) for part in parts]) - 1
    lines = [(places, np.array([np.quantile(part, share) for part in parts])) for share in (0.5, 0.95)]
    label = f"Median and 95 % quantile of the scores over the stream, in {len(parts)} parts."
    picture = figures.trace("scores", lines, limit=threshold, since=None, value="score", label=label)
    words = "Median and 95 % quantile of the scores. Images above the dashed line, the threshold, are flagged."
    return _section("scores", "The scores", words, label, picture)
