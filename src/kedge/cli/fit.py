"""``kedge fit``: protect a classifier that exists already."""

import inspect
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kedge.checks import one_of
from kedge.cli.options import DataDir, Threads
from kedge.cli.terminal import Console, printable
from kedge.data import sources
from kedge.detectors import Detector
from kedge.detectors.registry import named_methods
from kedge.errors import InputError
from kedge.files import check_target
from kedge.models.named import network as named_network
from kedge.protect import DEFAULT_METHOD, protect
from kedge.threads import use_threads


def fit(
    network: Annotated[
        str,
        typer.Argument(
            help="The classifier: timm:NAME, hf:NAME, torchvision:NAME with its published weights, "
            "package.module:factory, or one of kedge's own with --weights."
        ),
    ],
    train: Annotated[
        str, typer.Option(help="Images that it was trained on: a data set by name, folder:PATH or npz:PATH.")
    ],
    held_out: Annotated[
        str | None,
        typer.Option(help="In-distribution images that it was not trained on; by default a fifth of --train."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("detector.kedge"),
    method: Annotated[str, typer.Option(help="Name of the detector, as in docs/methods.md.")] = DEFAULT_METHOD,
    weights: Annotated[
        Path | None, typer.Option(help="File with the network's weights: safetensors or a torch state dict.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="Classes of the network in --weights; by default those of --train.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Normalisation of images in [0, 1], such as 0.485,0.456,0.406.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="The same for the deviation, such as 0.229,0.224,0.225.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of the inputs.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="Layer to read, for methods that take one; by default the last layer's input.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="The largest share of in-distribution images to flag.")] = 0.05,
    delta: Annotated[
        float | None,
        typer.Option(help="Probability, over draws of the held-out images, that more than ALPHA is flagged."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the splits.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out.")] = False,
    threads: Threads = None,
    data_dir: DataDir = None,
) -> None:
    """Fit and calibrate a detector on a classifier as it is; nothing is trained.

    For example:

        kedge fit timm:resnet50 --train folder:photos/train --held-out folder:photos/val -o birds.kedge

        kedge fit mynet:build --train folder:train --held-out folder:val --size 224 --mean 0.5 --std 0.5

        kedge fit timm:efficientnet_lite0 --weights birds.safetensors --train folder:train -o birds.kedge
    """
    one_of("--method", method, tuple(named_methods()))
    check_target("--out", out)
    if out.exists() and not overwrite:
        raise InputError(f"--out must not exist yet; {out} does: choose another name, or use --overwrite")
    use_threads(threads)
    images = sources.load_dataset(train, "train", data_dir=data_dir, on_error="skip")
    held = None if held_out is None else sources.load_dataset(held_out, None, data_dir=data_dir, on_error="skip")
    if weights is not None and classes is None:
        classes = len(images.classes) or None
    published = weights is None and network.split(":")[0] in ("timm", "hf", "torchvision")
    net = named_network(
        network, classes=classes, pretrained=published, weights=weights, mean=_numbers("--mean", mean),
        std=_numbers("--std", std), size=size,
    )  # fmt: skip
    options = {} if layer is None else {"layer": layer}
    if layer is not None and "layer" not in inspect.signature(named_methods()[method][0]).parameters:
        raise InputError(f"--layer must come with a method that reads one layer, such as knn; {method} takes none")
    detector = protect(net, images, held, method=method, alpha=alpha, delta=delta, seed=seed, **options)
    detector.save(out)
    print_result(detector, out)


def print_result(detector: Detector, path: Path) -> None:
    """Print what `protect` measured on held-out images, where the detector is, and what to type next."""
    console, result = Console(), detector.net.record["held_out"]
    assert detector.calibration is not None
    if result["accuracy"] is not None:
        console.print(f"held-out accuracy {result['accuracy']:.1%}")
    console.print(
        f"flagged {result['flagged']:.1%} of {result['judged']:,} held-out images "
        f"(at most {detector.calibration.alpha:.0%} expected)"
    )
    console.wrote("detector", path)
    name = escape(printable(path))
    console.print(f"next      kedge score --detector {name} PHOTOS   or   kedge serve {name}")


def _numbers(option: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"{option} must be one number, or one per channel with commas between; got {text!r}"
        ) from error
