"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DetectorFile = Annotated[
    Path, typer.Argument(help="A saved detector, or the name of one that comes with kedge: cifar10.")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:FACTORY",
        help="A function of your own that returns the network, to use instead of the graph in the file.",
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of all data sets; by default the variable KEDGE_DATA.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; by default one per available core.")]
