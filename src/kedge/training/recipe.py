"""Recipes: everything that training depends on beside the network and the data, as a frozen dataclass."""

from dataclasses import dataclass, replace
from typing import Any

from kedge.checks import at_least, between, one_of
from kedge.errors import InputError

SCHEDULES = ("steps", "one-cycle")


@dataclass(frozen=True)
class Recipe:
    """How to train. SGD with Nesterov momentum, cross-entropy, random crops and flips.

    Args:
        epochs: Passes over the data.
        batch: Images per step.
        lr: The highest learning rate.
        momentum: Of SGD.
        weight_decay: Of SGD, on weights; biases and normalisation layers are decayed too, as in the paper's setup.
        schedule: ``"steps"`` multiplies the rate by ``gamma`` at each of ``milestones``; ``"one-cycle"`` warms up
            linearly over the first fifth and falls linearly to zero.
        milestones: Epochs.
        gamma: Factor at each milestone.
        label_smoothing: Of the cross-entropy.
        crop: Pixels of padding before a random crop; 0 for none.
        flip: Whether to flip images horizontally at random.

    Example:
        >>> recipe("demo", epochs=2).epochs
        2
    """

    epochs: int
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "steps"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.2
    label_smoothing: float = 0.0
    crop: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 1)
        at_least("batch", self.batch, 2)
        at_least("crop", self.crop, 0)
        one_of("schedule", self.schedule, SCHEDULES)
        between("lr", self.lr, 0, float("inf"), open_ends=True)
        between("momentum", self.momentum, 0, 1)
        between("weight_decay", self.weight_decay, 0, float("inf"))
        between("label_smoothing", self.label_smoothing, 0, 1)

    def rate(self, epoch: float) -> float:
        """The learning rate at a point of training, counted in epochs.

        Example:
            >>> Recipe(epochs=200, milestones=(60, 120, 160)).rate(60.5)
            0.020000000000000004
        """
        if self.schedule == "steps":
            return float(self.lr * self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
        peak = self.epochs / 5
        return self.lr * (epoch / peak if epoch < peak else (self.epochs - epoch) / (self.epochs - peak))


RECIPES = {
    # For 28 x 28 digits, which must not be flipped.
    "demo": Recipe(epochs=12, batch=64, lr=0.1, schedule="one-cycle", crop=2, flip=False),
}


def recipe(name: str | Recipe, **changes: Any) -> Recipe:
    """A recipe by name, with changes.

    Example:
        >>> recipe("demo", batch=32).batch
        32
    """
    if isinstance(name, Recipe):
        return replace(name, **changes)
    if name not in RECIPES:
        raise InputError(f"recipe must be a Recipe or one of {', '.join(map(repr, RECIPES))}; got {name!r}")
    return replace(RECIPES[name], **changes)
