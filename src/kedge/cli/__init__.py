"""The command line."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kedge import __version__
from kedge.cli.config import as_typed, flags, read_config
from kedge.cli.lazy import Group, LazyCommand
from kedge.cli.terminal import Console, kept, left_behind
from kedge.errors import InputError, KedgeError, KedgeWarning
from kedge.threads import keep_freed_memory

COMMANDS = (
    "fit", "train", "calibrate", "compare", "evaluate", "extract", "info", "distill", "export", "score", "serve",
    "watch", "data",
)  # fmt: skip
STOPPED = 130  # the exit code after Ctrl-C, as of other commands


class Commands(Group):
    """The commands; their errors name the option to change rather than the Python argument."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands.update({name: LazyCommand(name, f"kedge.cli.{name}:{name}") for name in COMMANDS} | plugins())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.loaded if isinstance(command, LazyCommand) else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        kept.clear()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _report("stopped", "yellow", left_behind())
            raise typer.Exit(STOPPED) from None
        except KedgeError as error:
            command = self.commands.get(ctx.invoked_subcommand)
            options = flags(command.loaded) if isinstance(command, LazyCommand) else {}
            words = as_typed(str(error), options)
            if words == str(error):
                raise
            raise type(error)(words) from error


def plugins() -> dict[str, LazyCommand]:
    """The commands of the entry points ``kedge.commands``: kedge's own studies, and those of other packages.

    One whose module is missing is reported in a line and left out.
    """
    found: dict[str, LazyCommand] = {}
    for plugin in entry_points(group="kedge.commands"):
        try:
            if plugin.name in {*COMMANDS, *found}:
                raise InputError("kedge has a command of this name")
            found[plugin.name] = LazyCommand(plugin.name, plugin.value)
        except Exception as error:
            _report("warning", "yellow", f"the command {plugin.name} ({plugin.value}) cannot be loaded: {error}")
    return found


app = typer.Typer(
    name="kedge",
    cls=Commands,
    help="Image classifiers that know when they are out of their depth.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(envvar="KEDGE_CONFIG", help="A TOML file with options by command, such as train.epochs = 8."),
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


def main() -> None:
    """Run a command; an error that kedge raises on purpose is printed in one line, with exit code 2."""
    keep_freed_memory()
    try:
        app()
    except KedgeError as error:
        _report("error", "red", str(error))
        sys.exit(2)
