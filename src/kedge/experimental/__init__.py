"""Distillation: one pass of a plain network learns what the K passes of an AMP detector say."""

from kedge.experimental.distillation import chosen_recipe, distill, untrained
from kedge.experimental.distillation_loss import MIX, Distillation
from kedge.experimental.distillation_split import Parts, set_apart
from kedge.experimental.early_exit import EarlyExit
from kedge.experimental.student import Student

__all__ = ["MIX", "Distillation", "EarlyExit", "Parts", "Student", "chosen_recipe", "distill", "set_apart", "untrained"]
