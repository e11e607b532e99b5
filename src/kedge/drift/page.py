"""The drift of a stream as a page: what happened, since when, how sure, which images; the statistics are folded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kedge.drift.arrays import Floats
from kedge.drift.replay import DriftHistory
from kedge.evaluation.report import figures
from kedge.evaluation.report.charts import Drawing, Group, figure_section
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import Html, figure, gallery, legend, number, percent, section, sides, table, tag

FEWEST, MOST = 20, 60  # images of a bar or a point at least, and bars or points at most
BEFORE, SINCE, HIGHEST = 6, 12, 6  # images shown
CLASSES = 20  # in the table of predicted classes at most
BEYOND = 1e-12  # smaller probabilities are not told apart


def drift_page(
    history: DriftHistory,
    scores: Floats,
    threshold: float,
    *,
    title: str,
    alpha: float,
    expected: float,
    cards: Mapping[str, Sequence[Mapping[str, Any]]],
    predicted: Sequence[str],
    folder: str = "",
) -> str:
    """The whole page, which loads nothing.

    Args:
        history: Of the scores.
        scores: Of the stream, (N,).
        threshold: The detector's.
        title: The title of the page.
        alpha: Probability of a false alarm, for each of the two tests.
        expected: The share of images like those of the calibration that the threshold flags.
        cards: The images to show by heading, see `shown_places`.
        predicted: The class of each image, (N,).
        folder: Of all images, without which their names are shown.
    """
    parts = (
        ("flagged", "Flagged", _flagged(history, scores > threshold, expected)),
        ("images", "Images", _images(cards, folder)),
        ("classes", "Classes", _classes(history, predicted, scores > threshold)),
        ("scores", "Scores", _scores(history, scores, threshold)),
        ("statistics", "Statistics", _statistics(history, alpha)),
    )
    return document(title, change_finding(history, scores > threshold), _certainty(history, scores), parts)


def drift_finding(history: DriftHistory) -> str:
    """The alarms in a sentence."""
    by = {"the martingale": history.wealth_since, "the windows": history.window_since}
    alarms = [f"by {name} at image {since:,}" for name, since in by.items() if since is not None]
    if not alarms:
        return "No drift: neither the martingale nor the windows raise an alarm."
    return f"Drift: an alarm {' and '.join(alarms)}."


def change_finding(history: DriftHistory, flagged: Any) -> str:
    """What happened and since when, in a sentence that needs no other; ``flagged`` (N,)."""
    start, count = _start(history), len(flagged)
    if start is None:
        return f"No drift in {count:,} images, of which {percent(flagged.mean())} % are flagged."
    since = f"{percent(flagged[start:].mean())} % are flagged"
    if start == 0:
        return f"The images differ from those of the calibration from the first of {count:,} on: {since}."
    before = percent(flagged[:start].mean())
    return f"The images have changed since about image {start:,} of {count:,}: {since} since then, {before} % before."


def shown_places(history: DriftHistory, scores: Floats) -> dict[str, list[int]]:
    """The images to show, by heading: some before and since the change, and those with the highest scores."""
    start, count = _start(history), len(scores)
    first = start or 0
    highest = (first + np.argsort(-scores[first:], kind="stable")[: HIGHEST if start is not None else SINCE]).tolist()
    if start is None:
        return {"The highest scores": highest}
    spread = {"Before": (0, start, BEFORE), "Since then": (start, count, SINCE)}
    found = {
        heading: np.unique(np.linspace(low, high - 1, min(most, high - low)).astype(int)).tolist()
        for heading, (low, high, most) in spread.items()
        if high > low
    }
    return found | {"The highest scores since then": highest}


def odds(chance: float) -> str:
    """A probability in words, rounded up."""
    if chance >= 0.01:
        return f"{100 * chance:.0f} %"
    inverse = 1 / max(chance, BEYOND)
    step = 10 ** int(np.log10(inverse))
    return f"one in {int(inverse / step) * step:,}"


def _start(history: DriftHistory) -> int | None:
    """Where the change began; 0 if there are too few images before it to say anything about them."""
    return history.start if history.start is None or history.start >= FEWEST else 0


def _certainty(history: DriftHistory, scores: Floats) -> list[str]:
    start = _start(history)
    chance = (
        f"Without a change, evidence this strong would come up with a probability of at most {odds(history.chance)}."
    )
    if start is None:
        return [
            f"The strongest evidence of a change is weak: without one, it has a probability of {odds(history.chance)}."
        ]
    if start == 0:
        return [chance]
    before, since = (number(float(np.median(part)), 2) for part in (scores[:start], scores[start:]))
    return [
        f"{chance} The median score was {before} before and is {since} since; larger is further out of distribution."
    ]


def _parts(count: int) -> list[Any]:
    """The numbers of the images in consecutive parts."""
    return np.array_split(np.arange(count), max(1, min(MOST, count // FEWEST)))


def _flagged(history: DriftHistory, flagged: Any, expected: float) -> Html:
    parts, start = _parts(len(flagged)), _start(history)
    shares = np.array([flagged[part].mean() for part in parts])
    edges = np.array([part[0] for part in parts] + [len(flagged)])
    words = [f"images {p[0]:,} to {p[-1]:,}: {int(flagged[p].sum())} of {len(p)} flagged" for p in parts]
    label = f"Share of images flagged over the stream, in {len(parts)} parts: from {percent(shares.min())} % to "
    label += f"{percent(shares.max())} %; {percent(expected)} % are expected without drift."
    picture = figures.bars(
        "flagged", edges, shares, value="flagged, %", limit=expected, since=start or None, label=label, words=words
    )
    text = f"The dashed line is the share that is expected without drift, {percent(expected)} %."
    if start:
        text += f" The dotted line is where the change began, about image {start:,}."
    return figure_section("flagged", "The share of images flagged", text, Group([Drawing(picture)]), layout="wide")


def _images(cards: Mapping[str, Sequence[Mapping[str, Any]]], folder: str) -> Html:
    parts = [piece for heading, each in cards.items() for piece in (tag("h3", heading), gallery(each))]
    words = f"Of {folder}. A click enlarges an image." if folder else "A click enlarges an image."
    return section("images", "The images", tag("p", words), *parts)


def _classes(history: DriftHistory, predicted: Sequence[str], flagged: Any) -> Html | None:
    """The predicted classes before the change and since, by how much their shares differ; None without a change."""
    start = _start(history)
    if not start:
        return None
    names, is_flagged = np.array(predicted), np.asarray(flagged)
    before, since = (Counter(part.tolist()) for part in (names[:start], names[start:]))
    share = {name: (before[name] / start, since[name] / (len(names) - start)) for name in before | since}
    order = sorted(share, key=lambda name: (-abs(share[name][1] - share[name][0]), name))[:CLASSES]

    def row(name: str) -> list[str]:
        own = names == name
        parts = (is_flagged[:start][own[:start]], is_flagged[start:][own[start:]])
        return [name, *map(percent, share[name]), *(percent(p.mean() if len(p) else None) for p in parts)]

    caption = f"In percent, of {start:,} images before and {len(names) - start:,} since; the largest changes first."
    heads = ["Predicted class", "before", "since then", "flagged before", "flagged since"]
    rows = table(caption, heads, map(row, order), label="Predicted classes before and since")
    return section("classes", "What is predicted", rows)


def _scores(history: DriftHistory, scores: Floats, threshold: float) -> Html:
    parts, start = _parts(len(scores)), _start(history)
    middles = np.array([part.mean() for part in parts])
    lines = [(middles, np.array([np.quantile(scores[part], share) for part in parts])) for share in (0.5, 0.95)]
    label = f"Median and 95 % quantile of the scores over the stream, in {len(parts)} parts."
    picture = figures.trace("scores", lines, limit=threshold, since=start or None, value="score", label=label)
    words = "A larger score is further out of distribution. Images above the dashed line, the threshold, are flagged."
    pieces = [tag("p", words), figure(picture, legend(["median", "95 % quantile"]))]
    if start:
        before, since = scores[:start], scores[start:]
        names, edges = ("before", "since then"), figures.edges([before, since])
        drawn = figures.histograms(
            "before-since", before, since, edges, axis="score", threshold=threshold, sides=names,
            label=f"Histograms of the scores of {len(before):,} images before and of {len(since):,} since then.",
        )  # fmt: skip
        heading = tag("h3", "Before and since then")
        pieces += [heading, sides(*names), tag("div", figure(drawn), class_="pair")]
    return section("scores", "The scores", *pieces)


def _statistics(history: DriftHistory, alpha: float) -> Html:
    return section(
        "statistics", "The statistics", tag("p", drift_finding(history)), _wealth(history, alpha), _windows(history)
    )


def _folded(summary: str, words: str, picture: Html, caption: Html | str) -> Html:
    return tag("details", tag("summary", summary), tag("p", words), figure(picture, caption))


def _wealth(history: DriftHistory, alpha: float) -> Html:
    log10, limit = history.log_wealth / np.log(10), history.log_limit / np.log(10)
    label = f"Wealth of the martingale as a power of ten; it ends at {log10[-1]:.1f}, the limit is {limit:.1f}."
    line, value = (np.arange(len(log10)), log10), "wealth, power of 10"
    picture = figures.trace("wealth", [line], limit=limit, since=history.wealth_since, value=value, label=label)
    words = (
        "The martingale bets that each score differs from all scores before it: larger, smaller, or otherwise "
        "distributed. Without drift it wins nothing on average: the wealth ever reaches the dashed line with a "
        f"probability of at most {percent(alpha)} %. The dotted line is the alarm."
    )
    return _folded("The martingale", words, picture, label)


def _windows(history: DriftHistory) -> Html:
    if not len(history.windows):
        return Html("")
    logs = [np.log10(np.maximum(p, 1e-12)) for p in (history.p_any, history.p_up)]  # 0 has no logarithm
    limit, lowest = float(np.log10(history.threshold)), min(p.min() for p in logs)
    many = len(history.windows)
    label = f"P-values of {many} windows as powers of ten: the smallest is {lowest:.1f}, the limit {limit:.1f}."
    lines, value = [(history.windows, p) for p in logs], "p-value, power of 10"
    picture = figures.trace("windows", lines, limit=limit, since=history.window_since, value=value, label=label)
    words = (
        "The newest scores are tested against the calibration scores at regular intervals. A p-value below the dashed "
        "line raises the alarm, the dotted line."
    )
    return _folded("The windows", words, picture, legend(["for any change", "for larger scores"]))
