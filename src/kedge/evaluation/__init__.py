"""Evaluation: detectors compared on the same images, over seeds, and which of them leads beyond noise."""

from kedge.evaluation.comparison import compare
from kedge.evaluation.core import evaluate
from kedge.evaluation.paired import Best, best_beyond_noise, difference
from kedge.evaluation.result import Evaluation, EvaluationResult, ShiftedResult
from kedge.evaluation.summary import SeedSummary, SeedValues, TextTable

__all__ = [
    "Best", "Evaluation", "EvaluationResult", "SeedSummary", "SeedValues", "ShiftedResult", "TextTable",
    "best_beyond_noise", "compare", "difference", "evaluate",
]  # fmt: skip
