"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from kedge.errors import InputError

Network = Annotated[
    str,
    typer.Argument(
        help="The classifier: timm:NAME, hf:NAME, torchvision:NAME with its published weights, package.module:factory, "
        "one of kedge's own with --weights, or that of a saved detector."
    ),
]
Weights = Annotated[
    Path | None, typer.Option(help="File with the network's weights: safetensors or a torch state dict.")
]
Classes = Annotated[
    int | None, typer.Option(min=2, help="Classes of the network in --weights; by default those of the images.")
]
Mean = Annotated[str | None, typer.Option(help="Normalisation of images in [0, 1], such as 0.485,0.456,0.406.")]
Std = Annotated[str | None, typer.Option(help="The same for the deviation, such as 0.229,0.224,0.225.")]
Size = Annotated[int | None, typer.Option(min=1, help="Height and width of the inputs.")]
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
FormerDetector = Annotated[Path | None, typer.Option("--detector", hidden=True, help="The detector.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; by default one per available core.")]


def detector_and(what: str, values: list[str], former: Path | None) -> tuple[Path, list[str]]:
    """The detector and what follows it; ``--detector`` still names it too."""
    detector, rest = (former, values) if former is not None else (Path(values[0]), values[1:])
    if not rest:
        example = "as in `kedge score birds.kedge photos/`"
        raise InputError(f"{what} must follow the detector, {example}; got {values[0]} alone")
    return detector, rest
