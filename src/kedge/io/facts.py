"""A description of a saved detector, as plain data, without running anything from the file."""

import os
from collections.abc import Mapping
from typing import Any

from kedge.io import artifact
from kedge.io.migrate import migrate
from kedge.io.schema import Header, check, readable
from kedge.io.tuned import Tuned


def facts(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a saved detector; the code of a network that is not one of kedge's own is not needed.

    Example:
        >>> facts("cifar10")["input"]
        '3 x 32 x 32'
    """
    header, tensors = artifact.read(file)
    with readable(file, "a detector"):
        header = migrate(header)
        check(header, Header, "header")
        network, calibration = header["network"], header["calibration"] or {}
        members = network.get("ensemble", [network])
        spec, record = members[0]["spec"], members[0]["record"]
        options = {} if spec is None else {k: v for k, v in spec["arguments"].items() if k != "config"}
        data, teacher, held_out = record.get("data", {}), record.get("teacher"), record.get("held_out", {})
        weights = artifact.part(tensors, "net.")
        tuned = Tuned.read(header.get("tuned"), artifact.part(tensors, "tuned."))
        anchors = [value for name, value in weights.items() if name.endswith("anchors")]
        return {
            "method": header["detector"]["name"],
            "options": ", ".join(f"{k} {v}" for k, v in readable_options(header["detector"]["config"]).items()),
            "tuned": None if tuned is None else str(tuned),
            "network": members[0]["type"] if spec is None else spec["name"],
            "arguments": ", ".join(f"{k} {_short(v)}" for k, v in options.items()) or None,
            "networks": len(members),
            "numbers": sum(value.numel() for value in weights.values() if value.is_floating_point()),
            "anchors": len(anchors[0]) if anchors else None,
            "taught_by": None if teacher is None else f"{teacher['method']}, {teacher['anchors']} anchors",
            "input": " x ".join(map(str, header["preprocess"]["shape"])),
            "classes": header["classes"],
            "calibration_images": calibration.get("images"),
            **{name: calibration.get(name) for name in ("alpha", "delta", "threshold", "temperature")},
            "held_out_accuracy": held_out.get("accuracy"),
            "held_out_flagged": held_out.get("flagged"),
            "trained_on": data.get("name"),
            "training_images": data.get("images"),
            "epochs": record.get("epochs"),
            "seed": record.get("seed"),
            "training_seconds": record.get("seconds"),
            "commit": record.get("made with", {}).get("commit"),
            **{name: header["versions"].get(name) for name in ("kedge", "torch")},
            "bytes": artifact.locate(file).stat().st_size,
        }


def readable_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a detector that are set; the parts of a combination by their names."""
    options = {name: value for name, value in config.items() if value is not None}
    if "parts" in options:
        options["parts"] = " + ".join(part["name"] for part in options["parts"])
    return options


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
