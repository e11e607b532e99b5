"""Commands that are imported when they are used, so that ``kedge --help`` and shell completion need no torch."""

import ast
import importlib.util
from functools import cached_property
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kedge.errors import InputError

TYPES = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT", "text": "TEXT"}  # by what typer's word contains


class PlainHelp:
    """Shows arguments in capitals, values as N, X, PATH or TEXT, flags without a type, and paragraphs as such."""

    help: str | None

    def get_params(self, ctx: Any) -> Any:
        """The parameters of a command."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.metavar is None and param.param_type_name == "argument":
                param.metavar = param.name.upper()
            elif param.metavar is None:
                word = param.display_type(ctx) if hasattr(param, "display_type") else param.type.name
                param.metavar = next((shown for part, shown in TYPES.items() if part in word), None)
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; a terminal breaks the lines, not the docstring."""
        paragraphs = cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(map(str.strip, each.splitlines())) for each in paragraphs)
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(PlainHelp, TyperCommand):
    """A command."""


class Group(PlainHelp, TyperGroup):
    """A group of commands."""


class LazyCommand(TyperCommand):
    """A name and a description in the list of commands; `loaded` is the command itself.

    Args:
        name: The name of the command.
        target: The function, or the group of commands, as ``package.module:name``.
    """

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, help=docstring(target))
        self.target = target

    @cached_property
    def loaded(self) -> Any:
        """The command, imported."""
        app = typer.Typer(rich_markup_mode="rich", add_completion=False)
        app.callback()(lambda: None)  # a group, whatever it holds
        try:
            module, _, attribute = self.target.partition(":")
            value = getattr(import_module(module), attribute)
            if isinstance(value, typer.Typer):
                app.add_typer(value, name=self.name)
            else:
                app.command(self.name, cls=Command)(value)
            return typer.main.get_command(app).commands[self.name]  # type: ignore[attr-defined]
        except Exception as error:
            raise InputError(f"the command {self.name} ({self.target}) cannot be loaded: {error}") from error


def docstring(target: str) -> str:
    """The docstring of a function or, if it has none, of its module, read from the source without importing it."""
    module, _, name = target.partition(":")
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        raise InputError(f"there is no module {root}")
    path = Path(spec.origin)
    if parts:
        path = path.parent.joinpath(*parts).with_suffix(".py")
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes: list[ast.FunctionDef | ast.Module] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return next((text for node in (*nodes, tree) if (text := ast.get_docstring(node))), "")
