"""``kedge info``: what a saved detector is."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kedge import artifact
from kedge.errors import FileFormatError


def info(
    file: Annotated[Path, typer.Argument(help="A detector that kedge saved, or the name of one that it ships.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
) -> None:
    """Tell what a saved detector is: its method, network, classes, threshold, and how it was made.

    Nothing of the file is run, and networks that are not kedge's own need not be there.

    For example:

        kedge info cifar10

        kedge info runs/train/detector.kedge --json | jq .threshold
    """
    found = describe(file)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.items():
        words = ", ".join(map(str, value)) if isinstance(value, list) else value
        table.add_row(f"[bold]{name.replace('_', ' ')}[/]", "" if words is None else str(words))
    Console().print(table)


def describe(file: Path) -> dict[str, Any]:
    """The facts about a saved detector, as plain data."""
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
            "arguments": None if spec is None else ", ".join(f"{k} {v:g}" for k, v in spec["arguments"].items()),
            "networks": len(members),
            "numbers": weights,
            "anchors": len(anchors[0]) if anchors else None,
            "input": " x ".join(map(str, header["preprocess"]["shape"])),
            "classes": header["classes"],
            "calibration_images": calibrated.get("images"),
            "accepts": calibrated.get("tpr"),
            "confidence": calibrated.get("confidence"),
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
