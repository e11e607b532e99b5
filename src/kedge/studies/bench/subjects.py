"""Default subjects of the timings: a detector with random weights, and random images."""

import math
from typing import Any

import torch
from torch import Tensor

from kedge.anchoring import anchor
from kedge.detectors import AMP
from kedge.models import build
from kedge.seeds import seeded
from kedge.studies.bench.plain import channels_last

SIDE = 32  # of images for networks by name, but for these
SIDES = dict.fromkeys(("resnet18", "resnet34", "resnet50"), 224)
HELD_OUT = 40  # random images to calibrate on, where the decisions do not matter
FEWEST = 10  # images that an engine runs on: so that a share of them can exit early at a batch of one


def detector_of(
    network: str, *, anchors: int | None = None, side: int | None = None, seed: int = 0, **arguments: Any
) -> AMP:
    """AMP on a network by name with random weights; the time of a pass does not depend on them."""
    with seeded(seed):
        net = channels_last(anchor(build(network, **arguments), init="fresh", mean=0.5, std=0.25, seed=seed)).eval()
    pixels = side or SIDES.get(network, SIDE)
    shape = (int(net.anchored_layer.layer_x.in_channels), pixels, pixels)
    detector = AMP(net, k=anchors).fit(noise_images(32, shape, seed=seed))
    return detector.calibrate(noise_images(HELD_OUT, shape, seed=seed + 1))


def noise_images(n: int, shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """Random images, uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)


def batches_of(batch: int, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The random images that engines are measured on, a batch at a time."""
    return tuple(noise_images(batch * math.ceil(FEWEST / batch), shape, seed=4).split(batch))
