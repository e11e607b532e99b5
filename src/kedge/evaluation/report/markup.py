"""Jinja templates, with autoescape: text is escaped wherever it enters, and `Html` stands as it is.

`render_template` renders a file of ``templates/``. `section`, `figure` and `table` are the macros of macros.html for
pages that are put together in Python, and `tag` is a single element.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

# torch depends on Jinja, so it is there without the extra "report".
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kedge.metrics import METRICS, Metric

Html = Markup  # text that is markup already
NOTHING = "\N{EN DASH}"  # in a table cell without a value
SERIES = 6  # colors for curves, --s1 to --s6 in style.css: chosen for color-blind readers, in light and in dark
DASHES = ("", "5,2", "1.5,1.5", "6,2,1.5,2")  # distinguish curves without color
LONG = 300  # characters of a line of the record that is not folded


def percent(value: float | None) -> str:
    """A share in percent to one decimal, without the sign; a dash for None."""
    return NOTHING if value is None else f"{100 * value:.1f}"


def number(value: float, digits: int = 3) -> str:
    """A number to a few digits, with its trailing zeros and a true minus sign."""
    text = f"{value:.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")
    return text.replace("-", "\N{MINUS SIGN}")


def render_template(name: str, **context: Any) -> Html:
    """Render a file of ``templates/``."""
    return Html(_environment().get_template(name).render(context))


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """One element; children and attribute values are escaped unless they are `Html`.

    Attribute names may end in an underscore (``class_``), and underscores within them become hyphens.

    Example:
        >>> str(tag("p", "a < b ", tag("em", "c"), class_="note", aria_label='"d"'))
        '<p class="note" aria-label="&#34;d&#34;">a &lt; b <em>c</em></p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    head = Html(f"<{name}") + Html("").join(Html(' {}="{}"').format(*pair) for pair in pairs) + Html(">")
    return head if name in ("br", "img") else head + Html("").join(children) + Html(f"</{name}>")


def section(identifier: str, heading: str, *children: str) -> Html:
    """A section of the page with its heading, which links can point at."""
    return _macro("section", identifier, heading, Html("\n").join(children))


def figure(picture: Html, *caption: str) -> Html:
    """A picture and its caption."""
    return _macro("figure", picture, Html("").join(caption))


def table(caption: str, heads: Iterable[str], rows: Iterable[Sequence[str]], *, label: str = "") -> Html:
    """A table that scrolls within itself on a narrow page; the first cell of a row is its heading."""
    lines = (tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows)
    return _macro("table", caption, list(heads), Html("\n").join(lines), label)


def gallery(cards: Iterable[Mapping[str, Any]]) -> Html:
    """Images that a click enlarges, each with a heading (``set``), ``lines`` and a verdict."""
    return _macro("gallery", list(cards))


def legend(names: Iterable[str]) -> Html:
    """The names of curves, in order, each with a piece of its line."""
    return _macro("legend", list(names))


def sides(inside: str, outside: str) -> Html:
    """The legend of histograms."""
    return _macro("sides", inside, outside)


def _macro(name: str, *arguments: Any) -> Html:
    macro = getattr(_environment().get_template("macros.html").module, name)
    return Html(macro(*arguments))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kedge.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"SERIES": SERIES, "DASHES": DASHES, "METRICS": METRICS}
    environment.filters |= {
        "percent": percent,
        "images": lambda n: f"{n} image" if n == 1 else f"{n} images",
        "unbroken": lambda words: words.replace(" %", "\N{NO-BREAK SPACE}%"),
        "shown": _shown,
        "one_line": _one_line,
        "plain_json": lambda value: json.dumps(value, indent=2, default=str, ensure_ascii=False),
    }
    return environment


def _shown(metric: Metric, value: float | None) -> str:
    return NOTHING if value is None else metric.text(value)


def _one_line(value: Any) -> str | None:
    """A value of the record on one line; None if it is nested or too long."""
    if not isinstance(value, (Mapping, list, tuple)):
        return str(value)
    items = list(value.values()) if isinstance(value, Mapping) else list(value)
    heads = [f"{key}: " for key in value] if isinstance(value, Mapping) else [""] * len(items)
    line = ", ".join(f"{head}{item}" for head, item in zip(heads, items, strict=True))
    return None if len(line) > LONG or any(isinstance(item, (Mapping, list, tuple)) for item in items) else line
