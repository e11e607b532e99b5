"""``kedge export``: a detector as one ONNX file."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape

from kedge.data import batches, sources
from kedge.detectors import AMP, Detector, load
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.experimental import EarlyExit
from kedge.export import Difference, OnnxDetector, compare, export_onnx, quantise
from kedge.export.onnx import FIRST_OPSET, LAST_OPSET, OPSET
from kedge.export.runtime import ENGINES, package
from kedge.files import atomic, check_target
from kedge.io.artifact import locate

LOOK = 256  # images on which the labels of both networks are compared


def export(
    file: Annotated[Path, typer.Argument(help="A calibrated detector, or the name of one that kedge ships: cifar10.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file.")],
    check: Annotated[
        bool, typer.Option(help="Compare what the file says with what the detector says before keeping it.")
    ] = True,
    opset: Annotated[
        int, typer.Option(min=FIRST_OPSET, max=LAST_OPSET, help="The version of ONNX's operations.")
    ] = OPSET,
    int8: Annotated[
        str | None, typer.Option(help="8-bit integers; training images: a data set by name, folder:PATH, npz:PATH.")
    ] = None,
    int8_split: Annotated[str | None, typer.Option(help="Of --int8; train, where a set by name has it.")] = None,
    early_exit: Annotated[
        bool, typer.Option("--early-exit", help="Two anchors for every image, and all for those that may be flagged.")
    ] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="With --int8 or --early-exit: images for the new threshold.")
    ] = None,
    calibrate_split: Annotated[str | None, typer.Option(help="Of --calibrate.")] = None,
    engine: Annotated[
        str | None, typer.Option(help=f"With --int8: what will run the file, {' (the default) or '.join(ENGINES)}.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
) -> None:
    """Write a detector to one ONNX file that needs neither kedge nor torch.

    It takes uint8 images of the network's size and gives label, probability, score, temperature, p_value and is_ood,
    and with --early-exit the passes that it took; how images are resized to that size is told in its metadata.

    For example:

        kedge export detector.kedge -o detector.onnx

        kedge export cifar10 -o small.onnx --early-exit --int8 cifar10 --calibrate folder:held-out/
    """
    given = {"--int8-split": int8_split, "--engine": engine}
    stray = ", ".join(name for name, value in given.items() if value is not None and int8 is None)
    if stray:
        raise InputError(
            f"{stray} must come with --int8, which is missing: name training images by it, or leave {stray} out"
        )
    if calibrate is None and (int8 is not None or early_exit):
        raise InputError(
            f"{'--early-exit' if int8 is None else '--int8'} must come with --calibrate, since the file gives other "
            "scores, for which the old threshold does not hold: name in-distribution images that it was not trained on"
        )
    if calibrate is not None and int8 is None and not early_exit:
        raise InputError(
            "--calibrate is for --int8 and --early-exit; to set the threshold of a detector anew, run `kedge calibrate` "
            "first"
        )
    if calibrate_split is not None and calibrate is None:
        raise InputError("--calibrate-split must come with --calibrate, which is missing: name images by it")
    check_target("--out", out)
    console, detector = Console(stderr=as_json), load(file)
    said: dict[str, Any] = {"file": str(out)}
    engine, training, held_out = engine or ENGINES[0], None, None
    if int8 is not None:  # what can fail, before minutes of work
        package(engine)
        training = sources.load_dataset(int8, int8_split or _training_split(int8), data_dir=data_dir)
    if calibrate is not None:
        held_out = sources.load_dataset(calibrate, calibrate_split, data_dir=data_dir)
    if early_exit:
        if not isinstance(detector, AMP):
            raise InputError(f"--early-exit is for AMP, which has anchors to leave out; {file} is {detector.name}")
        known = detector.calibration
        if known is None:
            raise NotReadyError(f"{file} is not calibrated: run `kedge calibrate` first")
        detector = EarlyExit(detector).calibrate(held_out, alpha=known.alpha, delta=known.delta)
    with atomic(out) as temporary:
        export_onnx(detector, temporary, opset=opset, sha256=hashlib.sha256(locate(file).read_bytes()).hexdigest())
        if check:
            found = _checked(detector, temporary)
            console.print(f"checked   {_words(found)}", highlight=False)
            said |= {"largest_difference": found.largest, "largest_score": found.scale}
        if training is not None:
            before = _labels(detector, temporary, held_out)
            quantise(temporary, temporary, training, held_out, engine=engine)
            same = float((before == _labels(detector, temporary, held_out, engine)).mean())
            console.print(f"int8      {same:.1%} of {len(before)} calibration images keep their label", highlight=False)
            said["labels_kept"] = same
    said["bytes"] = out.stat().st_size
    if as_json:
        typer.echo(json.dumps(said, indent=1))
    console.print(f"{said['bytes'] / 1e6:.2f} MB  [bold]{escape(str(out))}[/]", highlight=False)


def _checked(detector: Detector, path: Path) -> Difference:
    found = compare(detector, path)
    if not found.is_close:
        raise KedgeError(
            f"the exported file does not say what the detector says: {_words(found)}; it was not kept. Look for layers "
            "that draw random numbers or that work differently batch by batch, or pass --no-check"
        )
    return found


def _words(found: Difference) -> str:
    others = f"; {found.verdicts} other labels or decisions" if found.verdicts else ""
    return f"largest difference of a score {found.largest:.2g}, of scores up to {found.scale:.3g}{others}"


def _labels(detector: Detector, path: Path, images: Any, engine: str = ENGINES[0]) -> Any:
    """The labels of the first few images."""
    assert detector.preprocess is not None
    parts = itertools.islice(batches(images, detector.preprocess, size=32), LOOK // 32)
    pixels = torch.cat([x for x, _ in parts])
    return np.asarray(OnnxDetector(path, engine=engine)(pixels)["label"])


def _training_split(name: str) -> str | None:
    """The training images of a set by name; folders and files have no such thing."""
    return "train" if name in sources.dataset_names() and "train" in sources.source(name).splits else None
