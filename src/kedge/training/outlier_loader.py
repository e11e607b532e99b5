"""Outlier images as an endless stream of batches, one per training step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kedge.data import ImageSet, Preprocess
from kedge.errors import InputError
from kedge.seeds import mix_seed
from kedge.training.loader import AugmentedDataset, epoch_order, name_of
from kedge.training.recipes import Recipe


class OutlierLoader:
    """Repeats a set of images endlessly, in a new order and with new crops each time.

    Step s takes ``count`` images from position s * count on (over all processes), so a resumed run continues
    with the same images.
    """

    def __init__(
        self, data: Any, recipe: Recipe, seed: int, count: int, preprocess: Preprocess,
        *, rank: int = 0, world: int = 1, workers: int = 0,
    ) -> None:  # fmt: skip
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, DataLoader):
            raise InputError(f"outliers must be an ImageSet or a data set, got {type(data).__name__}")
        if len(data) == 0:
            raise InputError("outliers must hold at least one image; the set is empty")
        if isinstance(data, ImageSet) and tuple(data.images.shape[1:]) != preprocess.shape:
            shape = tuple(data.images.shape[1:])
            raise InputError(f"outliers must have the shape of the training images, {preprocess.shape}; got {shape}")
        self.data, self.workers = data, workers
        self.seed = mix_seed(seed, 1)  # other draws than for the training images
        self.source = AugmentedDataset(data, preprocess, recipe, self.seed, labelled=False)
        self.count, self.rows = count, slice(rank * (count // world), (rank + 1) * (count // world))
        self.name, self.checksum, self.images = name_of(data), getattr(data, "checksum", None), len(data)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's images in [0, 1] and their indices, from a step on."""
        loader = self.source.loader(self._plan(step), self.workers, self.seed)
        for (x, _), keys in zip(loader, self._plan(step), strict=False):
            yield x, torch.tensor(keys)[:, 1]

    def _plan(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the (round, index in the set) of each image, step by step."""
        orders: dict[int, Tensor] = {}
        while True:
            keys = []
            for place in range(step * self.count, (step + 1) * self.count)[self.rows]:
                number, position = divmod(place, self.images)
                if number not in orders:
                    orders = {n: order for n, order in orders.items() if n == number - 1}
                    orders[number] = epoch_order(self.images, self.seed, number)
                keys.append((number, int(orders[number][position])))
            yield keys
            step += 1
