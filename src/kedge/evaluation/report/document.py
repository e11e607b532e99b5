"""The frame of a page: its head, its links, and its sections in order."""

from collections.abc import Iterable
from importlib.metadata import version

from kedge.evaluation.report.markup import Html, tag
from kedge.evaluation.report.style import CSS


def document(title: str, finding: str, intro: Iterable[str], parts: Iterable[tuple[str, str, Html | None]]) -> str:
    """A whole page that loads nothing.

    Args:
        title: Of the page.
        finding: What it found, in a sentence or two.
        intro: Paragraphs below it.
        parts: Identifier, name in the list of links, and content of each section; None for a section without content.

    Example:
        >>> document("Greys", "All is grey.", [], [("sets", "Sets", tag("p", "..."))])[:15]
        '<!DOCTYPE html>'
    """
    shown = [(identifier, name, part) for identifier, name, part in parts if part is not None]
    links = (tag("li", tag("a", name, href=f"#{identifier}")) for identifier, name, _ in shown)
    header = tag(
        "header",
        tag("h1", title),
        tag("p", _unbroken(finding), class_="finding"),
        *(tag("p", _unbroken(words)) for words in intro),
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(CSS)),
    )
    footer = tag("footer", tag("p", f"Written by kedge {version('kedge')}. This file is complete: it loads nothing."))
    body = tag("body", header, Html("\n"), tag("main", *(part for _, _, part in shown)), Html("\n"), footer)
    return f"<!DOCTYPE html>\n{tag('html', head, Html(chr(10)), body, lang='en')}\n"


def _unbroken(words: str) -> str:
    return words.replace(" %", "\N{NO-BREAK SPACE}%")
