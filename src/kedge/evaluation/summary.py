"""Evaluations of the same methods over several seeds: means and deviations, as tables of text."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from kedge.errors import InputError
from kedge.evaluation.result import Evaluation, EvaluationResult
from kedge.metrics import METRICS, Estimate

SHOWN = tuple(name for name, metric in METRICS.items() if metric.shown)
BY_SET = ("auroc", "fpr95")
WIDE = 130  # columns of a terminal that shows all of them side by side
NARROW = 4  # metrics side by side in a narrower one
STAR = "* learned from outliers, or its options were chosen on some."
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$",
}  # fmt: skip


@dataclass(frozen=True)
class TextTable:
    """A table of text, whose first column names the row, in several formats.

    Example:
        >>> print(TextTable("In percent.", ("method", "AUROC"), (("AMP", "98.5"),)).markdown())
        | method | AUROC |
        |---|---:|
        | AMP | 98.5 |
        <BLANKLINE>
        In percent.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in lines]
        return "\n".join([text[0], "-" * len(text[0]), *text[1:], self.caption])

    def markdown(self) -> str:
        """A Markdown table with the caption below."""
        lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |" for r in (self.heads, *self.rows)]
        lines.insert(1, "|---" + "|---:" * (len(self.heads) - 1) + "|")
        return "\n".join([*lines, "", self.caption])

    def latex(self) -> str:
        """A LaTeX table for the package booktabs."""
        escaped = [[_latex(cell) for cell in row] for row in (self.heads, *self.rows)]
        head, *body = [" & ".join(row) + r" \\" for row in escaped]
        columns = "l" + "r" * (len(self.heads) - 1)
        begin = [r"\begin{table}", rf"\caption{{{_latex(self.caption)}}}", rf"\begin{{tabular}}{{{columns}}}"]
        end = [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        return "\n".join([*begin, r"\toprule", head, r"\midrule", *body, *end])

    def terminal(self) -> Table:
        """For `rich.console.Console.print`; a narrow terminal wraps labels and heads, and cuts no number."""
        table = Table(box=box.SIMPLE_HEAD, caption=escape(self.caption))
        for number, (head, *cells) in enumerate(zip(self.heads, *self.rows, strict=True)):
            least = max((len(word) for cell in cells for word in cell.split()), default=0)
            table.add_column(escape(head), justify="right" if number else "left", min_width=least)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


@dataclass(frozen=True)
class SeedValues:
    """A metric by seed: its mean, and its deviation (unbiased) if there are several seeds."""

    values: tuple[float, ...]

    @classmethod
    def averaged(cls, parts: Iterable[Iterable[float]]) -> "SeedValues":
        """The mean over parts, such as tasks, of what each has by seed."""
        return cls(tuple(statistics.fmean(values) for values in zip(*parts, strict=True)))

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Over the seeds, or None for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __sub__(self, other: "SeedValues") -> "SeedValues":
        """The difference seed by seed."""
        return SeedValues(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def words(self, metric: str = "auroc") -> str:
        """Mean and deviation as tables show this metric: in percent unless `kedge.metrics.METRICS` has it otherwise."""
        text = METRICS[metric].text
        return text(self.mean) + ("" if self.deviation is None else f" ± {text(self.deviation)}")


@dataclass(frozen=True)
class SeedSummary:
    """Evaluations by seed, of the same methods on sets of the same names."""

    evaluations: Mapping[int, Evaluation]

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise InputError("evaluations must hold at least one, by its seed; got none")
        for seed, evaluation in self.evaluations.items():
            if any(getattr(evaluation, f) != getattr(self.first, f) for f in ("id_name", "ood_names", "apart")):
                raise InputError(f"evaluations must be on sets of the same names; those of seed {seed} differ")
            if list(evaluation.results) != list(self.first.results):
                raise InputError(f"evaluations must be of the same methods; those of seed {seed} differ")

    @property
    def first(self) -> Evaluation:
        """The evaluation of the first seed."""
        return next(iter(self.evaluations.values()))

    def value(self, label: str, metric: str, ood: str | None = None) -> SeedValues | None:
        """A method's metric on one OOD set, or its mean over all; None if the test set has no labels."""
        values = [evaluation.results[label].value(metric, ood) for evaluation in self.evaluations.values()]
        present = tuple(value for value in values if value is not None)
        return SeedValues(present) if len(present) == len(values) else None

    def words(self, label: str, metric: str, ood: str | None = None) -> str:
        """`value` as tables show it; empty if there is none."""
        values = self.value(label, metric, ood)
        return "" if values is None else values.words(metric)

    def table(self, metrics: Sequence[str] = SHOWN) -> TextTable:
        """One row per method: means over the OOD sets, and the cost."""
        rows = []
        for label, result in self.first.results.items():
            cells = [self.words(label, metric) for metric in metrics]
            ms = statistics.fmean(e.results[label].milliseconds for e in self.evaluations.values())
            rows.append((starred(label, result), *cells, passes_text(result), f"{ms:.2f}"))
        plain = ", ".join(METRICS[metric].label for metric in metrics if not METRICS[metric].percent)
        units = f"In %{plain and f' ({plain} apart)'}"
        caption = self._caption(f"In distribution: {self.first.id_name}. {units}, means over {self.first.over}")
        caption += "passes: through the network for one image, forward + backward; ms: for one image, on this machine."
        heads = ("method", *(METRICS[metric].head for metric in metrics), "passes", "ms")
        return TextTable(caption, heads, tuple(rows))

    def tables(self, columns: int, metrics: Sequence[str] = SHOWN) -> tuple[TextTable, ...]:
        """`table` for a terminal of that many columns: in parts if it is too narrow for all metrics."""
        size = len(metrics) if columns >= WIDE else NARROW
        return tuple(self.table(metrics[i : i + size]) for i in range(0, len(metrics), size))

    def by_set(self, metric: str) -> TextTable:
        """One row per method, one column per OOD set, and their mean."""
        rows = tuple(
            (starred(label, result), *(self.words(label, metric, ood) for ood in (*self.first.ood_names, None)))
            for label, result in self.first.results.items()
        )
        caption = self._caption(f"{METRICS[metric].head} in %, in distribution: {self.first.id_name}")
        caption += f"Mean over {self.first.over}."
        return TextTable(caption, ("method", *self.first.ood_names, "mean"), rows)

    def as_dict(self) -> dict[str, Any]:
        """Everything but images and single scores, as plain data for JSON."""
        return {
            "seeds": {str(seed): evaluation.as_dict() for seed, evaluation in self.evaluations.items()},
            "summary": {
                label: {
                    metric: {"mean": values.mean, "deviation": values.deviation, "values": list(values.values)}
                    for metric in METRICS
                    if (values := self.value(label, metric)) is not None
                }
                for label in self.first.results
            },
        }

    def _caption(self, words: str) -> str:
        seeds = f", mean ± deviation over {len(self.evaluations)} seeds" if len(self.evaluations) > 1 else ""
        star = f"{STAR} " if any(result.uses_outliers for result in self.first.results.values()) else ""
        return f"{words}{seeds}. {star}{chosen_options(self.first)}"


def grouped_table(evaluation: Evaluation, metrics: Sequence[str], *, by_set: bool = False) -> TextTable:
    """One row per method: metrics of each group of OOD sets, or of each set, with their intervals; and the cost."""
    columns = evaluation.ood_names if by_set else tuple(evaluation.groups)
    rows = []
    for label, result in evaluation.results.items():
        places = result.metrics if by_set else result.groups
        cells = [_with_interval(places[column][m], m) for column in columns for m in metrics if m in result.measured]
        plain = [METRICS[m].text(result.classifier[m]) for m in metrics if m in result.classifier]
        rows.append((starred(label, result), *cells, *plain, passes_text(result), f"{result.milliseconds:.2f}"))
    first = next(iter(evaluation.results.values()))
    heads = [f"{column} {METRICS[m].head}" for column in columns for m in metrics if m in first.measured]
    heads += [METRICS[m].head for m in metrics if m in first.classifier]
    right = "" if first.accuracy is None else f"Accuracy {METRICS['accuracy'].text(first.accuracy)} %. "
    members = "" if by_set else "; ".join(f"{name}: {', '.join(oods)}" for name, oods in evaluation.groups.items())
    caption = f"In distribution: {evaluation.id_name}. {right}In %{members and f', means over {members}'}"
    caption += f", 95 % intervals of {evaluation.resamples} resamples. " if evaluation.resamples else ". "
    caption += f"{STAR} " if any(result.uses_outliers for result in evaluation.results.values()) else ""
    caption += chosen_options(evaluation)
    caption += "passes: through the network for one image, forward + backward; ms: for one image, on this machine."
    return TextTable(caption, ("method", *heads, "passes", "ms"), tuple(rows))


def _with_interval(estimate: Estimate, metric: str) -> str:
    text = METRICS[metric].text
    ends = () if estimate.low is None or estimate.high is None else (text(estimate.low), text(estimate.high))
    return text(estimate.value) + (f" ({' to '.join(ends)})" if ends else "")


def rows_by_set(evaluation: Evaluation, metrics: Sequence[str] = BY_SET) -> TextTable:
    """One row per method and OOD set: the metrics of detection, and the share of the set that the threshold flags."""
    measured = next(iter(evaluation.results.values())).measured
    shown = [metric for metric in metrics if metric in measured]
    rows = []
    for label, result in evaluation.results.items():
        for ood in evaluation.ood_names:
            cells = [METRICS[metric].text(result.detection_value(metric, ood)) for metric in shown]
            rows.append((starred(label, result), ood, *cells, f"{100 * result.flagged[ood]:.1f}"))
    inside = "; ".join(f"{label} {100 * r.flagged[evaluation.id_name]:.1f}" for label, r in evaluation.results.items())
    caption = f"By OOD set, in %. flagged: by the threshold, which flags of {evaluation.id_name}: {inside}."
    heads = ("method", "OOD set", *(METRICS[metric].head for metric in shown), "flagged")
    return TextTable(caption, heads, tuple(rows))


def chosen_options(evaluation: Evaluation) -> str:
    """The options that `kedge.tune` chose for each method, for captions; empty if it chose none."""
    chosen = [f"{label}: {result.tuned}" for label, result in evaluation.results.items() if result.tuned]
    return f"Options chosen, {'; '.join(chosen)}. " if chosen else ""


def starred(label: str, result: EvaluationResult) -> str:
    """A method's label, with a star if it learned from outliers."""
    return f"{label.rstrip('* ')} *" if result.uses_outliers else label


def passes_text(result: EvaluationResult) -> str:
    """The passes through the network for one image, forward + backward."""
    cost = result.cost
    return f"{cost.forward:g} + {cost.backward:g}" if cost.backward else f"{cost.forward:g}"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
