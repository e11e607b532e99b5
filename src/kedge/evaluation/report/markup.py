"""Markup that cannot forget to escape: text is escaped wherever it enters, `Html` stands as it is."""

from collections.abc import Iterable
from html import escape

VOID = ("br", "img", "meta")  # elements without an end tag
NOTHING = "\N{EN DASH}"  # where a table has no value


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | None) -> Html:
    """One element. Plain text and attribute values are escaped; `Html` children are not.

    Attribute names may end in an underscore (``class_``), and underscores within them become hyphens. An attribute
    that is None is left out.

    Example:
        >>> tag("p", "a < b ", tag("em", "c"), class_="note", aria_label='"d"')
        '<p class="note" aria-label="&quot;d&quot;">a &lt; b <em>c</em></p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    head = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    return Html(f"<{name}{head}>" if name in VOID else f"<{name}{head}>{join(children)}</{name}>")


def join(parts: Iterable[str], separator: str = "") -> Html:
    """Parts in a row, each escaped unless it is `Html`.

    Example:
        >>> join(["<", tag("br"), ">"])
        '&lt;<br>&gt;'
    """
    return Html(separator.join(part if isinstance(part, Html) else escape(part) for part in parts))


def section(identifier: str, heading: str, *children: str) -> Html:
    """A section of the page with its heading, which links can point at.

    Example:
        >>> section("roc", "ROC curves", tag("p", "..."))
        '<section id="roc" aria-labelledby="roc-heading"><h2 id="roc-heading">ROC curves</h2><p>...</p></section>'
    """
    title = tag("h2", heading, id=f"{identifier}-heading")
    return tag("section", title, *children, id=identifier, aria_labelledby=f"{identifier}-heading")


def figure(picture: Html, *caption: str) -> Html:
    """A picture and the words below it.

    Example:
        >>> figure(tag("img", alt="a dot"), "A dot.")
        '<figure><img alt="a dot"><figcaption>A dot.</figcaption></figure>'
    """
    return tag("figure", picture, tag("figcaption", *caption))


def table(caption: str, head: Iterable[Html], rows: Iterable[Html], *, label: str) -> Html:
    """A table that scrolls within itself where the page is narrow.

    Args:
        caption: What it shows; may be `Html`.
        head: The cells of its head.
        rows: Its rows, ``<tr>`` each.
        label: Names the scrolling region to those who do not see it.

    Example:
        >>> table("Sizes", [tag("th", "n", scope="col")], [tag("tr", tag("td", "3"))], label="Sizes")[-56:]
        '</thead><tbody><tr><td>3</td></tr></tbody></table></div>'
    """
    inner = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", *head)),
        tag("tbody", join(rows, "\n")),
    )
    return tag("div", inner, class_="scroll", role="region", tabindex="0", aria_label=label)
