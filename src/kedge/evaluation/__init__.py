"""Evaluation: detectors side by side, and which of them leads beyond noise."""

from kedge.evaluation.core import METRICS, Evaluation, Result, evaluate
from kedge.evaluation.paired import Best, best_beyond_noise

__all__ = ["METRICS", "Best", "Evaluation", "Result", "best_beyond_noise", "evaluate"]
