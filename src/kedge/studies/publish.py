"""What a suite found, as files: tables, numbers, and a report for each seed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kedge.detectors import AMP
from kedge.evaluation import Evaluation, SeedSummary, TextTable
from kedge.evaluation.noise import noise_table
from kedge.evaluation.protocol import redrawn
from kedge.evaluation.report import write_report
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.beside import beside_paper
from kedge.studies.run import SuiteRun


@dataclass(frozen=True)
class Published:
    """What was written, and what to print.

    Attributes:
        summary: Over the seeds.
        tables: By metric beside the paper's numbers, and the noise where the suite has other draws of anchors.
        reports: The HTML files, by seed.
    """

    summary: SeedSummary
    tables: tuple[TextTable, ...]
    reports: tuple[Path, ...]


def publish(run: SuiteRun, evaluations: Mapping[int, Evaluation], *, command: str = "") -> Published:
    """Write metrics.json, tables.md, tables.tex and a report for each seed into the run's folder.

    Args:
        run: The suite in its folder.
        evaluations: What ``run.run()`` gave.
        command: For the record: what the reader can type to run it again.
    """
    suite, folder = run.suite, run.directory
    if suite.protocol.ood_ratio is not None:
        ratio, draws = suite.protocol.ood_ratio, suite.protocol.draws
        evaluations = {
            seed: redrawn(table, ood_ratio=ratio, draws=draws, seed=seed) for seed, table in evaluations.items()
        }
    summary = SeedSummary(evaluations)
    missing = dict(run.data(next(iter(evaluations))).missing)
    trainings = run.trainings()
    hours = sum(each["seconds"] or 0.0 for each in trainings.values()) / 3600
    record = {
        "command": command,
        "missing": missing,
        "made with": provenance(),
        "training hours": round(hours, 2),
        "trainings": trainings,
    }
    tables = [beside_paper(summary, suite, metric) for metric in suite.protocol.metrics]
    if suite.draws:
        tables.append(noise_table(summary, suite.draws))
    with atomic(folder / "metrics.json") as temporary:
        temporary.write_text(json.dumps({"record": record, **summary.as_dict()}, indent=1))
    for name, written in (("tables.md", TextTable.markdown), ("tables.tex", TextTable.latex)):
        with atomic(folder / name) as temporary:
            temporary.write_text("\n\n".join(map(written, (summary.table(), *tables))) + "\n", encoding="utf-8")
    reports = []
    for seed, evaluation in evaluations.items():
        detector = run.detector(suite.shown[0], seed)
        reports.append(
            write_report(
                folder / f"report-{seed}.html",
                evaluation,
                title=suite.title,
                leads=suite.shown,
                detector=detector if isinstance(detector, AMP) else None,
                curves=suite.curves,
                record=record | {"seed": seed},
                resamples=suite.comparisons,
            )
        )
    return Published(summary, tuple(tables), tuple(reports))
