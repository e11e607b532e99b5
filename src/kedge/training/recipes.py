"""Recipes: the hyperparameters of a training, as a frozen dataclass."""

import math
from dataclasses import dataclass, replace
from typing import Any

from kedge.checks import at_least, between, one_of
from kedge.errors import InputError

SCHEDULES = ("steps", "one-cycle", "linear", "cosine")
OPTIMIZERS = ("sgd", "muon", "adam")
PADDINGS = ("zeros", "reflect")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training.

    Args:
        epochs: Passes over the data.
        batch: Images per step; an incomplete last batch is dropped. ``"auto"`` chooses 16 to 64 by the number of images
            and the memory, takes sets of any size, and makes batches of equal size without dropping an image.
        lr: Highest learning rate.
        optimizer: ``"sgd"``; ``"adam"`` (AdamW), for networks that are already trained; or ``"muon"``, for networks
            with a norm after each convolution, with Adam for the first and last layers, biases and norms.
        momentum: Of SGD or Muon.
        nesterov: Whether SGD uses Nesterov momentum; Muon always does.
        weight_decay: Of SGD (on all parameters, as in the paper) or AdamW; Muon keeps the norm of its weights instead.
        schedule: ``"steps"`` multiplies the rate by ``gamma`` at each of ``milestones``; ``"one-cycle"`` warms up
            linearly over the first fifth and falls linearly to zero; ``"linear"`` falls linearly from the start;
            ``"cosine"`` warms up linearly over the first tenth and falls to zero as half a cosine.
        milestones: Epochs.
        gamma: Factor at each milestone.
        layer_rates: Factors of the learning rate for the first layer and for the last but one, for AdamW; those between
            follow geometrically in the order in which a pass calls the layers, and the last layer has factor 1. Biases
            and norms then have no weight decay. None for one rate.
        head_first: Whether to train the last linear layer alone first, if the network ends in one, as `kedge train
            --freeze` does: other layers then do not follow the gradients of a fresh one (Kumar et al., ICLR 2022).
        freeze_norms: Whether batch norms keep their running statistics, and normalise by them, during the training.
        label_smoothing: Of the cross entropy.
        crop: Pixels of padding for random crops; 0 for none.
        pad: Padding of random crops: ``"zeros"`` or ``"reflect"``.
        flip: Whether to flip images horizontally at random.
        alternate: Whether to flip each image in every other epoch instead of at random.
        resized_crop: Whether to train on random parts of the images, resized to the network's input.
        smallest_crop: Share of the image's area that such a part has at least.
        pixmix: Whether to mix the images with altered copies of themselves and with fractals; see `PixMix`.
        clean_final_fraction: Fraction of the steps, at the end, without corruption of the anchors.
        ema: Decay of an exponential moving average of the weights, which training then returns; None for no average.
            In step t (1, 2, ...) it is at most (1 + t) / (10 + t), so that short trainings forget their start too.

    Example:
        >>> recipe("demo", epochs=2).epochs
        2
    """

    epochs: int
    batch: int | str = 128
    lr: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: str = "steps"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.2
    layer_rates: tuple[float, float] | None = None
    head_first: bool = False
    freeze_norms: bool = False
    label_smoothing: float = 0.0
    crop: int = 4
    pad: str = "zeros"
    flip: bool = True
    alternate: bool = False
    resized_crop: bool = False
    smallest_crop: float = 0.08
    pixmix: bool = False
    clean_final_fraction: float = 0.0
    ema: float | None = None

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 1)
        if isinstance(self.batch, str):
            one_of("batch", self.batch, ("auto",))
        else:
            at_least("batch", self.batch, 2)
        at_least("crop", self.crop, 0)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("pad", self.pad, PADDINGS)
        between("lr", self.lr, 0, float("inf"), open_ends=True)
        between("momentum", self.momentum, 0, 1)
        if self.nesterov and self.momentum == 0:
            raise InputError(f"nesterov needs a momentum above 0; got momentum={self.momentum}")
        if self.alternate and not self.flip:
            raise InputError("alternate needs flip=True; got flip=False")
        if self.layer_rates is not None:
            if self.optimizer != "adam" or len(self.layer_rates) != 2 or min(self.layer_rates) <= 0:
                raise InputError(
                    f"layer_rates must be two positive factors, with the optimizer 'adam'; got {self.layer_rates} with "
                    f"{self.optimizer!r}"
                )
            object.__setattr__(self, "layer_rates", tuple(self.layer_rates))
        between("smallest_crop", self.smallest_crop, 0, 1)
        between("weight_decay", self.weight_decay, 0, float("inf"))
        between("label_smoothing", self.label_smoothing, 0, 1)
        between("clean_final_fraction", self.clean_final_fraction, 0, 1)
        if self.ema is not None:
            between("ema", self.ema, 0, 1, open_ends=True)
        object.__setattr__(self, "milestones", tuple(self.milestones))

    def rate(self, epoch: float) -> float:
        """Learning rate at a point of training, counted in epochs."""
        if self.schedule == "steps":
            return float(self.lr * self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
        if self.schedule == "cosine":
            done = (epoch / self.epochs - 0.1) / 0.9
            return self.lr * (epoch / self.epochs / 0.1 if done < 0 else 0.5 * (1 + math.cos(math.pi * done)))
        peak = 0.0 if self.schedule == "linear" else self.epochs / 5
        return self.lr * (epoch / peak if epoch < peak else (self.epochs - epoch) / (self.epochs - peak))


RECIPES = {
    # The paper's settings.
    "cifar": Recipe(epochs=200, milestones=(60, 120, 160), gamma=0.2),
    "imagenet": Recipe(epochs=120, weight_decay=1e-4, milestones=(30, 60, 90), gamma=0.1, crop=0, resized_crop=True),
    # For any network on two cores.
    "fast": Recipe(epochs=16, lr=0.2, nesterov=True, schedule="one-cycle", label_smoothing=0.1),
    # For the network of that name; under an hour on two cores.
    "airbench": Recipe(
        epochs=11,
        batch=500,
        lr=0.24,
        optimizer="muon",
        momentum=0.6,
        schedule="linear",
        crop=2,
        pad="reflect",
        alternate=True,
        clean_final_fraction=0.4,
    ),
    # For a pretrained network on photographs, from a few hundred of them on.
    "finetune": Recipe(
        epochs=5,
        batch="auto",
        lr=3e-4,
        optimizer="adam",
        weight_decay=0.05,
        schedule="cosine",
        layer_rates=(0.1, 1.0),
        head_first=True,
        freeze_norms=True,
        label_smoothing=0.05,
        crop=0,
        resized_crop=True,
        smallest_crop=0.35,
        ema=0.999,
    ),
    # For a student that starts from its teacher's network.
    "distill": Recipe(epochs=2, lr=1e-4, optimizer="adam", weight_decay=0.0, schedule="one-cycle"),
    # For 28 x 28 digits, which must not be flipped.
    "demo": Recipe(epochs=12, batch=64, nesterov=True, schedule="one-cycle", crop=2, flip=False),
}


def recipe(name: str | Recipe, **changes: Any) -> Recipe:
    """Return a recipe by name, with changes."""
    if isinstance(name, Recipe):
        return replace(name, **changes)
    if name not in RECIPES:
        raise InputError(f"recipe must be one of {', '.join(map(repr, RECIPES))}, or a Recipe; got {name!r}")
    return replace(RECIPES[name], **changes)
