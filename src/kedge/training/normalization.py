"""Mean and standard deviation of training images, for normalization."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kedge.data import ImageSet, Preprocess, batches
from kedge.pixels import to_unit

SAMPLE = 5000  # images of a data set or loader that the statistics are computed on
CONSTANT = 1e-10  # a variance below this is rounding error: dividing by it would magnify any later difference


def statistics(data: Any, preprocess: Preprocess | None = None, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, in [0, 1]; the deviation of a constant channel is set to 1.

    Computed on a whole `ImageSet`, on 5,000 random images of another data set, or on the first 5,000 of a data loader.

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
        mean, square = share @ values, share @ values.square()
    else:
        assert preprocess is not None
        count, sums, squares = 0, torch.zeros(1), torch.zeros(1)
        for x in _first(data, preprocess, seed):
            part = to_unit(x, torch.float64).transpose(0, 1).flatten(1)  # (D, n)
            count, sums, squares = count + part.shape[1], sums + part.sum(dim=1), squares + part.square().sum(dim=1)
        mean, square = sums / count, squares / count
    variance = square - mean.square()
    return mean, torch.where(variance < CONSTANT, 1.0, variance).sqrt()


def sample(data: Any, preprocess: Preprocess, *, seed: int = 0) -> Tensor:
    """Up to 5,000 preprocessed images (N, D, ...): random ones of a data set, or the first of a data loader."""
    return torch.cat(list(_first(data, preprocess, seed)))[:SAMPLE]


def _first(data: Any, preprocess: Preprocess, seed: int) -> Iterator[Tensor]:
    """Yield batches of images until there are at least `SAMPLE`."""
    source = data
    if not isinstance(data, DataLoader):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        source = (data[int(i)] for i in order[:SAMPLE])
    seen = 0
    for x, _ in batches(source, preprocess):
        yield x
        seen += len(x)
        if seen >= SAMPLE:
            break
