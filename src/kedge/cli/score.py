"""``kedge score``: a row for each image, of any number of them."""

import json
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kedge.checks import one_of
from kedge.detectors import load
from kedge.errors import InputError
from kedge.evaluation.report.figures import require
from kedge.files import atomic, check_target
from kedge.scoring import FORMATS, RayEngine, Summary, read_rows, score_files, summarise
from kedge.scoring.inputs import SHARD
from kedge.scoring.job import begun
from kedge.scoring.page import page
from kedge.scoring.ray_engine import ray_module
from kedge.threads import use_threads

ENGINES = ("local", "ray")
FLAGGED = 3  # the exit code with --fail-on-ood
UNREAD = 5  # the exit code where nothing could be read, and with --fail-on-ood where anything could not


def score(
    inputs: Annotated[list[str], typer.Argument(help="Images, folders, globs, lists (.txt), tars, parquet files.")],
    detector: Annotated[
        Path, typer.Option(help="A calibrated detector, or the name of one that kedge ships: cifar10.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help=f"The rows: .{', .'.join(FORMATS)}.")] = None,
    kind: Annotated[str | None, typer.Option("--format", help="Of --out, where its name does not tell.")] = None,
    column: Annotated[str | None, typer.Option(help="Of parquet inputs: where the images are.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images that the network sees at a time.")] = 256,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads that read images; without it, one for each core, at most 8, and two a worker with Ray."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the network; without it, as many as there are cores for it.")
    ] = None,
    shard: Annotated[int, typer.Option(min=1, help="Images that are written together.")] = SHARD,
    engine: Annotated[str, typer.Option(help="What runs the shards: local (this process) or ray.")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(help="Of the cluster that this machine is in: auto, host:port; without it a local one."),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Workers of the cluster, of a core each; without it, one for each core.")
    ] = None,
    summary: Annotated[bool, typer.Option(help="Write a page with shares, a plot and the most suspicious.")] = True,
    top: Annotated[int, typer.Option(min=0, help="How many of the most suspicious to show.")] = 20,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over --out and its summary.")] = False,
    fail_on_ood: Annotated[
        bool,
        typer.Option(
            "--fail-on-ood", help=f"End with exit code {FLAGGED} if any is flagged, else {UNREAD} if any is unreadable."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the summary, or the rows.")] = False,
) -> None:
    """Say of each image what it is, and whether it is anything like what the network has learned.

    A few images are printed; with --out a row is written for each. Killed at any moment, the same command goes on where
    it was, and every image is in the file exactly once. Files that are no images become rows with an error; where there
    is no other row, the exit code is 5.

    For example:

        kedge score --detector detector.kedge photo.jpg

        kedge score --detector detector.kedge photos/ 'more/*.png' -o out.parquet

        kedge score --detector detector.kedge shard-{000..099}.tar -o out.csv --fail-on-ood

        kedge score --detector detector.kedge /shared/photos -o /shared/out.parquet --engine ray --ray-address auto
    """
    runner = _engine(engine, ray_address, parallel, threads)
    written = _page_of(out, overwrite) if out is not None and summary else None
    console = Console(stderr=as_json)
    found = summarise([])

    def finish(rows: Path) -> None:
        nonlocal found
        found = summarise(read_rows(rows, form), top=top)
        if written is not None:
            _write_page(found, written, f"Scores of {rows.name}", detector, column)

    with tempfile.TemporaryDirectory(prefix="kedge-") as temporary:
        target, form = (Path(temporary) / "rows.jsonl", None) if out is None else (out, kind)
        options = {"shard": shard, "column": column, "batch": batch, "workers": workers, "overwrite": overwrite}
        _run(console, detector, inputs, target, kind=form, engine=runner, finish=finish, **options)
        if out is None:
            _print_rows(console, target, as_json)
    if out is not None:
        if written is not None:
            console.print(f"summary   [bold]{escape(str(written))}[/]", highlight=False)
        if as_json:
            typer.echo(json.dumps(found.as_dict(), indent=1))
        console.print(
            f"{found.images:,} images, {found.flagged:,} flagged ({found.share:.1%}), {found.errors:,} unreadable  "
            f"[bold]{escape(str(out))}[/]",
            highlight=False,
        )
    if fail_on_ood and found.flagged:
        raise typer.Exit(FLAGGED)
    if found.errors == found.images or (fail_on_ood and found.errors):
        raise typer.Exit(UNREAD)


def _engine(name: str, address: str | None, parallel: int | None, threads: int | None) -> RayEngine | None:
    """What runs the shards; None is this process, with so many threads."""
    if one_of("engine", name, ENGINES) == "ray":
        if threads is not None:
            raise InputError("threads is for the engine 'local'; a worker of Ray is one core: say --parallel instead")
        ray_module()  # before anything is planned
        return RayEngine(address, parallel)
    for option, value in (("ray-address", address), ("parallel", parallel)):
        if value is not None:
            raise InputError(f"{option} is for Ray, but the engine is 'local': add --engine ray, or leave it out")
    use_threads(threads)
    return None


def _run(console: Console, detector: Path, inputs: list[str], target: Path, **options: Any) -> None:
    """Score with a progress bar."""
    columns = (
        TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("scoring", total=None, rate="")

        def on_progress(done: int, total: int) -> None:
            speed = bars.tasks[task].speed
            bars.update(task, completed=done, total=total, rate="" if speed is None else f"{speed:,.0f} images/s")

        with redirect_stdout(sys.stderr) if options["engine"] else nullcontext():  # Ray prints when a worker dies
            score_files(detector, inputs, target, progress=on_progress, **options)


def _print_rows(console: Console, target: Path, as_json: bool) -> None:
    for row in read_rows(target):
        if as_json:
            typer.echo(json.dumps(row))
        else:
            console.print(_line(row), highlight=False, markup=False)


def _page_of(out: Path, overwrite: bool) -> Path:
    """Where the summary goes, once it is sure that it can be written; a job that goes on writes over its own."""
    require()
    written = out.with_name(f"{out.name}.html")
    if written.exists() and not (overwrite or begun(out) or out.exists()):  # of ``out`` the job itself will tell
        raise InputError(
            f"the summary must not be there yet; {written} is: move it, or say --overwrite or --no-summary"
        )
    check_target("the summary", written)
    return written


def _write_page(found: Summary, written: Path, title: str, detector: Path, column: str | None) -> None:
    known = load(detector).calibration
    assert known is not None
    with atomic(written) as temporary:
        text = page(found, title=title, calibration=known.scores.double().numpy(), column=column)
        temporary.write_text(text, encoding="utf-8", errors="replace")


def _line(row: dict[str, object]) -> str:
    if row["error"]:
        return f"{row['path']}: {row['error']}"
    verdict = "OUT OF DISTRIBUTION" if row["is_ood"] else "in distribution"
    return f"{row['path']}: {row['label']} ({row['probability']:.0%}), {verdict}, p {row['p_value']:.2g}"
