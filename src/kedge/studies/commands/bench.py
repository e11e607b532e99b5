"""``kedge bench``: what a verdict costs on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kedge import models
from kedge.detectors import Detector, load
from kedge.errors import FileFormatError, InputError
from kedge.evaluation.report.figures import require
from kedge.files import atomic, check_target
from kedge.io.artifact import shipped
from kedge.studies.bench import (
    OPEN,
    TITLES,
    against,
    check,
    check_engines,
    detector_of,
    measure,
    steps_of,
    subject_of,
    title_of,
)
from kedge.studies.bench.page import page
from kedge.threads import use_threads


def bench(
    subject: Annotated[
        str,
        typer.Argument(help="A calibrated detector, one that kedge ships, or a network by name with random weights."),
    ] = "cifar10",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images at a time; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 5,
    training: Annotated[int, typer.Option(min=0, help="Cycles of five training steps; 0 for none.")] = 2,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory of each engine, in processes apart.")] = False,
    engine: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(TITLES)}.")] = None,
    open_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of images that take all anchors with early exit.")
    ] = OPEN,
    width: Annotated[int | None, typer.Option(min=1, help="Of a network by name that has one.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine; without it, as many as there are cores.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for bench.json and bench.html.")] = Path(
        "runs/bench"
    ),
    compare: Annotated[Path | None, typer.Option("--against", help="A bench.json of before, to compare with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
) -> None:
    """Measure what a verdict costs, in forward passes of the same network without anchoring.

    Every engine scores the same images in turns: the plain network, AMP as the paper's pseudo-code has it, kedge, and
    exported files where onnxruntime or OpenVINO are installed. Then anchored training steps beside plain ones. Numbers
    mean something on a machine that does nothing else.

    For example:

        kedge bench

        kedge bench detector.kedge --batch 1 --batch 64 --memory -o runs/release-2

        kedge bench wrn-40-2 --training 0 --against runs/release-1/bench.json
    """
    check_target("--out", out, folder=True)  # before minutes of measuring, not after
    require()
    console = Console(stderr=as_json)
    then = None if compare is None else _read(compare)
    check_engines(engine)
    use_threads(threads)
    detector, batches = _subject(subject, width), batch or [1, 32]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as bars:  # fmt: skip
        task = bars.add_task("measuring", total=steps_of(batches, repeats, memory=memory, training=training))
        record = measure(
            detector,
            name=Path(subject).stem,
            batches=batches,
            repeats=repeats,
            engines=engine,
            open_share=open_share,
            memory=memory,
            training=training,
            report=lambda what: bars.update(task, advance=1, description=what),
        )
    _write(out, record, then)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        _show(console, record, then)
    for name in ("bench.json", "bench.html"):
        console.print(f"{name.split('.')[1]:<10}[bold]{escape(str(out / name))}[/]", highlight=False)


def _subject(name: str, width: int | None) -> Detector:
    """A detector from a file, or on a network by name."""
    if Path(name).is_file() or name in shipped() or name not in models.model_names():
        if width is not None:
            raise InputError("width is for networks by name; a detector has its own: leave it out")
        if not Path(name).is_file() and name not in shipped():
            raise InputError(
                f"subject must be a detector's file, one of {', '.join(shipped())}, or a network, one of "
                f"{', '.join(models.model_names())}; got {name!r}"
            )
        return load(name)
    return detector_of(name, **({} if width is None else {"width": width}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return check(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise InputError(f"against must be a file that can be read; {path} cannot: {error.strerror}") from error
    except ValueError as error:
        raise FileFormatError(f"{path} must be what kedge bench wrote; it is not: {error}") from error


def _write(out: Path, record: dict[str, Any], then: dict[str, Any] | None) -> None:
    for name, text in (("bench.json", json.dumps(record, indent=1)), ("bench.html", page(record, then))):
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _show(console: Console, record: dict[str, Any], then: dict[str, Any] | None) -> None:
    changes = None if then is None else against(record, then)
    title = f"{escape(subject_of(record))}, {record['threads']} threads: median of {record['repeats']} turns"
    table = Table(title=title, caption=record["made with"]["machine"])
    heads = ["batch", "images/s", "plain passes", "quartiles"]
    heads += ["memory, MB"] if any("memory" in row for row in record["inference"]) else []
    table.add_column("engine")
    for head in heads + ([] if changes is None else ["images/s, now / then", "passes, now / then"]):
        table.add_column(head, justify="right")
    for row in record["inference"]:
        cells = [title_of(row), str(row["batch"]), f"{row['images_per_second']:,.1f}", f"{row['ratio']:.2f}"]
        cells.append(f"{row['low']:.2f} to {row['high']:.2f}")
        cells += [f"{row['memory'] / 1e6:,.0f}"] if "memory" in row else []
        if changes is not None:
            change = changes.get((row["engine"], row["batch"]))
            cells += ["", ""] if change is None else [f"{value:.2f}" for value in change]
        table.add_row(*cells)
    console.print(table)
    steps = record["training"]
    if steps is not None:
        ratio = steps["ratio"]
        spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
        console.print(f"training  an anchored step takes {ratio['median']:.2f} plain ones ({spread})", highlight=False)
    for name, reason in record["left_out"].items():
        console.print(f"left out  {TITLES[name]}: {reason}", highlight=False, markup=False)
