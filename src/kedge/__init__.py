"""kedge: image classifiers that know when they are out of their depth."""

from importlib.metadata import version

from kedge import adapters, calibration, evaluation, metrics, models, scores, training
from kedge.anchoring import Anchored, anchor
from kedge.data import ImageSet, Preprocess
from kedge.detectors import (
    AMP,
    DEUP,
    DUQ,
    KNN,
    MSP,
    ODIN,
    SVI,
    UDG,
    ClassifierDiscrepancy,
    DeepEnsemble,
    Detection,
    Detector,
    Energy,
    Entropy,
    FlipsAndCrops,
    Gram,
    Mahalanobis,
    MaxLogit,
    MCDropout,
    OutlierExposure,
    PixelStatistics,
    ReAct,
    Student,
    SVIAvUC,
    TemperatureScaling,
    ViM,
    load,
)
from kedge.distillation import distil
from kedge.evaluation import evaluate
from kedge.hub import from_pretrained, push_to_hub
from kedge.models.classifier import Classifier
from kedge.pipelines import pipeline
from kedge.training import train

__version__ = version("kedge")

__all__ = [
    "AMP",
    "DEUP",
    "DUQ",
    "KNN",
    "MSP",
    "ODIN",
    "SVI",
    "UDG",
    "Anchored",
    "Classifier",
    "ClassifierDiscrepancy",
    "DeepEnsemble",
    "Detection",
    "Detector",
    "Energy",
    "Entropy",
    "FlipsAndCrops",
    "Gram",
    "ImageSet",
    "MCDropout",
    "Mahalanobis",
    "MaxLogit",
    "OutlierExposure",
    "PixelStatistics",
    "Preprocess",
    "ReAct",
    "SVIAvUC",
    "Student",
    "TemperatureScaling",
    "ViM",
    "adapters",
    "anchor",
    "calibration",
    "distil",
    "evaluate",
    "evaluation",
    "from_pretrained",
    "load",
    "metrics",
    "models",
    "pipeline",
    "push_to_hub",
    "scores",
    "train",
    "training",
]
