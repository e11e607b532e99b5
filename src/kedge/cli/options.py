"""Options that several commands share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

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
Mean = Annotated[
    str | None, typer.Option(help="Mean that the network expects, of images in [0, 1], such as 0.485,0.456,0.406.")
]
Std = Annotated[str | None, typer.Option(help="Standard deviation that it expects, such as 0.229,0.224,0.225.")]
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
Batch = Annotated[int | None, typer.Option(min=1, help="Images in a batch; by default fewer if they are large.")]
Metric = Annotated[
    list[str] | None,
    typer.Option(help="Column of the table, such as auroc or oscr; may be repeated; an unknown name lists all."),
]
Resamples = Annotated[int, typer.Option(min=0, help="Bootstrap resamples for intervals; 0 for none.")]
Half = Annotated[bool, typer.Option("--half", help="Store features in half precision.")]
Alpha = Annotated[float, typer.Option(help="The largest share of in-distribution images to flag.")]
Delta = Annotated[
    float | None,
    typer.Option(help="Allowed probability, over draws of the held-out images, that more than ALPHA is flagged."),
]
Tune = Annotated[
    str | None,
    typer.Option(
        help="Choose the methods' options by 'classes' that are held out, by 'synthetic' outliers, or by OOD images "
        "such as folder:PATH; takes half of the held-out images."
    ),
]
Split = Annotated[str | None, typer.Option(help="The split of a data set by name.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Number of epochs; by default the recipe's.")]
StepSize = Annotated[int | None, typer.Option(min=2, help="Images per step; by default the recipe's.")]
LearningRate = Annotated[float | None, typer.Option(help="Highest learning rate; by default the recipe's.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
Accelerator = Annotated[str, typer.Option(help="Where to run: cpu, gpu, ...; auto is a GPU if there is one.")]
Precision = Annotated[
    str | None,
    typer.Option(help="Number format of a training, as in Lightning Fabric: bf16-mixed, 16-mixed, ..."),
]
HalfWeights = Annotated[
    bool, typer.Option("--half", help="Round the weights to half precision, which halves the file.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of all data sets; by default $KEDGE_DATA, or your cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; by default one per available core.")]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The options that go with the argument NETWORK."""

    weights: Weights = None
    classes: Classes = None
    mean: Mean = None
    std: Std = None
    size: Size = None


AS_IT_IS = NetworkOptions()


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command in whose signature a parameter like ``NetworkOptions`` is replaced by its fields.

    Example:
        >>> def fit(network: str, given: NetworkOptions) -> None: ...
        >>> list(inspect.signature(spread(fit)).parameters)
        ['network', 'weights', 'classes', 'mean', 'std', 'size']
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        kind: Any = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            parameters.extend(inspect.signature(kind, eval_str=True).parameters.values())
        else:
            parameters.append(parameter)
    if not groups:
        return command

    @wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    del run.__wrapped__  # or its signature would be read
    together = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = signature.replace(parameters=together)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in together}
    return run


def detector_and(what: str, values: list[str]) -> tuple[Path, list[str]]:
    """The detector, and what follows it."""
    detector, *rest = values
    if not rest:
        example = "as in `kedge score birds.kedge photos/`"
        raise InputError(f"{what} must follow the detector, {example}; got {detector} alone")
    return Path(detector), rest
