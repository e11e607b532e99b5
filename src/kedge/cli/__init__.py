"""The command line."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from kedge import __version__
from kedge.cli.calibrate import calibrate
from kedge.cli.config import flags, read_config
from kedge.cli.data import data
from kedge.cli.distill import distill
from kedge.cli.evaluate import evaluate
from kedge.cli.export import export
from kedge.cli.fit import fit
from kedge.cli.info import info
from kedge.cli.score import score
from kedge.cli.serve import serve
from kedge.cli.terminal import Console
from kedge.cli.train import train
from kedge.cli.watch import watch
from kedge.errors import InputError, KedgeError, KedgeWarning
from kedge.threads import keep_freed_memory


class Commands(TyperGroup):
    """The commands; their errors name the option to change rather than the Python argument."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KedgeError as error:
            name, *rest = re.split(r"(?= must )", str(error), maxsplit=1)
            flag = flags(self.commands[ctx.invoked_subcommand]).get(name)
            if flag is None or not rest:
                raise
            raise type(error)(flag + rest[0]) from error


app = typer.Typer(
    name="kedge",
    cls=Commands,
    help="Image classifiers that know when they are out of their depth.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
for command in (fit, train, calibrate, evaluate, info, distill, export, score, serve, watch):
    app.command()(command)
app.add_typer(data, name="data")


def add_plugins(app: typer.Typer) -> None:
    """Add the commands of the entry points ``kedge.commands``: kedge's own studies, and those of other packages.

    One that cannot be loaded is reported in a line and left out.
    """
    taken = {info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands} | {"data"}
    for plugin in entry_points(group="kedge.commands"):
        try:
            if plugin.name in taken:
                raise InputError("kedge has a command of this name")
            function, probe = plugin.load(), typer.Typer()
            probe.command()(function)
            typer.main.get_command(probe)  # fails if the function's parameters cannot be options
            app.command(plugin.name)(function)
        except Exception as error:
            _report("warning", "yellow", f"the command {plugin.name} ({plugin.value}) cannot be loaded: {error}")


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
        Console().print(__version__)
        raise typer.Exit
    context.with_resource(_warnings_in_a_line())
    if config is not None:
        context.default_map = read_config(config, context.command)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print kedge's warnings as one line each, like its errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", KedgeWarning)
        default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, KedgeWarning):
                _report("warning", "yellow", str(message))
            else:
                default(message, category, *place, **more)

        warnings.showwarning = show
        yield


def _report(kind: str, color: str, message: str) -> None:
    Console(stderr=True).print(f"[bold {color}]{kind}:[/] {escape(message)}")


add_plugins(app)


def main() -> None:
    """Run a command; an error that kedge raises on purpose is printed in one line, with exit code 2."""
    keep_freed_memory()
    try:
        app()
    except KedgeError as error:
        _report("error", "red", str(error))
        sys.exit(2)
