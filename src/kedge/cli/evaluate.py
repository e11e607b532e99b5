"""``kedge evaluate``: how well saved detectors tell images apart."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.data import sources
from kedge.data.sources.entry import Images
from kedge.detectors import AMP, load
from kedge.errors import InputError
from kedge.evaluation import Summary
from kedge.evaluation import evaluate as evaluate_detectors
from kedge.evaluation.report import write_report
from kedge.evaluation.report.figures import require
from kedge.files import check_target
from kedge.provenance import provenance


def evaluate(
    files: Annotated[
        list[Path], typer.Argument(help="Calibrated detectors that kedge saved, or names of those that it ships.")
    ],
    test: Annotated[str, typer.Option(help="In-distribution test images: a name, folder:PATH, npz:PATH.")],
    ood: Annotated[list[str], typer.Option(help="Out-of-distribution images, in the same way; may be repeated.")],
    controls: Annotated[
        bool, typer.Option("--controls", help="Add AMP, and students of it, with temperatures permuted.")
    ] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Of the bootstrap for intervals; 0 for none.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
) -> None:
    """Measure how well detectors tell in-distribution from out-of-distribution images.

    Test sets that hold images which a detector was made with are refused.

    For example:

        kedge evaluate runs/train/detector.kedge --test cifar10 --ood svhn --ood textures --report report.html

        kedge evaluate amp.kedge energy.kedge --test folder:known/ --ood folder:strange/ --json | jq .results
    """
    console = Console(stderr=as_json)
    if report is not None:  # before minutes of scoring, not after
        check_target("--report", report)
        require()
    detectors = {file.stem if len({f.stem for f in files}) == len(files) else str(file): load(file) for file in files}
    if len(detectors) != len(files):
        raise InputError(f"files must be different detectors; got {', '.join(map(str, files))}")
    sets = _apart([(name, sources.load_dataset(name, data_dir=data_dir)) for name in (test, *ood)])
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console
    ) as bars:  # fmt: skip
        task = bars.add_task("scoring")
        found = evaluate_detectors(
            detectors,
            sets[0],
            sets[1:],
            controls=controls,
            resamples=resamples,
            seed=seed,
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        for table in Summary({seed: found}).tables(console.width):
            console.print(table.terminal())
    if report is not None:
        lead = next(iter(detectors.values()))
        record = {"command": " ".join(["kedge", *sys.argv[1:]]), "made with": provenance()}
        written = write_report(
            report,
            found,
            title=f"{found.id_name} and what is not",
            detector=lead if isinstance(lead, AMP) else None,
            record=record,
        )
        console.print(f"report    [bold]{escape(str(written))}[/]", highlight=False)


def _apart(given: list[tuple[str, Images]]) -> list[Images]:
    """The sets; those of one name are called as they were given: folder:known/test is then known/test."""
    count = Counter(found.name for _, found in given)
    return [
        found if count[found.name] == 1 else replace(found, name=name.partition(":")[2] or name)
        for name, found in given
    ]
