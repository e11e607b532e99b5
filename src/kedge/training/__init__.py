"""Training: recipes, losses, and one training loop for unanchored and anchored networks."""

from kedge.training.api import train
from kedge.training.engine import is_first_process
from kedge.training.heads import AnchoredHead
from kedge.training.loader import statistics
from kedge.training.losses import LOSSES, CrossEntropy, LogitNorm, Loss, Step, StepLoss, SyntheticOutliers, T2FNorm
from kedge.training.recipes import RECIPES, Recipe, recipe
from kedge.training.trainer import Progress

__all__ = [
    "LOSSES", "RECIPES", "AnchoredHead", "CrossEntropy", "LogitNorm", "Loss", "Progress", "Recipe", "Step", "StepLoss",
    "SyntheticOutliers", "T2FNorm", "is_first_process", "recipe", "statistics", "train",
]  # fmt: skip
