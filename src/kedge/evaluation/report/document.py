"""A whole page: its head, its links, and its sections in order."""

import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from kedge.evaluation.report.markup import Html, render_template
from kedge.files import atomic


def document(
    title: str,
    finding: str,
    intro: Iterable[str],
    parts: Iterable[tuple[str, str, Html | None]],
    *,
    opening: Html | None = None,
) -> str:
    """A page that loads nothing; parts are (identifier, name in the links, content), None for no content.

    The opening stands between the finding and the intro.
    """
    shown = [part for part in parts if part[2] is not None]
    page = render_template(
        "page.html", title=title, finding=finding, opening=opening or "", intro=list(intro), parts=shown,
        version=version("kedge"),
    )  # fmt: skip
    return f"{page}\n"


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page whole or not at all; its folder is created if needed."""
    with atomic(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return Path(path)
