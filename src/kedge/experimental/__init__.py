"""Not settled yet: distillation of an AMP detector into one forward pass, and early exit."""

from kedge.experimental.distillation import Distillation, distill, distillation_recipe, split_for, untrained_student
from kedge.experimental.early_exit import EarlyExit
from kedge.experimental.student import Student

__all__ = ["Distillation", "EarlyExit", "Student", "distill", "distillation_recipe", "split_for", "untrained_student"]
