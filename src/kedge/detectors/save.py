"""What `Detector.save` writes; `kedge.load` reads it."""

import os
import warnings
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kedge.errors import KedgeWarning, NotReadyError
from kedge.io import artifact
from kedge.io.graphs import graphs
from kedge.io.rebuild import describe

if TYPE_CHECKING:
    from kedge.detectors.base import Detector


def write_detector(detector: "Detector", path: str | os.PathLike[str]) -> None:
    """Write a fitted detector to one file."""
    if detector.preprocess is None:
        raise NotReadyError(f"an unfitted {type(detector).__name__} has nothing to save: call fit(train_set) first")
    calibrated: dict[str, Any] = {}
    if detector.calibration is not None:
        calibrated = vars(detector.calibration) | {"images": len(detector.calibration.scores)}
    header = {
        "detector": {"name": detector.name, "config": detector.config()},
        "network": describe(detector.net),
        "preprocess": asdict(detector.preprocess),
        "classes": list(detector.classes),
        "calibration": {k: value for k, value in calibrated.items() if not isinstance(value, Tensor)} or None,
        "versions": {"kedge": version("kedge"), "torch": str(torch.__version__)},
    }
    parts = {"net": detector.net.state_dict(), "detector": detector.state(), "calibration": calibrated}
    parts["fit"] = {"prints": detector.fitted_on}
    if detector.tuned is not None:
        header, parts["tuned"] = header | {"tuned": detector.tuned.header()}, detector.tuned.tensors()
    values = {f"{part}.{name}": value for part, each in parts.items() for name, value in each.items()}
    stored, reasons = graphs(detector.net, detector.preprocess.shape, fixed=not detector.changes_network)
    values |= stored
    for reason in reasons:
        warnings.warn(reason, KedgeWarning, stacklevel=3)
    artifact.write(path, header, {name: value for name, value in values.items() if isinstance(value, Tensor)})
