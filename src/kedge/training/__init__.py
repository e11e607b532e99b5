"""Training: recipes and one loop for plain and anchored networks."""

from kedge.training.engine import is_first_process
from kedge.training.recipe import RECIPES, Recipe, recipe
from kedge.training.statistics import statistics
from kedge.training.train import train
from kedge.training.trainer import Progress

__all__ = ["RECIPES", "Progress", "Recipe", "is_first_process", "recipe", "statistics", "train"]
