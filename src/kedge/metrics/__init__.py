"""Metrics: detection, classification, calibration."""

from kedge.metrics.arrays import Numbers
from kedge.metrics.classification import accuracy, aurc, ece
from kedge.metrics.detection import (
    Estimate,
    Repeated,
    aupr_in,
    aupr_out,
    auroc,
    detection_metrics,
    dtacc,
    fpr95,
    fpr95_ood,
    roc_curve,
)

__all__ = [
    "Estimate",
    "Numbers",
    "Repeated",
    "accuracy",
    "aupr_in",
    "aupr_out",
    "aurc",
    "auroc",
    "detection_metrics",
    "dtacc",
    "ece",
    "fpr95",
    "fpr95_ood",
    "roc_curve",
]
