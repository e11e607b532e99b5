"""Test-time augmentation for anchors: the image, its mirror image, and both shifted by a pixel along a diagonal."""

import torch
from torch import Tensor

STEPS = (0, 0, -1, 1, 1, -1)  # shifts of the views in pixels; every second view is mirrored
VIEWS = len(STEPS)
CHOICES = (1, 2, VIEWS)


def view(images: Tensor, number: int) -> Tensor:
    """Augmented view ``number`` of images (B, D, ...); pixels beyond the border are reflected.

    Example:
        >>> view(torch.tensor([[[1, 2, 3]]]), 4)
        tensor([[[2, 3, 2]]])
    """
    step = STEPS[number]
    augmented = images.flip(-1) if number % 2 else images
    for axis in range(2, images.ndim) if step else ():
        last = images.shape[axis] - 1
        place = (torch.arange(last + 1, device=images.device) + step).abs()
        augmented = augmented.index_select(axis, (last - (last - place).abs()).clamp_min(0))
    return augmented
