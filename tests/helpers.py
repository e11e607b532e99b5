"""Images, sets and networks that tests share. Import from here: ``from helpers import images, labelled, network``."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
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


def small_amp(classes: int = 3, side: int = 12, k: int = 3) -> kedge.AMP:
    """A calibrated AMP on an untrained network."""
    train = labelled(60, classes, side=side)
    return kedge.AMP(network("anchored", classes=classes), k=k).fit(train).calibrate(images(50, side=side, seed=1))


def picture(seed: int = 0, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Image.Image:
    """Noise as a PIL image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A PIL image as the bytes of a file."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def run_cli(*arguments: Any, columns: int = 160, **env: str) -> Any:
    """The result of a command, with ``exit_code``, ``output`` and ``exception``."""
    from typer.testing import CliRunner

    from kedge.cli import app

    return CliRunner(env={"COLUMNS": str(columns)} | env).invoke(app, [str(argument) for argument in arguments])
