"""``kedge info``: describe a saved detector."""

import json
import math

import typer
from rich.markup import escape
from rich.table import Table

from kedge.cli.options import AsJson, DetectorFile
from kedge.cli.terminal import Console


def info(file: DetectorFile, as_json: AsJson = False) -> None:
    """Describe a saved detector: its method, network, classes, threshold and training.

    Nothing from the file is run, and the code of a network that is not kedge's own is not needed.

    For example:

        kedge info cifar10

        kedge info runs/train/detector.kedge --json | jq .threshold
    """
    from kedge.io.facts import facts

    described = facts(file)
    if described["threshold"] == math.inf:
        described["threshold"] = None if as_json else "none: too few calibration images to flag any"
    if as_json:
        typer.echo(json.dumps(described, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in described.items():
        words = ", ".join(map(str, value)) if isinstance(value, list) else value
        words = f"{words:.5g}" if isinstance(words, float) else words
        if words is not None:
            table.add_row(f"[bold]{name.replace('_', ' ')}[/]", escape(str(words)))
    Console().print(table)
    Console().next(f"kedge score {file} PHOTOS")
