"""Figures: matplotlib's SVG, reduced, without ids that clash, and colored by the page's style sheet.

Text that comes from data never enters a figure: names stand in the page around it, where they wrap and are escaped.
Every figure takes a name, unique on its page, and a label that describes it in words for screen readers. Strips of a
figure show words while the pointer is over them, by the style sheet alone.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.checks import needs
from kedge.evaluation.report.markup import DASHES, SERIES, Html, tag
from kedge.evaluation.report.markup import legend as legend
from kedge.metrics import roc_curve

Array = NDArray[Any]

# Improbable colors stand for those of the page, so that a figure follows its light and dark theme.
INK, ID, OOD = "#0a0b00", "#0a0b01", "#0a0b02"
CURVES = tuple(f"#0a0c{i:02}" for i in range(1, SERIES + 1))
VARIABLES = {INK: "currentColor", ID: "var(--id)", OOD: "var(--ood)"}
VARIABLES |= {color: f"var(--s{i})" for i, color in enumerate(CURVES, start=1)}

Strip = tuple[float, float, str]  # from, to, on the x axis, and the words, with a line break between lines
LONGEST = 32  # characters of a name in them
LEADING = 10  # points from one of their lines to the next
POINTS = 2_000  # of a line: more than the eye can tell apart
BINS = 15  # of confidence, as in kedge.metrics.ece
SETTINGS = {
    "svg.fonttype": "none",  # text as text: small, and in the page's font
    "font.size": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)


def require() -> Any:
    """The matplotlib module, or an error that says how to install it."""
    modules = [needs(name, "report", "the report") for name in ("matplotlib", "matplotlib.figure", "matplotlib.style")]
    return modules[0]


def edges(sets: Sequence[Array]) -> Array:
    """Bins that hold all but the outermost half percent of each set at either end; fewer if a set is small."""
    bins = min(max(round(2 * math.sqrt(min(map(len, sets)))), 8), 44)
    low = min(float(np.quantile(values, 0.005)) for values in sets)
    high = max(float(np.quantile(values, 0.995)) for values in sets)
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size + 1e-200:  # all but equal: rounding would leave bins without width
        low, high = low - max(0.5, size / 1000), high + max(0.5, size / 1000)
    return np.linspace(low, high, bins + 1)


def histograms(
    name: str,
    inside: Array,
    outside: Array,
    edges: Array,
    *,
    axis: str,
    label: str,
    threshold: float | None = None,
    sides: tuple[str, str] = ("ID", "OOD"),
) -> Html:
    """Overlaid histograms of ID and OOD values, each as shares; values beyond the edges count in the outer bins."""
    shares = [
        np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values) for values in (inside, outside)
    ]
    strips = [
        (low, high, f"{low:.3g} to {high:.3g}: {_shares(sides, both)}")
        for low, high, *both in zip(edges[:-1], edges[1:], *shares, strict=True)
        if any(both)
    ]

    def draw(axes: Any) -> None:
        for share, color in zip(shares, (ID, OOD), strict=True):
            axes.stairs(share, edges, fill=True, color=color, alpha=0.28, linewidth=0)
            axes.stairs(share, edges, color=color, linewidth=1.1)
        axes.set_xlim(edges[0], edges[-1])
        top = max(each.max() for each in shares)
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if top <= 3.5 * s or s == 0.5)
        ticks = np.arange(0, top + step / 2, step)
        axes.set_ylim(0, max(1.06 * top, ticks[-1]))
        axes.set_yticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks])
        axes.set_xlabel(axis)
        axes.set_ylabel("share of images")
        if threshold is not None and edges[0] <= threshold <= edges[-1]:
            axes.axvline(threshold, color=INK, linewidth=0.9, dashes=(4, 2))

    return render(name, (3.7, 1.95), (0.175, 0.22, 0.97, 0.93), label, draw, strips)


def bars(
    name: str,
    edges: Array,
    shares: Array,
    *,
    value: str,
    limit: float,
    since: int | None,
    label: str,
    words: Sequence[str],
) -> Html:
    """Shares over the images of a stream, with the share that is expected and the image where something began."""

    def draw(axes: Any) -> None:
        axes.stairs(100 * shares, edges, fill=True, color=OOD, alpha=0.28, linewidth=0)
        axes.stairs(100 * shares, edges, color=OOD, linewidth=1.1)
        axes.axhline(100 * limit, color=INK, linewidth=0.7, dashes=(4, 2))
        if since is not None:
            axes.axvline(since, color=INK, linewidth=0.7, dashes=(1, 2))
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, min(100, 115 * max(shares.max(), 2 * limit))))
        axes.set(xlabel="image", ylabel=value)

    strips = list(zip(edges[:-1], edges[1:], words, strict=True))
    return render(name, (5.4, 2.3), (0.12, 0.2, 0.97, 0.93), label, draw, strips)


def roc(name: str, pairs: Sequence[tuple[Array, Array]], names: Sequence[str], *, label: str) -> Html:
    """ROC curves of (ID, OOD) scores, with a logarithmic axis: no useful threshold flags half of the ID images."""
    rarest = max(len(inside) for inside, _ in pairs)
    exponent = min(max(math.floor(-math.log10(rarest)), -3), -1)
    shares = np.logspace(exponent, 0, 60 * -exponent + 1)
    curves = []
    for inside, outside in pairs:
        flagged_id, flagged_ood = roc_curve(inside, outside)
        curves.append(flagged_ood[np.searchsorted(flagged_id, shares, side="right") - 1])
    half = 10 ** (1 / 24)  # a strip reaches half a step to either side
    strips = [
        (x / half, x * half, f"of ID {100 * x:.2g} %\n" + _shares(names, [curve[i] for curve in curves], "\n"))
        for i, x in enumerate(shares)
        if i % 5 == 0
    ]

    def draw(axes: Any) -> None:
        axes.axvline(0.05, color=INK, linewidth=0.7, dashes=(1, 2))
        for i, curve in enumerate(curves):
            axes.plot(shares, curve, **look(i))
        ticks = [t for t in (0.001, 0.01, 0.05, 0.1, 1) if t >= shares[0]]
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{100 * t:g} %" for t in ticks])
        axes.set_xticks([], minor=True)
        axes.set_yticks(np.linspace(0, 1, 6), [f"{t} %" for t in range(0, 101, 20)])
        axes.set(xlim=(shares[0], 1), ylim=(0, 1.01), xlabel="ID images flagged", ylabel="OOD images flagged")

    return render(name, (4.6, 3.5), (0.15, 0.13, 0.94, 0.94), label, draw, strips)


def lines(name: str, series: Sequence[tuple[Array, Array]], *, axis: str, value: str, label: str) -> Html:
    """Lines of shares along numbers, which are the ticks of the axis."""
    ticks = sorted({float(x) for xs, _ in series for x in xs})

    def draw(axes: Any) -> None:
        for i, (xs, ys) in enumerate(series):
            axes.plot(xs, 100 * ys, marker="o", markersize=3.5, **look(i))
        if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
            axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.margins(y=0.15)
        axes.set(xlabel=axis, ylabel=f"{value}, %")

    return render(name, (4.6, 3.2), (0.15, 0.15, 0.96, 0.97), label, draw)


def trace(
    name: str, series: Sequence[tuple[Array, Array]], *, limit: float, since: int | None, value: str, label: str
) -> Html:
    """Values over a stream, (image numbers, values) per line, with the limit and the image that raised an alarm."""

    def draw(axes: Any) -> None:
        axes.axhline(limit, color=INK, linewidth=0.7, dashes=(4, 2))
        if since is not None:
            axes.axvline(since, color=INK, linewidth=0.7, dashes=(1, 2))
        for i, (xs, ys) in enumerate(series):
            kept = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), POINTS)).astype(int))
            axes.plot(xs[kept], ys[kept], **look(i) | {"linewidth": 1.1})
        axes.set(xlabel="image", ylabel=value)
        axes.margins(x=0)

    return render(name, (5.4, 2.3), (0.12, 0.2, 0.97, 0.96), label, draw)


def reliability_diagram(name: str, confidence: Array, right: Array, *, label: str) -> Html:
    """Share of correct predictions by confidence, from (N,) each; bars are the 95 % interval of each bin's share."""
    place = np.searchsorted(np.arange(1, BINS) / BINS, confidence)
    used = np.unique(place)
    count = np.array([np.count_nonzero(place == b) for b in used])
    sure = np.array([confidence[place == b].mean() for b in used])
    share = np.array([right[place == b].mean() for b in used])
    # Wilson's score interval: unlike the normal one it holds for few images.
    z = 1.96
    middle = share + z**2 / (2 * count)
    half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.7, dashes=(1, 2))
        axes.vlines(sure, (middle - half) / scale, (middle + half) / scale, color=ID, linewidth=1.1)
        axes.scatter(sure, share, s=12 + 130 * count / count.sum(), color=ID, linewidths=0, zorder=3, clip_on=False)
        ticks, names = np.linspace(0, 1, 6), [f"{t} %" for t in range(0, 101, 20)]
        axes.set_xticks(ticks, names)
        axes.set_yticks(ticks, names)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="correct predictions")

    return render(name, (3.7, 3.2), (0.18, 0.15, 0.93, 0.95), label, draw)


def render(
    name: str,
    inches: tuple[float, float],
    box: tuple[float, float, float, float],
    label: str,
    draw: Callable[[Any], None],
    strips: Sequence[Strip] = (),
) -> Html:
    """A figure as SVG in the page's own colors; the box of the axes is left, bottom, right and top, as shares."""
    matplotlib = require()
    target = io.StringIO()
    # The user's own style must not change a report; ids are hashes salted with the name, so they do not clash.
    with matplotlib.style.context(["default", SETTINGS | {"svg.hashsalt": name}]):
        figure = matplotlib.figure.Figure(figsize=inches)
        left, bottom, right, top = box
        axes = figure.add_axes((left, bottom, right - left, top - bottom))
        draw(axes)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(target, format="svg", transparent=True, metadata=nothing)
        hovered = _hovered(axes, strips)
    return _tidy(target.getvalue(), label, hovered)


def _shares(names: Sequence[str], shares: Sequence[float], between: str = ", ") -> str:
    short = [name if len(name) <= LONGEST else f"{name[:LONGEST]}..." for name in names]
    return between.join(f"{name} {100 * share:.0f} %" for name, share in zip(short, shares, strict=True))


def _hovered(axes: Any, strips: Sequence[Strip]) -> Html:
    """Invisible rectangles over the axes, in the points of an SVG; a line of words stands above, several inside."""
    dots = 72 / axes.figure.dpi
    height, frame = 72 * axes.figure.get_figheight(), axes.bbox
    low, wide, top, tall = frame.x0 * dots, frame.width * dots, height - frame.y1 * dots, frame.height * dots
    drawn = []
    for first, last, words in strips:
        left, right = (min(max(axes.transData.transform((x, 0))[0] * dots, low), low + wide) for x in (first, last))
        place = {"x": f"{left:.1f}", "y": f"{top:.1f}", "width": f"{right - left:.1f}", "height": f"{tall:.1f}"}
        several = words.split("\n")
        height_of_all = 0 if len(several) == 1 else tall - LEADING * len(several) + 2
        text = [
            tag("text", line, x=f"{low + wide - 4:.1f}", y=f"{top - 3 + height_of_all + LEADING * i:.1f}")
            for i, line in enumerate(several)
        ]
        drawn.append(tag("g", tag("rect", **place), *text, class_="hover"))
    return Html("").join(drawn)


def look(i: int) -> dict[str, Any]:
    """Color and dashes of the i-th curve, as in the legend."""
    dashes = DASHES[i % len(DASHES)]
    style = (0, tuple(map(float, dashes.split(",")))) if dashes else "solid"
    return {"color": CURVES[i % SERIES], "linestyle": style}


def _tidy(svg: str, label: str, hovered: Html) -> Html:
    """The SVG element alone, themed, described, and a third of its size; with what the pointer shows."""
    head, body = svg[svg.index("<svg") : svg.rindex("</svg>")].split(">", 1)
    view = head.split('viewBox="')[1].split('"')[0]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in referred else "", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)  # as older versions of matplotlib write it
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", body)
    body = re.sub(r"<[^>]*>", lambda m: re.sub(r"\d+\.\d{2,}", _rounded, m[0]), body)  # not the labels of ticks
    body = re.sub(r"\s+", " ", body).replace("> <", "><").replace("<defs></defs>", "")
    for color, variable in VARIABLES.items():
        body = body.replace(color, variable)
    return tag("svg", Html(body.strip()), hovered, role="img", aria_label=label, viewBox=view)


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
