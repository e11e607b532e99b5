"""kedge: image classifiers that know when they are out of their depth."""

from importlib.metadata import version

from kedge import calibration, metrics, models, scores, training
from kedge.anchoring import Anchored, anchor
from kedge.data import ImageSet, Preprocess
from kedge.detectors import (
    AMP,
    MSP,
    Detection,
    Detector,
    Energy,
    Entropy,
    MaxLogit,
    OutlierExposure,
    TemperatureScaling,
    load,
)
from kedge.evaluation import evaluate
from kedge.models.classifier import Classifier
from kedge.training import train

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
    "OutlierExposure",
    "Preprocess",
    "TemperatureScaling",
    "anchor",
    "calibration",
    "evaluate",
    "load",
    "metrics",
    "models",
    "scores",
    "train",
    "training",
]
