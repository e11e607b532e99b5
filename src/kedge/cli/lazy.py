"""Commands that are imported when they are used, so that ``kedge --help`` and shell completion need no torch."""

import ast
import importlib.util
import os
import sys
from functools import cached_property
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from kedge.cli.options import spread
from kedge.cli.terminal import UNLIMITED
from kedge.errors import InputError

TYPES = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT", "text": "TEXT"}  # by what typer's word contains


class PlainHelp:
    """Shows arguments in capitals, values as N, X, PATH or TEXT, flags without a type, and examples line by line.

    In a pipe nothing is wrapped, so that a search finds whole lines.
    """

    help: str | None
    rich_markup_mode: Any

    def get_params(self, ctx: Any) -> Any:
        """The parameters of a command."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.param_type_name == "argument":
                name = param.metavar or param.name.upper()
                param.metavar, param.display_type_rich = name, lambda ctx: None
                shown = (name if param.required else f"[{name}]") + "..." * (param.nargs != 1)
                param.get_usage_pieces = lambda ctx, shown=shown: [shown]
            elif param.metavar is None:
                word = param.display_type(ctx) if hasattr(param, "display_type") else param.type.name
                param.metavar = next((shown for part, shown in TYPES.items() if part in word.lower()), None)
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; a terminal breaks the lines, not the docstring."""
        text, mode = self.help, self.rich_markup_mode
        piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        self.help = laid_out(text or "")
        if piped:
            self.rich_markup_mode, formatter.width = None, UNLIMITED
            self.help = laid_out(Text.from_markup(text or "").plain, "\n\n\b\n")
        super().format_help(ctx, formatter)  # type: ignore[misc]
        self.help, self.rich_markup_mode = text, mode


def laid_out(text: str, before: str = "\n") -> str:
    r"""A docstring with a line for each paragraph and each example, and ``before`` a group of examples.

    Example:
        >>> print(laid_out("One\ntwo.\n\nFor example:\n\n    kedge data list\n\n    kedge info cifar10"))
        One two.
        <BLANKLINE>
        For example:
        kedge data list
        kedge info cifar10
    """
    lines, example = "", False
    for block in cleandoc(text).split("\n\n"):
        again, example = example, block.startswith("    ")
        gap = "\n\n" if not example else "\n" if again else before
        lines += gap + (dedent(block) if example else " ".join(block.splitlines()))
    return lines.removeprefix("\n\n")


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
                app.command(self.name, cls=Command)(spread(value))
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
