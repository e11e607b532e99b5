"""Training: recipes and one loop for plain and anchored networks."""

from kedge.training.loop import Progress, statistics, train
from kedge.training.recipe import RECIPES, Recipe, recipe

__all__ = ["RECIPES", "Progress", "Recipe", "recipe", "statistics", "train"]
