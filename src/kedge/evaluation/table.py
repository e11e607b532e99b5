"""A table of words, and the forms in which people want it: Markdown, LaTeX, a terminal."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Heads and rows of words; the first column names the row.

    Example:
        >>> print(Table("In percent.", ("method", "AUROC"), (("AMP", "98.5"),)).markdown())
        | method | AUROC |
        |---|---:|
        | AMP | 98.5 |
        <BLANKLINE>
        In percent.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As a Markdown table, the caption below it."""
        lines = [self.heads, *self.rows]
        text = [f"| {' | '.join(_escaped(cell, {'|': chr(92) + '|'}) for cell in line)} |" for line in lines]
        text.insert(1, "|---" + "|---:" * (len(self.heads) - 1) + "|")
        return "\n".join([*text, "", self.caption])

    def latex(self) -> str:
        """As a LaTeX table for the package booktabs."""
        lines = [" & ".join(_escaped(cell, _LATEX) for cell in line) + r" \\" for line in (self.heads, *self.rows)]
        columns = "l" + "r" * (len(self.heads) - 1)
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_escaped(self.caption, _LATEX)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )

    def terminal(self) -> RichTable:
        """For `rich.console.Console.print`; where it is narrow, labels and heads are wrapped, and no number is cut."""
        table = RichTable(box=box.SIMPLE_HEAD, caption=escape(self.caption))
        for number, (head, *cells) in enumerate(zip(self.heads, *self.rows, strict=True)):
            least = max((len(word) for cell in cells for word in cell.split()), default=0)
            table.add_column(escape(head), justify="right" if number else "left", min_width=least)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


def _escaped(text: str, replacements: Mapping[str, str]) -> str:
    return "".join(replacements.get(character, character) for character in text)
