"""Normalisation statistics of training images."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kedge.data import ImageSet, Preprocess, batches
from kedge.pixels import to_unit

SAMPLE = 5000  # images of a stream that the statistics are taken from
CONSTANT = 1e-10  # a variance that is nothing but rounding: to divide by it would blow up whatever differs later


def statistics(data: Any, preprocess: Preprocess | None = None, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, in [0, 1]; 1 for the deviation of a channel that is the same everywhere.

    Of a whole `ImageSet`; of 5,000 images drawn from any other data set; of the first 5,000 of a data loader.

    Example:
        >>> mean, std = statistics(ImageSet(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)))
        >>> mean
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    if isinstance(data, ImageSet):
        channels = data.images.transpose(0, 1)
        counts = torch.stack([torch.bincount(c.flatten().int(), minlength=256) for c in channels]).double()
        values = torch.arange(256, dtype=torch.float64) / 255
        share = counts / counts.sum(dim=1, keepdim=True)  # (D, 256): exact, and needs no float copy of the set
        mean = share @ values
        variance = share @ values.square() - mean.square()
    else:
        assert preprocess is not None
        count, mean, variance = _moments(_sample(data, seed), preprocess)
        mean = mean / count
        variance = variance / count - mean.square()
    return mean, torch.where(variance < CONSTANT, 1.0, variance).sqrt()


def sample(data: Any, preprocess: Preprocess, *, seed: int = 0) -> Tensor:
    """Up to 5,000 images as the network takes them, (N, D, ...): drawn from a set, or the first of a data loader.

    Example:
        >>> images = ImageSet(torch.zeros(6, 3, 4, 4, dtype=torch.uint8))
        >>> sample(images, Preprocess((3, 4, 4))).shape
        torch.Size([6, 3, 4, 4])
    """
    found, seen = [], 0
    for x, _ in batches(_sample(data, seed), preprocess):
        found.append(x)
        seen += len(x)
        if seen >= SAMPLE:
            break
    return torch.cat(found)[:SAMPLE]


def _sample(data: Any, seed: int) -> Any:
    if isinstance(data, DataLoader):
        return data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    return (data[int(i)] for i in order[:SAMPLE])


def _moments(data: Any, preprocess: Preprocess) -> tuple[int, Tensor, Tensor]:
    """Count, sum and sum of squares per channel."""
    count, sums, squares, seen = 0, torch.zeros(1), torch.zeros(1), 0
    for x, _ in batches(data, preprocess):
        values = to_unit(x, torch.float64).transpose(0, 1).flatten(1)  # (D, n)
        count, sums, squares = count + values.shape[1], sums + values.sum(dim=1), squares + values.square().sum(dim=1)
        seen += len(x)
        if seen >= SAMPLE:
            break
    return count, sums, squares
