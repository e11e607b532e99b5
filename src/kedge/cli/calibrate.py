"""``kedge calibrate``: a new threshold for a saved detector."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kedge.cli.options import Alpha, AsJson, DataDir, Delta, DetectorFile, Model, Overwrite, Split
from kedge.cli.terminal import Console
from kedge.errors import InputError
from kedge.files import check_target


def calibrate(
    file: DetectorFile,
    images: Annotated[str, typer.Argument(help="In-distribution images: a data set by name, folder:PATH, npz:PATH.")],
    split: Split = None,
    alpha: Alpha = 0.05,
    delta: Delta = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; with --overwrite, the same file.")
    ] = None,
    overwrite: Overwrite = False,
    model: Model = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Set a new threshold for a detector, on in-distribution images that it was not trained on.

    For example:

        kedge calibrate detector.kedge folder:fresh-photos/ --alpha 0.01 --delta 0.1 --out strict.kedge

        kedge calibrate runs/train/detector.kedge folder:fresh-photos/ --overwrite

        kedge calibrate cifar10 folder:my-photos/ --out mine.kedge
    """
    from kedge.cli.inputs import open_images
    from kedge.detectors import load
    from kedge.io.artifact import locate

    if out is None and locate(file) != file:
        raise InputError(f"--out must name a file to write: {file} comes with kedge and is not changed")
    target = out or file
    if out is None and not overwrite:
        raise InputError(f"--out must name a file to write; to replace {file} itself, use --overwrite")
    check_target("--out", target, overwrite=overwrite)
    detector = load(file, model=model)
    held_out = open_images("IMAGES", images, split, data_dir=data_dir)
    detector.calibrate(held_out, alpha=alpha, delta=delta)
    detector.save(target)
    calibration = detector.calibration
    assert calibration is not None
    threshold, count = calibration.threshold, len(calibration.scores)
    if as_json:
        result = {"file": str(target), "threshold": threshold if math.isfinite(threshold) else None, "images": count}
        typer.echo(json.dumps(result | {"alpha": alpha, "delta": delta}, indent=1))
        return
    Console().print(f"threshold {threshold:.6g} from {count:,} images  [bold]{escape(str(target))}[/]")
    Console().next(f"kedge score {target} PHOTOS")
