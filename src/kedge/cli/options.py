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
    Path,
    typer.Argument(metavar="DETECTOR", help="A saved detector, or the name of one that comes with kedge: cifar10."),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FACTORY",
        help="A function of your own that returns the network, to use instead of the graph in the file.",
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Images at a time; by default fewer of large ones.")]
Metric = Annotated[
    list[str] | None,
    typer.Option(help="Column of the table, such as auroc or oscr, may be repeated; an unknown name lists all."),
]
Resamples = Annotated[int, typer.Option(min=0, help="Bootstrap resamples for intervals; 0 for none.")]
Half = Annotated[bool, typer.Option("--half", help="Store features in half precision.")]
Alpha = Annotated[float, typer.Option(help="The largest share of in-distribution images to flag.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of all data sets; by default the variable KEDGE_DATA.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; by default one per available core.")]


def detector_and(what: str, values: list[str]) -> tuple[Path, list[str]]:
    """The detector, and what follows it."""
    detector, *rest = values
    if not rest:
        example = "as in `kedge score birds.kedge photos/`"
        raise InputError(f"{what} must follow the detector, {example}; got {detector} alone")
    return Path(detector), rest
