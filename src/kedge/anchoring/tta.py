"""Views of an image that show the same: as it is, mirrored, and either of them a pixel further along a diagonal."""

import torch
from torch import Tensor

STEPS = (0, 0, -1, 1, 1, -1)  # pixels by which the views move; every second one is mirrored
VIEWS = len(STEPS)
CHOICES = (1, 2, VIEWS)


def view(images: Tensor, number: int) -> Tensor:
    """Images (B, D, ...) in the view of a number; what moves in at a border is what lies inside it, mirrored.

    Example:
        >>> view(torch.tensor([[[1, 2, 3]]]), 1)
        tensor([[[3, 2, 1]]])
        >>> view(torch.tensor([[[1, 2, 3]]]), 4)
        tensor([[[2, 3, 2]]])
    """
    step = STEPS[number]
    seen = images.flip(-1) if number % 2 else images
    for axis in range(2, images.ndim) if step else ():
        last = images.shape[axis] - 1
        place = (torch.arange(last + 1, device=images.device) + step).abs()
        seen = seen.index_select(axis, (last - (last - place).abs()).clamp_min(0))
    return seen
