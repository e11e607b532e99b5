"""``kedge bench``: the cost of a detection on this machine."""

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kedge.cli.options import AsJson, Overwrite, Threads
from kedge.cli.terminal import Console
from kedge.errors import FileFormatError, InputError
from kedge.files import check_target, write_json, write_text
from kedge.progress import progress_bar
from kedge.threads import use_threads

if TYPE_CHECKING:
    from kedge.detectors import Detector


def bench(
    subject: Annotated[
        str,
        typer.Argument(help="A calibrated detector, one that kedge ships, or a network by name with random weights."),
    ] = "cifar10",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 5,
    training: Annotated[int, typer.Option(min=0, help="Cycles of five training steps; 0 for none.")] = 2,
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure peak memory too, of each engine by itself.")
    ] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="Measure only this engine; may be repeated; an unknown name lists all.")
    ] = None,
    full_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of images that take all anchors under early exit.")
    ] = 0.2,
    width: Annotated[int | None, typer.Option(min=1, help="Width of a network by name.")] = None,
    threads: Threads = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for bench.json and bench.html.")] = Path(
        "runs/bench"
    ),
    compare: Annotated[Path | None, typer.Option("--against", help="An earlier bench.json to compare with.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of a detection, in forward passes of the same network without anchoring.

    Every engine scores the same images in turns: the unanchored network, AMP as in the paper's pseudo-code, kedge, and
    exported files where onnxruntime or OpenVINO are installed. Then anchored and unanchored training steps. Run it on
    a machine that does nothing else.

    For example:

        kedge bench

        kedge bench detector.kedge --batch 1 --batch 64 --memory -o runs/release-2

        kedge bench wrn-40-2 --training 0 --against runs/release-1/bench.json
    """
    from kedge.evaluation.report.figures import require
    from kedge.studies.bench import check_engines, measure, progress_steps
    from kedge.studies.bench.page import bench_page

    check_target("--out", out, folder=True)
    check_target("--out", out / "bench.json", overwrite=overwrite)  # before minutes of measuring, not after
    require()
    console = Console(stderr=as_json)
    then = None if compare is None else _read(compare)
    check_engines(engine)
    use_threads(threads)
    detector, batches = _subject(subject, width), batch or [1, 32]
    steps, count = progress_steps(batches, repeats, memory=memory, training=training), itertools.count(1)
    with progress_bar("measuring", steps) as update:
        record = measure(
            detector,
            name=Path(subject).stem,
            batches=batches,
            repeats=repeats,
            engines=engine,
            share=full_share,
            memory=memory,
            training=training,
            report=lambda step: update(next(count), note=step),
        )
    write_json(out / "bench.json", record)
    write_text(out / "bench.html", bench_page(record, then))
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        _show(console, record, then)
    for name in ("bench.json", "bench.html"):
        console.wrote(name.split(".")[1], out / name)
    console.next(f"kedge bench {subject} --against {out / 'bench.json'} -o OTHER-FOLDER")


def _subject(name: str, width: int | None) -> "Detector":
    """A detector from a file, or on a network by name."""
    from kedge import models
    from kedge.detectors import load
    from kedge.io.artifact import shipped
    from kedge.studies.bench import detector_of

    if Path(name).is_file() or name in shipped():
        if width is not None:
            raise InputError(f"--width is for networks by name; {name} is a detector with its own: leave it out")
        return load(name)
    if name not in models.model_names():
        raise InputError(
            f"SUBJECT must be a detector's file, one of {', '.join(shipped())}, or a network, one of "
            f"{', '.join(models.model_names())}; got {name!r}"
        )
    return detector_of(name, **({} if width is None else {"width": width}))


def _read(path: Path) -> dict[str, Any]:
    from kedge.studies.bench import check_record

    try:
        return check_record(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise InputError(f"--against must be a file that can be read; {path} cannot: {error.strerror}") from error
    except ValueError as error:
        raise FileFormatError(f"{path} must be a bench.json that kedge bench wrote; it is not: {error}") from error


def _show(console: Console, record: dict[str, Any], then: dict[str, Any] | None) -> None:
    from kedge.studies.bench import TITLES
    from kedge.studies.bench.measure import subject_title, table_of, training_words

    title = f"{escape(subject_title(record))}, {record['threads']} threads: median of {record['repeats']} turns"
    table = Table(title=title, caption=record["made with"]["machine"])
    heads, rows = table_of(record, then)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if record["training"] is not None:
        console.print(f"training  {training_words(record['training'])}")
    for name, reason in record["left_out"].items():
        console.print(f"left out  {TITLES[name]}: {reason}", markup=False)
