"""How objects show themselves: tables for notebooks, counts in words."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

ROWS = 10  # of a long table, in a notebook


def counted(n: int, noun: str, plural: str = "") -> str:
    """A number and a noun, with an s if it has no other plural.

    Example:
        >>> counted(1, "image"), counted(37_685, "image")
        ('1 image', '37,685 images')
    """
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table for a notebook; its text is escaped.

    Example:
        >>> html_table(("name", "score"), [("<a>.png", 0.5)])
        '<table><thead><tr><th>name</th><th>score</th></tr></thead><tbody><tr><td>&lt;a&gt;.png</td><td>0.5</td></tr></tbody></table>'
    """

    def line(cells: Iterable[Any], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    shown = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead>{line(heads, 'th')}</thead>" if heads else ""
    return f"<table>{shown}{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def html_facts(facts: Mapping[str, Any]) -> str:
    """A table of names and values for a notebook."""
    return html_table((), facts.items())
