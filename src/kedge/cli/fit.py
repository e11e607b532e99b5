"""``kedge fit``: protect a classifier that exists already."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kedge.cli.options import AS_IT_IS, Alpha, DataDir, Delta, Network, NetworkOptions, Overwrite, Threads, Tune
from kedge.cli.terminal import Console, printable
from kedge.errors import InputError
from kedge.files import check_target
from kedge.threads import use_threads

if TYPE_CHECKING:
    from kedge.detectors import Detector


def fit(
    network: Network,
    train: Annotated[
        str, typer.Option(help="Images that it was trained on: a data set by name, folder:PATH or npz:PATH.")
    ],
    held_out: Annotated[
        str | None,
        typer.Option(help="In-distribution images that it was not trained on; by default a fifth of --train."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("detector.kedge"),
    method: Annotated[
        str, typer.Option(help="Name of the detector, as in docs/methods.md, or several to combine, as mds++,gen.")
    ] = "default",
    given: NetworkOptions = AS_IT_IS,
    layer: Annotated[
        str | None, typer.Option(help="Layer to read, for methods that take one; by default the last layer's input.")
    ] = None,
    alpha: Alpha = 0.05,
    delta: Delta = None,
    tune: Tune = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the splits.")] = 0,
    overwrite: Overwrite = False,
    threads: Threads = None,
    data_dir: DataDir = None,
) -> None:
    """Fit and calibrate a detector on a classifier as it is; nothing is trained.

    For example:

        kedge fit timm:resnet50 --train folder:photos/train --held-out folder:photos/val -o birds.kedge

        kedge fit mynet:build --train folder:train --held-out folder:val --size 224 --mean 0.5 --std 0.5

        kedge fit timm:efficientnet_lite0 --weights birds.safetensors --train folder:train -o birds.kedge
    """
    from kedge.cli.inputs import open_images, open_network
    from kedge.detectors.registry import method_of
    from kedge.io.tuned import WAYS
    from kedge.protect import protect

    kind, _ = method_of(method, "--method")
    check_target("--out", out, overwrite=overwrite)
    use_threads(threads)
    images = open_images("--train", train, "train", data_dir=data_dir, on_error="skip")
    held = None
    if held_out is not None:
        held = open_images("--held-out", held_out, data_dir=data_dir, on_error="skip")
    net = open_network(network, images, given)
    options = {} if layer is None else {"layer": layer}
    if layer is not None and "layer" not in inspect.signature(kind).parameters:
        raise InputError(f"--layer must come with a method that reads one layer, such as knn; {method} takes none")
    by = tune if tune is None or tune in WAYS else open_images("--tune", tune, data_dir=data_dir)
    detector = protect(net, images, held, method=method, alpha=alpha, delta=delta, tune=by, seed=seed, **options)
    detector.save(out)
    print_result(detector, out)


def print_result(detector: "Detector", path: Path) -> None:
    """Print what `protect` measured on held-out images, where the detector is, and what to type next."""
    console, result = Console(), detector.net.record["held_out"]
    assert detector.calibration is not None
    if detector.tuned is not None:
        console.print(f"options   {escape(printable(detector.tuned))}", highlight=False)
    if result["accuracy"] is not None:
        console.print(f"held-out accuracy {result['accuracy']:.1%}")
    console.print(
        f"flagged {result['flagged']:.1%} of {result['judged']:,} held-out images "
        f"(at most {detector.calibration.alpha:.0%} expected)"
    )
    console.wrote("detector", path)
    console.next(f"kedge score {path} PHOTOS", f"kedge serve {path}")
