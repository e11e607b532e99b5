"""Detectors: AMP and the methods beside it, all behind the same verbs."""

import os
from typing import Any

from torch import Tensor, nn

from kedge import artifact
from kedge.anchoring.rebuild import rebuild
from kedge.data import Preprocess
from kedge.detectors.amp import AMP
from kedge.detectors.base import Calibration, Cost, Detection, Detector, Outputs
from kedge.detectors.deup import DEUP
from kedge.detectors.discrepancy import ClassifierDiscrepancy
from kedge.detectors.duq import DUQ
from kedge.detectors.energy import Energy
from kedge.detectors.ensemble import DeepEnsemble
from kedge.detectors.entropy import Entropy
from kedge.detectors.flips_and_crops import FlipsAndCrops
from kedge.detectors.gram import Gram
from kedge.detectors.inference import beside, for_inference
from kedge.detectors.knn import KNN
from kedge.detectors.mahalanobis import Mahalanobis
from kedge.detectors.max_logit import MaxLogit
from kedge.detectors.mc_dropout import MCDropout
from kedge.detectors.msp import MSP
from kedge.detectors.odin import ODIN
from kedge.detectors.outlier_exposure import OutlierExposure
from kedge.detectors.pixel_statistics import PixelStatistics
from kedge.detectors.react import ReAct
from kedge.detectors.rescoring import RescoringDetector
from kedge.detectors.student import Student
from kedge.detectors.svi import SVI
from kedge.detectors.svi_avuc import SVIAvUC
from kedge.detectors.temperature_scaling import TemperatureScaling
from kedge.detectors.trained import TrainedDetector
from kedge.detectors.udg import UDG
from kedge.detectors.vim import ViM
from kedge.errors import FileFormatError, InputError
from kedge.scores import Score

__all__ = [
    "AMP",
    "DETECTORS",
    "DEUP",
    "DUQ",
    "KNN",
    "MSP",
    "ODIN",
    "SVI",
    "UDG",
    "Calibration",
    "ClassifierDiscrepancy",
    "Cost",
    "DeepEnsemble",
    "Detection",
    "Detector",
    "Energy",
    "Entropy",
    "FlipsAndCrops",
    "Gram",
    "MCDropout",
    "Mahalanobis",
    "MaxLogit",
    "OutlierExposure",
    "Outputs",
    "PixelStatistics",
    "ReAct",
    "RescoringDetector",
    "SVIAvUC",
    "Student",
    "TemperatureScaling",
    "TrainedDetector",
    "ViM",
    "beside",
    "for_inference",
    "load",
]

# By the name in files, in the order of docs/methods.md.
DETECTORS: dict[str, type[Detector]] = {
    kind.name: kind
    for kind in (
        AMP,
        Student,
        MSP,
        MaxLogit,
        Entropy,
        Energy,
        TemperatureScaling,
        ODIN,
        Mahalanobis,
        Gram,
        KNN,
        ViM,
        ReAct,
        MCDropout,
        DeepEnsemble,
        DEUP,
        SVI,
        SVIAvUC,
        DUQ,
        OutlierExposure,
        ClassifierDiscrepancy,
        UDG,
        FlipsAndCrops,
        PixelStatistics,
    )
}


def load(path: str | os.PathLike[str], *, model: nn.Module | None = None, score: Score | None = None) -> Detector:
    """Read a detector that `Detector.save` wrote. Loading never runs code from the file.

    Args:
        path: The file, or the name of a detector that comes with kedge: ``"cifar10"``.
        model: For networks that are not kedge's own: the network, freshly built, as it was before anchoring.
        score: For detectors that were saved with a score function of the user's own: that function.

    Example:
        >>> import tempfile, torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> path = tempfile.mkdtemp() + "/flat.kedge"
        >>> MSP(net).fit(torch.rand(8, 3, 2, 2)).calibrate(torch.rand(20, 3, 2, 2)).save(path)
        >>> load(path, model=nn.Sequential(nn.Flatten(), nn.Linear(12, 2))).calibration.tpr
        0.95
    """
    header, tensors = artifact.read(path)
    try:
        return _detector(header, tensors, model, score)
    except (KeyError, TypeError, AttributeError) as error:  # whole, as its sha256 tells, but not what kedge writes
        raise FileFormatError(
            f"{path} is a kedge file, but not of a detector that this kedge knows: {error}"
        ) from error


def _detector(
    header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | None, score: Score | None
) -> Detector:
    described, calibrated = header["detector"], header["calibration"]
    kind = DETECTORS.get(described["name"])
    if kind is None:
        raise FileFormatError(
            f"the file holds a {described['name']!r} detector, which this kedge does not know: install a newer one"
        )
    net = rebuild(header["network"], artifact.part(tensors, "net."), model)
    detector = kind(net, **_with_score(described["config"], score))
    detector.preprocess = Preprocess(**header["preprocess"])
    detector.classes = tuple(header["classes"])
    detector.load_state(artifact.part(tensors, "detector."))
    if calibrated is not None:
        values: dict[str, Any] = {name: value for name, value in calibrated.items() if name != "images"}
        detector.calibration = Calibration(**values, **artifact.part(tensors, "calibration."))
    return detector


def _with_score(config: dict[str, Any], score: Score | None) -> dict[str, Any]:
    if "score" in config and config["score"] is None:
        if score is None:
            raise InputError("this detector was saved with a score function of its own; pass it again as score=")
        return config | {"score": score}
    if score is not None:
        raise InputError("score must not be given: the file says which score this detector uses")
    return config
