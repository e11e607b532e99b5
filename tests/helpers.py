"""Images, sets and networks that tests share. Import from here: ``from helpers import images, labelled, network``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import kedge
from kedge.models import build
from kedge.seeds import seeded
from kedge.training.losses import Step

CLASSES = ("ant", "bee", "cow", "dog", "eel", "fox", "gnu", "hen")


def images(n: int = 40, channels: int = 3, side: int = 8, seed: int = 0) -> Tensor:
    """Noise, uint8 (n, channels, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def labelled(n: int = 40, classes: int = 4, name: str = "toy", **shape: int) -> kedge.ImageSet:
    """Noise with labels 0, 1, ... in turn, and names of the classes."""
    return kedge.ImageSet(images(n, **shape), torch.arange(n) % classes, name, CLASSES[:classes])


def flat(inputs: int = 192, classes: int = 4, seed: int = 0) -> nn.Module:
    """The smallest network: one linear layer."""
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def network(
    kind: str = "unanchored", *, classes: int = 4, channels: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> kedge.Classifier:
    """A compact network, ``"unanchored"`` or ``"anchored"``, with weights drawn large enough for scores to vary."""
    with seeded(seed):
        net = build("compact", width=4, classes=classes, channels=channels)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        net.fc.weight.data.mul_(20)
    statistics = {"mean": [0.4] * channels, "std": [0.25] * channels}
    made = kedge.anchor(net, init="fresh", seed=seed, **statistics) if kind == "anchored" else None
    return (made or kedge.Classifier(net, **statistics)).to(dtype).eval()


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


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two networks have the very same parameters and buffers."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class StopError(Exception):
    """Raised by `stop_at`, in place of a killed process."""


def stop_at(step: int) -> Callable[[Any], None]:
    """A ``progress`` that ends a training at a step."""

    def progress(report: Any) -> None:
        if report.step == step:
            raise StopError

    return progress


def softmax(logits: Sequence[float]) -> list[float]:
    """The softmax of a few numbers, without torch."""
    exponentials = [math.exp(z - max(logits)) for z in logits]
    return [e / sum(exponentials) for e in exponentials]


def entropy(probabilities: Sequence[float]) -> float:
    """The entropy of a few probabilities in nats, without torch."""
    return -sum(p * math.log(p) for p in probabilities if p > 0)
