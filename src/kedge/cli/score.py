"""``kedge score``: one row per image, for any number of images."""

import json
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kedge.checks import one_of
from kedge.cli.options import Model, Overwrite, Threads, detector_and
from kedge.cli.terminal import Console, printable
from kedge.errors import InputError
from kedge.files import check_target
from kedge.threads import use_threads

if TYPE_CHECKING:
    from kedge.scoring import RayEngine

ENGINES = ("local", "ray")
FLAGGED = 3  # the exit code with --fail-on-ood
UNREAD = 5  # the exit code if no image could be read, and with --fail-on-ood if any could not


def score(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="DETECTOR IMAGES",
            help="A calibrated detector, or the name of one that comes with kedge: cifar10. Then images, folders, "
            "globs, lists (.txt), tars, parquet files.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File of rows: .parquet, .csv or .jsonl.")] = None,
    kind: Annotated[str | None, typer.Option("--format", help="Format of --out; by default its ending.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of parquet inputs with the images.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images in a batch of the network; by default 32 to 256, by their size.")
    ] = None,
    model: Model = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that read images; by default one per core, and two with Ray.")
    ] = None,
    threads: Threads = None,
    shard: Annotated[int, typer.Option(min=1, help="Images that are written together.")] = 512,
    engine: Annotated[str, typer.Option(help="What runs the job: local (this process) or ray.")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster of this machine: auto or host:port; by default a local one."),
    ] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Workers of Ray; by default one per core.")] = None,
    summary: Annotated[bool, typer.Option(help="Write a page with a plot and the most suspicious images.")] = True,
    top: Annotated[int, typer.Option(min=0, help="Number of suspicious images to show.")] = 20,
    overwrite: Overwrite = False,
    raw_cells: Annotated[
        bool,
        typer.Option(
            "--raw-cells", help="Do not add an apostrophe to CSV text that a spreadsheet would take for a formula."
        ),
    ] = False,
    fail_on_ood: Annotated[
        bool,
        typer.Option(
            "--fail-on-ood", help=f"End with exit code {FLAGGED} if any is flagged, else {UNREAD} if any is unreadable."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the summary, or the rows.")] = False,
) -> None:
    """Classify images and flag those that are out of distribution.

    A few images are printed; with --out, one row per image is written. If the job is killed, the same command resumes
    it, and every image is in the file exactly once. Files that are not images become rows with an error; if there are
    no other rows, the exit code is 5.

    For example:

        kedge score detector.kedge photo.jpg

        kedge score detector.kedge photos/ 'more/*.png' -o out.parquet

        kedge score detector.kedge shard-{000..099}.tar -o out.csv --fail-on-ood

        kedge score detector.kedge /shared/photos -o /shared/out.parquet --engine ray --ray-address auto
    """
    from kedge.evaluation.report.document import write_page
    from kedge.io.artifact import read_tensor
    from kedge.scoring import read_rows, score_files, summarize_rows
    from kedge.scoring.job import is_begun
    from kedge.scoring.page import score_page

    detector, inputs = detector_and("IMAGES", inputs)
    runner = _engine(engine, ray_address, parallel, threads)
    page = _page_of(out, overwrite) if out is not None and summary else None
    console, result = Console(stderr=as_json), summarize_rows([])
    if out is not None:
        console.resumable(out.with_name(f"{out.name}.parts"), begun=not overwrite and is_begun(out))

    def finish(rows: Path) -> None:
        nonlocal result
        result = summarize_rows(read_rows(rows, form), top=top)
        if page is not None and (is_begun(rows) or not page.exists()):  # a complete job's page is left alone
            calibration = read_tensor(detector, "calibration.scores").double().numpy()
            title = f"Scores of {rows.name}"
            write_page(page, score_page(result, title=title, calibration=calibration, column=column))

    with tempfile.TemporaryDirectory(prefix="kedge-") if out is None else nullcontext("") as folder:
        target, form = (Path(folder) / "rows.jsonl", None) if out is None else (out, kind)
        quiet = redirect_stdout(sys.stderr) if runner else nullcontext()  # Ray prints when a worker dies
        with quiet:
            score_files(
                detector, inputs, target, kind=form, shard=shard, column=column, batch=batch, workers=workers,
                model=model, overwrite=overwrite, raw_cells=raw_cells, engine=runner, finish=finish,
            )  # fmt: skip
        for row in read_rows(target) if out is None else ():
            typer.echo(json.dumps(row) if as_json else printable(_line(row)))
    if page is not None:
        console.wrote("summary", page)
    if out is not None:
        if as_json:
            typer.echo(json.dumps(result.as_dict(), indent=1))
        flagged = f"{result.flagged:,} flagged ({result.share:.1%})"
        console.wrote(f"{result.images:,} images, {flagged}, {result.errors:,} unreadable  ", out)
        if result.errors < result.images:
            console.next(f"kedge watch {detector} {out}")
    if fail_on_ood and result.flagged:
        raise typer.Exit(FLAGGED)
    if result.errors == result.images or (fail_on_ood and result.errors):
        raise typer.Exit(UNREAD)


def _engine(name: str, address: str | None, parallel: int | None, threads: int | None) -> "RayEngine | None":
    """What runs the shards; None is this process, with so many threads."""
    from kedge.scoring import RayEngine
    from kedge.scoring.ray_engine import ray_module

    if one_of("--engine", name, ENGINES) == "ray":
        if threads is not None:
            raise InputError("--threads is for --engine local; a worker of Ray uses one core: use --parallel instead")
        ray_module()  # before anything is planned
        return RayEngine(address, parallel)
    for option, value in (("--ray-address", address), ("--parallel", parallel)):
        if value is not None:
            raise InputError(f"{option} is for --engine ray; got --engine local: add --engine ray, or leave it out")
    use_threads(threads)
    return None


def _page_of(out: Path, overwrite: bool) -> Path:
    """The file for the summary, after checking that it can be written; a resumed job replaces its own."""
    from kedge.evaluation.report.figures import require
    from kedge.scoring.job import is_begun

    require()
    page = out.with_name(f"{out.name}.html")
    if page.exists() and not (overwrite or is_begun(out) or out.exists()):  # the job itself checks an existing ``out``
        raise InputError(f"the summary must be a new file; {page} exists: move it, or use --overwrite or --no-summary")
    check_target("the summary", page)
    return page


def _line(row: dict[str, Any]) -> str:
    from kedge.detectors.detection import verdict
    from kedge.scoring.summary import class_of

    if row["error"]:
        return f"{row['name']}: {row['error']}"
    return f"{row['name']}: {class_of(row)} ({row['probability']:.0%}), {verdict(row)}, p {row['p_value']:.2g}"
