"""Images, sets and networks that tests share. Import from here: ``from helpers import images, labelled, network``."""

import copy

import numpy as np
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


def penultimate(net: kedge.Classifier, x: Tensor) -> np.ndarray:
    """A compact network's features, layer by layer and without its hooks, in float64; the mean over anchors."""
    x = x.to(net.mean.dtype) / 255
    with torch.no_grad():
        if isinstance(net, kedge.Anchored):
            singles = [copy.deepcopy(net) for _ in net.anchors]
            for single, anchor in zip(singles, net.anchors, strict=True):
                single.set_anchors(anchor[None])
            features = [single.features(x, ["flatten"])[1]["flatten"].double().numpy() for single in singles]
            return sum(features) / len(features)
        parts = net.network
        z = parts.stage3(parts.stage2(parts.stage1(parts.prep(net.normalise(x)))))
        return z.amax(dim=(2, 3)).double().numpy() / 8


def vector_network(weight, bias=None) -> nn.Module:
    """A network whose features are its inputs and whose head is W x + b, in float64."""
    weight = torch.as_tensor(weight, dtype=torch.float64)
    head = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=torch.float64)
    head.weight.data = weight
    if bias is not None:
        head.bias.data = torch.as_tensor(bias, dtype=torch.float64)
    return nn.Sequential(nn.Identity(), head)


class TwoHeads(nn.Module):
    """A network whose head is registered before another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.Linear(4, 5)
        self.head.bias.data += 5

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3) of vectors (B, 4)."""
        return self.head(self.body(x).relu())
