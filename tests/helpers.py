"""Images, sets and networks that tests share. Import from here: ``from helpers import images, labelled, network``."""

import torch
from torch import Tensor, nn

import kedge
from kedge.models import build
from kedge.seeds import seeded

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
