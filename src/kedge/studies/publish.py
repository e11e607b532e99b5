"""The results of a suite as files: tables beside the paper's numbers, metrics, and a report for each seed."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kedge.evaluation import Evaluation, SeedSummary, TextTable
from kedge.evaluation.noise import noise_table
from kedge.evaluation.protocol import redrawn
from kedge.evaluation.report import write_report
from kedge.evaluation.summary import starred
from kedge.files import write_json, write_text
from kedge.metrics import METRICS
from kedge.provenance import provenance
from kedge.studies.leaderboard import group_tables
from kedge.studies.paper import AVERAGE, Reported, reported
from kedge.studies.plan import Suite
from kedge.studies.run import SuiteRun


@dataclass(frozen=True)
class Published:
    """What `publish` wrote.

    Attributes:
        summary: Over the seeds.
        tables: Means over groups beside the leaderboard's; by metric beside the paper's numbers; and the noise where
            the suite has other draws of anchors.
        reports: The HTML files, by seed.
    """

    summary: SeedSummary
    tables: tuple[TextTable, ...]
    reports: tuple[Path, ...]


def publish(run: SuiteRun, evaluations: Mapping[int, Evaluation], *, command: str = "") -> Published:
    """Write metrics.json, tables.md, tables.tex and a report for each seed into the run's folder.

    Args:
        run: The suite in its folder.
        evaluations: The result of ``run.run()``.
        command: The command to run it again, for the record.
    """
    suite, folder, protocol = run.suite, run.directory, run.suite.protocol
    if protocol.ood_ratio is not None:
        evaluations = {
            seed: redrawn(table, ood_ratio=protocol.ood_ratio, draws=protocol.draws, seed=seed)
            for seed, table in evaluations.items()
        }
    summary, trainings = SeedSummary(evaluations), run.trainings()
    record = {
        "command": command,
        "missing": dict(run.data(next(iter(evaluations))).missing),
        "made with": provenance(),
        "training hours": round(sum(each["seconds"] or 0.0 for each in trainings.values()) / 3600, 2),
        "trainings": trainings,
    }
    tables = [*group_tables(summary, suite), *(beside_paper(summary, suite, metric) for metric in protocol.metrics)]
    if suite.draws:
        tables.append(noise_table(summary, suite.draws))
    write_json(folder / "metrics.json", {"record": record, **summary.as_dict()})
    shown = (summary.table(), *tables)
    write_text(folder / "tables.md", "\n\n".join(table.markdown() for table in shown) + "\n")
    write_text(folder / "tables.tex", "\n\n".join(table.latex() for table in shown) + "\n")
    reports = tuple(
        write_report(
            folder / f"report-{seed}.html", evaluation, title=suite.title, leads=suite.shown, curves=suite.curves,
            detector=run.detector(suite.shown[0], seed), record=record | {"seed": seed}, resamples=suite.comparisons,
        )
        for seed, evaluation in evaluations.items()
    )  # fmt: skip
    return Published(summary, tuple(tables), reports)


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command that is running, without the folders of this machine.

    An absolute path becomes relative to the current folder if it is inside, and its last part otherwise.
    """
    return " ".join(["kedge", *map(_relative, sys.argv[1:] if arguments is None else arguments)])


def _relative(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
    return f"{option}{equals}{shown}"


def beside_paper(summary: SeedSummary, suite: Suite, metric: str) -> TextTable:
    """A table of one metric by method and OOD set, with the paper's value in brackets where it has the cell.

    The paper's mean is over its own sets, so it is shown only where all of them are present.
    """
    cells = _paper_cells(suite, metric)
    oods = summary.first.ood_names
    complete = bool(cells) and {ood for _, ood in cells if ood != AVERAGE} <= set(oods)
    rows = []
    for label, result in summary.first.results.items():
        method = suite.methods[label].paper or ""
        values = [_both(summary.words(label, metric, ood), cells.get((method, ood))) for ood in oods]
        average = cells.get((method, AVERAGE)) if complete else None
        rows.append((starred(label, result), *values, _both(summary.words(label, metric), average)))
    caption = f"{METRICS[metric].head} in %, in distribution: {summary.first.id_name}."
    if suite.paper is not None:
        caption += f" In brackets the paper's Table {suite.paper.table} where it has the same cell; ? a printed slip."
    return TextTable(caption, ("method", *oods, "mean"), tuple(rows))


def _paper_cells(suite: Suite, metric: str) -> dict[tuple[str, str], Reported]:
    """The paper's numbers by row and OOD set, TNR as FPR."""
    if suite.paper is None:
        return {}
    numbers = reported(table=suite.paper.table, id_set=suite.paper.id_set)
    if metric == "fpr95":
        numbers = [each.as_fpr95() if each.metric == "tnr95" else each for each in numbers]
    return {(each.row, each.ood_set): each for each in numbers if each.metric == metric and each.ood_set is not None}


def _both(ours: str, theirs: Reported | None) -> str:
    return ours if theirs is None else f"{ours} ({theirs.value:g}{'?' if theirs.slip else ''})"
