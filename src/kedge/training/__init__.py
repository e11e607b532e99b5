"""Training: recipes and one loop for plain and anchored networks."""

from kedge.training.engine import is_first_process
from kedge.training.loop import train
from kedge.training.recipe import RECIPES, Recipe, recipe
from kedge.training.run import Progress
from kedge.training.statistics import statistics

__all__ = ["RECIPES", "Progress", "Recipe", "is_first_process", "recipe", "statistics", "train"]
