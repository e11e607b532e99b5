"""Evaluation: detectors side by side, over seeds, and which of them leads beyond noise."""

from kedge.evaluation.core import evaluate
from kedge.evaluation.paired import Best, best_beyond_noise, difference
from kedge.evaluation.result import METRICS, Evaluation, Result, Shifted
from kedge.evaluation.summary import Spread, Summary
from kedge.evaluation.table import Table

__all__ = [
    "METRICS",
    "Best",
    "Evaluation",
    "Result",
    "Shifted",
    "Spread",
    "Summary",
    "Table",
    "best_beyond_noise",
    "difference",
    "evaluate",
]
