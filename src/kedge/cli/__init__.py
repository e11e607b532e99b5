"""The command line."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kedge import __version__
from kedge.cli.calibrate import calibrate
from kedge.cli.config import read_config
from kedge.cli.data import data
from kedge.cli.distill import distill
from kedge.cli.evaluate import evaluate
from kedge.cli.export import export
from kedge.cli.info import info
from kedge.cli.score import score
from kedge.cli.serve import serve
from kedge.cli.train import train
from kedge.cli.watch import watch
from kedge.errors import KedgeError, KedgeWarning

app = typer.Typer(
    name="kedge",
    help="Image classifiers that know when they are out of their depth.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
app.command()(train)
app.command()(calibrate)
app.command()(evaluate)
app.command()(info)
app.command()(distill)
app.command()(export)
app.command()(score)
app.command()(serve)
app.command()(watch)
app.add_typer(data, name="data")
for plugin in entry_points(group="kedge.commands"):  # kedge's own studies, and whatever another package adds
    app.command(plugin.name)(plugin.load())


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(envvar="KEDGE_CONFIG", help="A TOML file with options by command: \\[train], epochs = 8, ..."),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        Console().print(__version__, highlight=False)
        raise typer.Exit
    context.with_resource(_told_warnings())
    if config is not None:
        context.default_map = read_config(config, context.command)


@contextmanager
def _told_warnings() -> Iterator[None]:
    """Tell kedge's warnings in a line each, as its errors are told."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", KedgeWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, KedgeWarning):
                Console(stderr=True).print(f"[bold yellow]warning:[/] {escape(str(message))}", highlight=False)
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        yield


def main() -> None:
    """Run a command; an error that kedge foresaw is told in one line, with exit code 2."""
    try:
        app()
    except KedgeError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
