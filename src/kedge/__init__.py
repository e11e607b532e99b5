"""kedge: image classifiers that know when they are out of their depth."""

from importlib.metadata import version

from kedge import calibration, metrics, models, scores
from kedge.anchoring import Anchored, anchor
from kedge.data import ImageSet, Preprocess
from kedge.detectors import AMP, MSP, Detection, Detector, Energy, Entropy, MaxLogit, load
from kedge.models.classifier import Classifier

__version__ = version("kedge")

__all__ = [
    "AMP",
    "MSP",
    "Anchored",
    "Classifier",
    "Detection",
    "Detector",
    "Energy",
    "Entropy",
    "ImageSet",
    "MaxLogit",
    "Preprocess",
    "anchor",
    "calibration",
    "load",
    "metrics",
    "models",
    "scores",
]
