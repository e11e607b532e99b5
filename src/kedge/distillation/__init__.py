"""Distillation: one pass of a plain network learns what the K passes of an AMP detector say."""

from kedge.distillation.apart import Parts, set_apart
from kedge.distillation.distil import chosen_recipe, distil, untrained
from kedge.distillation.objective import MIX, Distillation

__all__ = ["MIX", "Distillation", "Parts", "chosen_recipe", "distil", "set_apart", "untrained"]
