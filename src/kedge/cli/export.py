"""``kedge export``: a detector as one ONNX file."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from kedge.cli.options import AsJson, DataDir, DetectorFile, Model, Overwrite
from kedge.cli.terminal import Console
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.files import atomic, check_target

if TYPE_CHECKING:
    from kedge.detectors import Detector

COMPARED = 256  # images on which the labels of both networks are compared


def export(
    file: DetectorFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file.")],
    check: Annotated[bool, typer.Option(help="Compare the file with the detector before keeping it.")] = True,
    opset: Annotated[int, typer.Option(min=18, max=25, help="Version of ONNX's operations.")] = 20,
    int8: Annotated[
        str | None,
        typer.Option(help="Quantise to 8 bits with these training images: a data set by name, folder:PATH, npz:PATH."),
    ] = None,
    int8_split: Annotated[str | None, typer.Option(help="Split of --int8; by default train, if it has one.")] = None,
    early_exit: Annotated[
        bool, typer.Option("--early-exit", help="Stop after two anchors for images that these already decide.")
    ] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="With --int8 or --early-exit: images for the new threshold.")
    ] = None,
    calibrate_split: Annotated[str | None, typer.Option(help="Split of --calibrate.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="With --int8: the engine that will run it, onnxruntime (default) or openvino.")
    ] = None,
    weight_bits: Annotated[
        int | None,
        typer.Option(min=7, max=8, help="With --int8: 7 for processors without VNNI; by default what suits this one."),
    ] = None,
    overwrite: Overwrite = False,
    model: Model = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a detector to one ONNX file that needs neither kedge nor torch.

    It takes uint8 images of the network's size and returns label, probability, score, tau, p_value and is_ood, and with
    --early-exit the number of passes; its metadata describes how images are resized.

    For example:

        kedge export detector.kedge -o detector.onnx

        kedge export cifar10 -o small.onnx --early-exit --int8 cifar10 --calibrate folder:held-out/
    """
    import torch

    from kedge.cli.inputs import open_images
    from kedge.data import batches
    from kedge.data.leakage import fingerprints
    from kedge.detectors import AMP, load
    from kedge.detectors.training_images import refuse_training_images
    from kedge.experimental import EarlyExit
    from kedge.export import compare_verdicts, export_onnx, quantise
    from kedge.export.runtime import ENGINES, package
    from kedge.io.artifact import locate

    _check_options(int8, int8_split, early_exit, calibrate, calibrate_split, engine, weight_bits)
    check_target("--out", out, overwrite=overwrite)
    console, detector = Console(stderr=as_json), load(file, model=model)
    result: dict[str, Any] = {"file": str(out)}
    engine, training, held_out = engine or ENGINES[0], None, None
    if int8 is not None:  # what can fail, before minutes of work
        package(engine)
        training = open_images("--int8", int8, int8_split or _training_split(int8), data_dir=data_dir)
    if calibrate is not None:
        held_out = open_images("--calibrate", calibrate, calibrate_split, data_dir=data_dir)
        if detector.preprocess is not None:
            prints = torch.cat([fingerprints(x) for x, _ in batches(held_out, detector.preprocess)])
            refuse_training_images(prints, detector.fitted_on)
    if early_exit:
        if detector.reads != "per_anchor_logits":
            raise InputError(f"--early-exit is for AMP, which has anchors to leave out; {file} is {detector.name}")
        if detector.calibration is None:
            raise NotReadyError(f"DETECTOR must be calibrated; {file} is not: run `kedge calibrate` first")
        guarantee: Any = {"alpha": detector.calibration.alpha, "delta": detector.calibration.delta}
        detector = EarlyExit(cast(AMP, detector)).calibrate(held_out, **guarantee)
    with atomic(out) as temporary:
        export_onnx(detector, temporary, opset=opset, sha256=hashlib.sha256(locate(file).read_bytes()).hexdigest())
        if check:
            difference = compare_verdicts(detector, temporary)
            others = f"; {difference.verdicts} other labels or decisions" if difference.verdicts else ""
            words = f"largest difference of a score {difference.largest:.2g}, of scores up to {difference.scale:.3g}"
            if not difference.is_close:
                raise KedgeError(
                    f"the exported file differs from the detector: {words}{others}; it was not kept. Look for layers "
                    "that draw random numbers or depend on the batch, or pass --no-check"
                )
            console.print(f"checked   {words}{others}", highlight=False)
            result |= {"largest_difference": difference.largest, "largest_score": difference.scale}
        if training is not None:
            before = _labels(detector, temporary, held_out, ENGINES[0])
            quantise(temporary, temporary, training, held_out, engine=engine, weight_bits=weight_bits)
            same = float((before == _labels(detector, temporary, held_out, engine)).mean())
            console.print(f"int8      {same:.1%} of {len(before)} calibration images keep their label", highlight=False)
            result["labels_kept"] = same
    result["bytes"] = out.stat().st_size
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    console.print(f"{result['bytes'] / 1e6:.2f} MB  [bold]{escape(str(out))}[/]", highlight=False)
    console.next(f"kedge.export.OnnxDetector({str(out)!r})(images) in Python")


def _check_options(
    int8: str | None, int8_split: str | None, early_exit: bool, calibrate: str | None, split: str | None,
    engine: str | None, weight_bits: int | None,
) -> None:  # fmt: skip
    """Refuse options that would be ignored, and changes of the scores without a new threshold."""
    given = {"--int8-split": int8_split, "--engine": engine, "--weight-bits": weight_bits}
    stray = ", ".join(name for name, value in given.items() if value is not None and int8 is None)
    if stray:
        raise InputError(f"{stray} must come with --int8, which is missing: add it, or leave {stray} out")
    if calibrate is None and (int8 is not None or early_exit):
        raise InputError(
            f"{'--early-exit' if int8 is None else '--int8'} must come with --calibrate, since it changes the scores "
            "and the old threshold does not hold: name in-distribution images that were not trained on"
        )
    if calibrate is not None and int8 is None and not early_exit:
        raise InputError("--calibrate is for --int8 and --early-exit; for a new threshold alone, run `kedge calibrate`")
    if split is not None and calibrate is None:
        raise InputError("--calibrate-split must come with --calibrate, which is missing: add --calibrate")


def _labels(detector: "Detector", path: Path, images: Any, engine: str) -> Any:
    """The labels of the first few images."""
    import numpy as np
    import torch

    from kedge.data import batches
    from kedge.export import OnnxDetector

    assert detector.preprocess is not None
    parts = itertools.islice(batches(images, detector.preprocess, size=32), COMPARED // 32)
    return np.asarray(OnnxDetector(path, engine=engine)(torch.cat([x for x, _ in parts]))["label"])


def _training_split(name: str) -> str | None:
    """The training images of a set by name; folders and files have no such split."""
    from kedge.data import sources

    return "train" if name in sources.dataset_names() and "train" in sources.source(name).splits else None
