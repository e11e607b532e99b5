"""The ONNX file: weights inside, the detector described in its metadata, calibration in tensors of fixed names."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kedge.checks import needs
from kedge.data import Preprocess
from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.files import atomic

PREFIX = "kedge."
WEIGHT_BITS = f"{PREFIX}weight_bits"  # of a quantised file; earlier ones have 7
CALIBRATION = ("calibration.scores", "calibration.ranks", "threshold", "probability.temperature")
SCORES, RANKS, THRESHOLD, TEMPERATURE = CALIBRATION
EXIT_THRESHOLD = "settled"  # of early exit; its name in files
LARGEST = 2**31 - 2**20  # bytes of weights: protobuf's limit for a file, less some room for the rest


def read_model(path: str | os.PathLike[str]) -> Any:
    """Read an ONNX file that kedge wrote, as onnx's ModelProto."""
    onnx = needs("onnx", "onnx")
    if not Path(path).is_file():
        raise InputError(f"path must be an ONNX file that kedge exported; there is no file {path}")
    try:
        model = onnx.load(path)
    except Exception as error:  # protobuf's errors share no base class
        raise FileFormatError(f"{path} is truncated or is not an ONNX file: {error}") from error
    set_metadata(model, checked_metadata(metadata(model), path))
    return model


def write_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model to one file, whole or not at all."""
    size = model.ByteSize()
    if size > LARGEST:
        raise InputError(f"the network must fit into one ONNX file of 2 GB; it has {size / 1e9:.1f} GB of weights")
    with atomic(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))


def metadata(model: Any) -> dict[str, str]:
    """The metadata of a model, by key."""
    return {entry.key: entry.value for entry in model.metadata_props}


def set_metadata(model: Any, entries: Mapping[str, str]) -> None:
    """Replace the metadata of a model."""
    del model.metadata_props[:]
    needs("onnx.helper", "onnx").set_model_props(model, dict(entries))


def checked_metadata(entries: Mapping[str, str], path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata with the keys of this version; raises unless kedge wrote the file and the metadata can be read."""
    if f"{PREFIX}preprocess" not in entries:
        raise FileFormatError(f"{path} is an ONNX file, but kedge did not export it: export one by `kedge export`")
    current = dict(entries)
    try:
        for old, new in {"tpr": "alpha", "confidence": "delta"}.items():  # kedge 0.1 stored 1 - alpha and 1 - delta
            if (text := current.pop(PREFIX + old, None)) is not None:
                current[PREFIX + new] = "null" if text == "null" else repr(round(1 - float(text), 12))
        preprocess_of(current)
        guarantee_of(current)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path} must describe its preprocessing, alpha and delta; its metadata is damaged: {error!r}. Export it "
            "again by `kedge export`"
        ) from error
    return current


def preprocess_of(entries: Mapping[str, str]) -> Preprocess:
    """How images become inputs, from the metadata."""
    held = json.loads(entries[f"{PREFIX}preprocess"])
    return Preprocess.from_record({key: value for key, value in held.items() if key != "words"})


def guarantee_of(entries: Mapping[str, str]) -> tuple[float, float | None]:
    """Alpha and delta of the threshold, from the metadata."""
    return float(entries[f"{PREFIX}alpha"]), json.loads(entries[f"{PREFIX}delta"])


def rule(preprocess: Preprocess) -> str:
    """How images become inputs, as JSON and in words, for programs that have Pillow but no kedge.

    Example:
        >>> json.loads(rule(Preprocess((1, 28, 28), fit="stretch", background=None)))["words"]
        'turn as EXIF says, convert to L (8 bits), resize to 28 x 28 by bicubic; channels first, uint8'
    """
    channels, height, width = preprocess.shape
    mode = "L" if channels == 1 else "RGB" if channels == 3 else f"{channels} channels"
    size, share = f"{width} x {height}", preprocess.crop
    steps = f"resize to {size} by {preprocess.resize}"
    if share < 1:
        covered = f"{round(width / share)} x {round(height / share)}"
        steps = f"scale until it covers {covered} by {preprocess.resize}, cut out the centre of {size}"
    elif preprocess.fit == "crop":
        steps = f"cut out the largest centre of that aspect ratio and {steps}"
    behind = "" if preprocess.background is None else f"put transparent pixels on {preprocess.background}, "
    words = f"turn as EXIF says, {behind}convert to {mode} (8 bits), {steps}; channels first, uint8"
    return json.dumps(asdict(preprocess) | {"words": words})


def write_calibration(
    model: Any, scores: Tensor, *, threshold: float, temperature: float, alpha: float, delta: float | None
) -> None:
    """Put a calibration into the tensors and the metadata of a model; ``temperature`` is that of ``probability``."""
    ordered = scores.double().sort().values.numpy()
    narrow = ordered.astype(np.float32)
    if not np.array_equal(narrow, ordered):  # rounded scores would give other decisions
        raise InputError("the calibration scores must be float32 numbers; these are not: calibrate the detector again")
    values = (narrow, np.float32(len(narrow) + 1), np.float32(threshold), np.float32(temperature))
    set_tensors(model, dict(zip(CALIBRATION, values, strict=True)))
    entries = {"threshold": repr(float(np.float32(threshold))), "alpha": repr(alpha), "delta": json.dumps(delta)}
    entries["calibration_images"] = str(len(narrow))
    set_metadata(model, metadata(model) | {PREFIX + key: value for key, value in entries.items()})


def set_tensors(model: Any, values: Mapping[str, Any]) -> None:
    """Replace tensors of a model by name."""
    onnx = needs("onnx", "onnx")
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, value in values.items():
        if name not in held:
            raise KedgeError(f"the exported graph has no tensor {name!r}, so its calibration cannot be set")
        held[name].CopyFrom(onnx.numpy_helper.from_array(np.asarray(value), name))
    del model.graph.value_info[:]  # shapes inferred from the tensors as they were
