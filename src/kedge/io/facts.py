"""What a saved detector is, as plain data, without running anything of the file."""

import os
from typing import Any

from kedge.errors import FileFormatError
from kedge.io import artifact


def facts(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts about a saved detector; networks that are not kedge's own need not be there.

    Example:
        >>> import tempfile, torch
        >>> from kedge.detectors import MSP
        >>> path = tempfile.mkdtemp() + "/flat.kedge"
        >>> MSP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))).fit(torch.rand(8, 3, 2, 2)).save(path)
        >>> facts(path)["input"]
        '3 x 2 x 2'
    """
    header, tensors = artifact.read(file)
    try:
        network, calibrated = header["network"], header["calibration"] or {}
        members = network.get("ensemble", [network])
        first = members[0]
        record = first["record"]
        spec = first["spec"]
        weights = sum(v.numel() for name, v in tensors.items() if name.startswith("net.") and v.is_floating_point())
        anchors = [value for name, value in tensors.items() if name.endswith("anchors") and name.startswith("net.")]
        return {
            "method": header["detector"]["name"],
            "options": ", ".join(f"{k} {v}" for k, v in header["detector"]["config"].items() if v is not None),
            "network": first["type"] if spec is None else spec["name"],
            "arguments": None if spec is None else ", ".join(f"{k} {_short(v)}" for k, v in spec["arguments"].items()),
            "networks": len(members),
            "numbers": weights,
            "anchors": len(anchors[0]) if anchors else None,
            "taught_by": _teacher(record.get("teacher")),
            "input": " x ".join(map(str, header["preprocess"]["shape"])),
            "classes": header["classes"],
            "calibration_images": calibrated.get("images"),
            "accepts": calibrated.get("alpha"),
            "delta": calibrated.get("delta"),
            "threshold": calibrated.get("threshold"),
            "temperature": calibrated.get("temperature"),
            "trained_on": record.get("data", {}).get("name"),
            "training_images": record.get("data", {}).get("images"),
            "epochs": record.get("epochs"),
            "seed": record.get("seed"),
            "training_seconds": record.get("seconds"),
            "commit": record.get("made with", {}).get("commit"),
            "kedge": header["versions"]["kedge"],
            "torch": header["versions"]["torch"],
            "bytes": artifact.locate(file).stat().st_size,
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FileFormatError(f"{file} is a kedge file, but not of a detector: {error} is missing") from error


def _teacher(taught: dict[str, Any] | None) -> str | None:
    return None if taught is None else f"{taught['method']}, {taught['anchors']} anchors"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
