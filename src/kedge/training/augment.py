"""Random crops and flips of whole batches, each image's draw fixed by the seed, the epoch and its index in the set."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


def uniforms(seed: int, epoch: int, indices: Tensor, n: int) -> Tensor:
    """N numbers in [0, 1) for each image, whatever batch or process it is drawn in: (B,) -> (B, n).

    Example:
        >>> together = uniforms(0, 1, torch.arange(4), 2)
        >>> bool((uniforms(0, 1, torch.tensor([3]), 2) == together[3]).all())
        True
    """
    first = indices.cpu().numpy().astype(np.uint64)[:, None] * np.uint64(n)  # (B, 1)
    keys: NDArray[np.uint64] = np.add(first, np.arange(n), dtype=np.uint64, casting="unsafe")
    for salt in (seed, epoch):
        keys = _mix(keys ^ _mix(np.asarray(salt & (2**64 - 1), dtype=np.uint64)))
    return torch.from_numpy((keys >> np.uint64(11)).astype(np.float64) / 2**53)


def crop_and_flip(images: Tensor, draws: Tensor, *, padding: int, flip: bool) -> Tensor:
    """Shift each image by up to ``padding`` pixels, zeros moving in, and mirror half of them.

    Args:
        images: (B, D, H, W).
        draws: Uniform numbers, (B, 3): row, column, mirror.
        padding: Pixels on each side.
        flip: Whether to mirror.

    Example:
        >>> crop_and_flip(torch.ones(2, 1, 4, 4), torch.zeros(2, 3), padding=0, flip=False).sum()
        tensor(32.)
    """
    height, width = images.shape[2:]
    draws = draws.to(images.device)
    rows = torch.arange(height, device=images.device) + (draws[:, 0:1] * (2 * padding + 1)).long()  # (B, H)
    columns = torch.arange(width, device=images.device) + (draws[:, 1:2] * (2 * padding + 1)).long()  # (B, W)
    if flip:
        columns = torch.where(draws[:, 2:3] < 0.5, columns.flip(1), columns)
    padded = F.pad(images, (padding,) * 4) if padding else images
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]  # (B, H, W, D)
    return cropped.permute(0, 3, 1, 2)


def _mix(
    values: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    """The finaliser of splitmix64 on arrays; overflow wraps around, as it is meant to."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
