"""Outliers: images beside the training set, as an endless stream of batches that are numbered by the step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kedge.data import ImageSet, Preprocess
from kedge.errors import InputError
from kedge.pixels import to_unit
from kedge.seeds import mix_seed
from kedge.training.augment import augment
from kedge.training.loader import Numbered, epoch_order
from kedge.training.recipe import Recipe


class OutlierLoader:
    """Goes through a set of images again and again, in a new order and a new crop each time.

    Step s takes the images from place s * count on, so that a run that was stopped goes on with the same ones.

    Args:
        data: An `ImageSet` or a data set; labels are not read.
        recipe: How to crop and flip.
        seed: Of the order and the crops.
        count: Images per step, for all processes together.
        preprocess: That of the training images.
        rank: Of this process.
        world: The number of processes.
        workers: Processes that read a data set.

    Example:
        >>> data = ImageSet(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
        >>> feed = OutlierLoader(data, Recipe(epochs=1), 0, 4, Preprocess((1, 8, 8)))
        >>> (x, index), *_ = zip(feed.batches(0), range(1))
        >>> x[0].shape
        torch.Size([4, 1, 8, 8])
    """

    def __init__(
        self,
        data: Any,
        recipe: Recipe,
        seed: int,
        count: int,
        preprocess: Preprocess,
        *,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ) -> None:
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, DataLoader):
            raise InputError(f"outliers must be an ImageSet or a data set, got {type(data).__name__}")
        if len(data) == 0:
            raise InputError("outliers must hold at least one image; the set is empty")
        if isinstance(data, ImageSet) and tuple(data.images.shape[1:]) != preprocess.shape:
            raise InputError(
                f"outliers must have the shape of the training images, {preprocess.shape}; got "
                f"{tuple(data.images.shape[1:])}"
            )
        self.data, self.recipe, self.preprocess, self.workers = data, recipe, preprocess, workers
        self.seed = mix_seed(seed, 1)  # other draws than the training images'
        self.count, self.rows = count, slice(rank * (count // world), (rank + 1) * (count // world))
        self.name = str(getattr(data, "name", type(data).__name__))
        self.checksum, self.images = getattr(data, "checksum", None), len(data)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The images in [0, 1] of this process and their numbers, from a step on."""
        plan = self._plan(step)
        if isinstance(self.data, ImageSet):
            for keys in plan:
                rounds, index = torch.tensor(keys).unbind(1)
                parts = [
                    augment(self.data.images[part], self.recipe, self.seed, int(number), part)
                    for number in rounds.unique()  # two where a round ends in mid-batch
                    for part in [index[rounds == number]]
                ]
                yield to_unit(torch.cat(parts)), index
            return
        numbered = Numbered(self.data, self.preprocess, self.recipe, self.seed, labelled=False)
        again = self._plan(step)
        loader: DataLoader[Any] = DataLoader(
            numbered,
            batch_sampler=plan,
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(self.seed),
        )
        for x, _ in loader:
            index = torch.tensor(next(again))[:, 1]
            yield to_unit(x), index

    def _plan(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """Which images each step takes: (round, number in the set) of each."""
        orders: dict[int, Tensor] = {}
        while True:
            places = range(step * self.count, (step + 1) * self.count)[self.rows]
            keys = []
            for place in places:
                number, position = divmod(place, self.images)
                if number not in orders:
                    orders = {n: o for n, o in orders.items() if n == number - 1}
                    orders[number] = epoch_order(self.images, self.seed, number)
                keys.append((number, int(orders[number][position])))
            yield keys
            step += 1
