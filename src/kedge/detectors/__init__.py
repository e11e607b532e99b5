"""Detectors: AMP and all other methods, with the same verbs."""

from kedge.detectors.adascale import AdaSCALE
from kedge.detectors.amp import AMP
from kedge.detectors.base import Calibration, Cost, Detector, Outputs
from kedge.detectors.combined import Combined
from kedge.detectors.detection import Detection
from kedge.detectors.deup import DEUP
from kedge.detectors.dice import DICE
from kedge.detectors.extraction import extract
from kedge.detectors.fdbd import FDBD
from kedge.detectors.features import FeatureDetector
from kedge.detectors.gradnorm import GradNorm
from kedge.detectors.gram import Gram
from kedge.detectors.inference import for_inference, thread_copies
from kedge.detectors.kernel_pca import CoP, CoRP
from kedge.detectors.klm import KLM
from kedge.detectors.knn import KNN
from kedge.detectors.load import load
from kedge.detectors.logits import GEN, MSP, Energy, Entropy, KLUniform, MaxLogit, RescoringDetector
from kedge.detectors.low_level_statistics import LowLevelStatistics
from kedge.detectors.mahalanobis import Mahalanobis
from kedge.detectors.nac import NAC
from kedge.detectors.nci import NCI
from kedge.detectors.nnguide import NNGuide
from kedge.detectors.odin import ODIN
from kedge.detectors.openmax import OpenMax
from kedge.detectors.rankfeat import RankFeat
from kedge.detectors.react import ReAct
from kedge.detectors.registry import register, registered
from kedge.detectors.sampled import DeepEnsemble, MCDropout
from kedge.detectors.she import SHE
from kedge.detectors.temperature_scaling import TemperatureScaling
from kedge.detectors.trained.base import TrainedDetector
from kedge.detectors.trained.discrepancy import ClassifierDiscrepancy
from kedge.detectors.trained.duq import DUQ
from kedge.detectors.trained.outlier_exposure import OutlierExposure
from kedge.detectors.trained.rotpred import RotPred
from kedge.detectors.trained.svi import SVI
from kedge.detectors.trained.svi_avuc import SVIAvUC
from kedge.detectors.trained.udg import UDG
from kedge.detectors.tta import TTA
from kedge.detectors.tuning import Tuner, tune
from kedge.detectors.vim import ViM
from kedge.detectors.weiper import WeiPer
from kedge.io.tuned import Tuned

__all__ = [
    "AMP",
    "DEUP",
    "DICE",
    "DUQ",
    "FDBD",
    "GEN",
    "KLM",
    "KNN",
    "MSP",
    "NAC",
    "NCI",
    "ODIN",
    "SHE",
    "SVI",
    "TTA",
    "UDG",
    "AdaSCALE",
    "Calibration",
    "ClassifierDiscrepancy",
    "CoP",
    "CoRP",
    "Combined",
    "Cost",
    "DeepEnsemble",
    "Detection",
    "Detector",
    "Energy",
    "Entropy",
    "FeatureDetector",
    "GradNorm",
    "Gram",
    "KLUniform",
    "LowLevelStatistics",
    "MCDropout",
    "Mahalanobis",
    "MaxLogit",
    "NNGuide",
    "OpenMax",
    "OutlierExposure",
    "Outputs",
    "RankFeat",
    "ReAct",
    "RescoringDetector",
    "RotPred",
    "SVIAvUC",
    "TemperatureScaling",
    "TrainedDetector",
    "Tuned",
    "Tuner",
    "ViM",
    "WeiPer",
    "extract",
    "for_inference",
    "load",
    "register",
    "registered",
    "thread_copies",
    "tune",
]  # fmt: skip
