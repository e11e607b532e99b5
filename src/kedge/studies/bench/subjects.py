"""What is measured where nobody brings it: a detector with random weights, and random images."""

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
HELD_OUT = 120  # random images to calibrate on, where the verdicts do not matter
FEWEST = 10  # images that an engine runs on: so that a share of them can be left open at a batch of one


def detector_of(
    network: str, *, anchors: int | None = None, side: int | None = None, seed: int = 0, **arguments: Any
) -> AMP:
    """AMP on a network by name with random weights, on which the time of a pass does not depend.

    Args:
        network: One of `kedge.models.model_names`.
        anchors: How many, 5 by default.
        side: Of its images, in pixels; by default 224 for networks that are made for ImageNet, and 32 for others.
        seed: Of the weights, and of the random images that the detector is fitted and calibrated on.
        **arguments: Of `kedge.models.build`.

    Example:
        >>> detector_of("compact", width=4).net.k
        5
    """
    with seeded(seed):
        net = channels_last(anchor(build(network, **arguments), init="fresh", mean=0.5, std=0.25, seed=seed)).eval()
    pixels = side or SIDES.get(network, SIDE)
    shape = (int(net.anchored_layer.layer_x.in_channels), pixels, pixels)
    return AMP(net, k=anchors).fit(noise(32, shape, seed=seed)).calibrate(noise(HELD_OUT, shape, seed=seed + 1))


def noise(n: int, shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """Random images, uint8.

    Example:
        >>> noise(2, (3, 8, 8)).shape
        torch.Size([2, 3, 8, 8])
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)


def batches_of(batch: int, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The random images that engines are measured on, a batch at a time.

    Example:
        >>> [len(part) for part in batches_of(4, (3, 8, 8))]
        [4, 4, 4]
    """
    return tuple(noise(batch * math.ceil(FEWEST / batch), shape, seed=4).split(batch))
