"""``kedge info``: what a saved detector is."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kedge.io.facts import facts


def info(
    file: Annotated[Path, typer.Argument(help="A detector that kedge saved, or the name of one that it ships.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
) -> None:
    """Tell what a saved detector is: its method, network, classes, threshold, and how it was made.

    Nothing of the file is run, and networks that are not kedge's own need not be there.

    For example:

        kedge info cifar10

        kedge info runs/train/detector.kedge --json | jq .threshold
    """
    found = facts(file)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.items():
        words = ", ".join(map(str, value)) if isinstance(value, list) else value
        if words is not None:
            table.add_row(f"[bold]{name.replace('_', ' ')}[/]", escape(str(words)))
    Console().print(table)
