"""Experimental: distillation of an AMP detector into an unanchored network that needs one forward pass."""

from kedge.experimental.distillation import (
    Distillation,
    DistillationSplit,
    distill,
    distillation_recipe,
    split_for,
    untrained_student,
)
from kedge.experimental.student import Student

__all__ = [
    "Distillation",
    "DistillationSplit",
    "Student",
    "distill",
    "distillation_recipe",
    "split_for",
    "untrained_student",
]
