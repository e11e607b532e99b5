"""``kedge calibrate``: a new threshold for a saved detector."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kedge.data import sources
from kedge.detectors import load
from kedge.errors import InputError
from kedge.files import check_target
from kedge.io.artifact import locate


def calibrate(
    file: Annotated[Path, typer.Argument(help="A detector that kedge saved, or the name of one that it ships.")],
    images: Annotated[str, typer.Argument(help="In-distribution images: a data set by name, folder:PATH, npz:PATH.")],
    split: Annotated[str | None, typer.Option(help="Of a data set by name.")] = None,
    alpha: Annotated[float, typer.Option(help="The largest share of in-distribution images to flag.")] = 0.05,
    delta: Annotated[
        float | None, typer.Option(help="The probability with which the promise must hold for this calibration set.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; the same file by default.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
) -> None:
    """Set the threshold of a detector anew, on in-distribution images that it was not trained on.

    For example:

        kedge calibrate runs/train/detector.kedge folder:fresh-photos/

        kedge calibrate detector.kedge folder:fresh-photos/ --alpha 0.01 --delta 0.1 --out strict.kedge

        kedge calibrate cifar10 folder:my-photos/ --out mine.kedge
    """
    if out is None and locate(file) != file:
        raise InputError(f"--out must say where to write: {file} comes with kedge and stays as it is")
    written = out or file
    check_target("--out", written)
    detector = load(file)
    found = sources.load_dataset(images, split, data_dir=data_dir)
    detector.calibrate(found, alpha=alpha, delta=delta)
    known = detector.calibration
    assert known is not None
    detector.save(written)
    if as_json:
        threshold = known.threshold if math.isfinite(known.threshold) else None
        said = {"file": str(written), "threshold": threshold, "images": len(known.scores)}
        typer.echo(json.dumps(said | {"alpha": alpha, "delta": delta}, indent=1))
        return
    words = f"threshold {known.threshold:.6g} from {len(known.scores):,} images"
    Console().print(f"{words}  [bold]{escape(str(written))}[/]", highlight=False)
