"""``kedge calibrate``: a new threshold for a saved detector."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kedge.artifact import locate
from kedge.data import sources
from kedge.detectors import load
from kedge.errors import InputError


def calibrate(
    file: Annotated[Path, typer.Argument(help="A detector that kedge saved, or the name of one that it ships.")],
    images: Annotated[str, typer.Argument(help="In-distribution images: a data set by name, folder:PATH, npz:PATH.")],
    split: Annotated[str | None, typer.Option(help="Of a data set by name.")] = None,
    tpr: Annotated[float, typer.Option(help="The share of in-distribution images to accept.")] = 0.95,
    confidence: Annotated[
        float | None, typer.Option(help="The probability with which the promise must hold for this calibration set.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; the same file by default.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
) -> None:
    """Set the threshold of a detector anew, on in-distribution images that it was not trained on.

    For example:

        kedge calibrate runs/train/detector.kedge folder:fresh-photos/

        kedge calibrate detector.kedge folder:fresh-photos/ --tpr 0.99 --confidence 0.9 --out strict.kedge

        kedge calibrate cifar10 folder:my-photos/ --out mine.kedge
    """
    if out is None and locate(file) != file:
        raise InputError(f"--out must say where to write: {file} comes with kedge and stays as it is")
    detector = load(file)
    found = sources.load(images, split, data_dir=data_dir)
    detector.calibrate(found, tpr=tpr, confidence=confidence)
    assert detector.calibration is not None
    detector.save(out or file)
    words = f"threshold {detector.calibration.threshold:.6g} from {len(detector.calibration.scores):,} images"
    Console().print(f"{words}  [bold]{out or file}[/]", highlight=False)
