"""Pixels: from uint8 to [0, 1], in one place."""

import torch
from torch import Tensor


def to_unit(images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Images in [0, 1]: uint8 divided by 255, as float32 or ``dtype``; floating point images are only cast to it.

    Example:
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    if images.dtype == torch.uint8:
        return images.to(dtype or torch.float32) / 255
    return images if dtype is None else images.to(dtype)
