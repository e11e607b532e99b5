"""Training steps, interrupted runs and numbers without torch, for tests of methods with their own training."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import kedge
from helpers import images
from kedge.models import build
from kedge.seeds import seeded
from kedge.training.losses import Step


def bright_classes(n: int = 64, classes: int = 3, seed: int = 0) -> kedge.ImageSet:
    """Noise (n, 1, 8, 8), brighter for each class: easy to learn."""
    labels = torch.arange(n) % classes
    levels = (labels * (240 // classes)).to(torch.uint8)[:, None, None, None]
    return kedge.ImageSet(images(n, channels=1, seed=seed) // 3 + levels, labels, "toy")


def small(classes: int = 2, seed: int = 0, **options: float) -> nn.Module:
    """A compact network for images with one channel, not wrapped in a Classifier."""
    with seeded(seed):
        return build("compact", width=4, classes=classes, channels=1, **options)


def step_of(net: kedge.Classifier, x: Tensor, y: Tensor, *, images: int | None = None, **fields: Any) -> Step:
    """A training step on images x with labels y, by default the first of a training on these images alone."""
    given = {"index": None, "outliers": None, "outlier_index": None, "anchors": {}, "done": 0.0, "epoch": 0}
    given |= {"images": len(x) if images is None else images, "label_smoothing": 0.0}
    return Step(net=net, forward=net, x=x, y=y, **(given | fields))


def softmax(logits: Sequence[float]) -> list[float]:
    """The softmax of a few numbers, without torch."""
    exponentials = [math.exp(z - max(logits)) for z in logits]
    return [e / sum(exponentials) for e in exponentials]


def entropy(probabilities: Sequence[float]) -> float:
    """The entropy of a few probabilities in nats, without torch."""
    return -sum(p * math.log(p) for p in probabilities if p > 0)
