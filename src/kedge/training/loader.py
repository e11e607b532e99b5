"""Training data as batches in a fixed order: the same for any number of processes and after any restart; statistics."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kedge.data import ImageSet, Preprocess, StreamedSet, batches, shape_of_inputs
from kedge.data.batches import image_and_label, name_of
from kedge.data.decoding import open_image
from kedge.errors import InputError
from kedge.models.classifier import Classifier
from kedge.pixels import to_unit
from kedge.seeds import mix_seed, seeded
from kedge.training.augment import CROP_DRAWS, augment, random_resized_crop, uniforms
from kedge.training.pixmix import PixMix
from kedge.training.probe import auto_batch
from kedge.training.recipes import Recipe

SAMPLE = 5000  # images of a data set or loader that the statistics are computed on
CONSTANT = 1e-10  # a variance below this is rounding error: dividing by it would magnify any later difference


@dataclass(frozen=True)
class TrainBatch:
    """One process's part of a step: ``x`` are the rows from ``first`` on of ``among``, the images to draw anchors from.

    ``index`` are the indices of ``x`` in the data set, or None if unknown.
    """

    x: Tensor
    y: Tensor
    among: Tensor
    first: int
    index: Tensor | None


class TrainLoader(ABC):
    """Source of training batches. Every epoch has ``steps`` of them, in an order fixed by the seed and the epoch."""

    name: str
    checksum: str | None
    images: int
    steps: int
    batch: int  # images per step, over all processes; of an automatic batch, the largest
    preprocess: Preprocess

    @abstractmethod
    def epoch(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """Yield the batches of an epoch from step ``start`` on."""


class SetLoader(TrainLoader):
    """Batches of a data set. Worker processes read the images, except for an `ImageSet`, which is in memory.

    Of an `ImageSet` every process builds the whole batch and takes its rows: anchors may come from any of them, and the
    result does not depend on the number of processes. Of other sets each process reads its own images only.
    """

    def __init__(
        self, data: Any, recipe: Recipe, seed: int, rank: int, world: int, workers: int, preprocess: Preprocess,
        batch: int,
    ) -> None:  # fmt: skip
        self.preprocess, self.seed, self.rank, self.world = preprocess, seed, rank, world
        self.workers, self.in_memory = workers, isinstance(data, ImageSet)
        self.name, self.checksum, self.images = name_of(data), getattr(data, "checksum", None), len(data)
        if recipe.batch == "auto":  # batches that differ by an image at most, and none is dropped
            self.steps, self.used = math.ceil(self.images / batch), self.images
            self.batch = math.ceil(self.images / self.steps)
        else:
            self.steps, self.batch = self.images // batch, batch
            self.used = self.steps * batch
        self.source = AugmentedDataset(data, preprocess, recipe, seed)

    def epoch(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """Yield the batches of an epoch from step ``start`` on."""
        order = epoch_order(self.images, self.seed, epoch)[: self.used]
        whole = order.tensor_split(self.steps)[start:]
        own = [batch.tensor_split(self.world)[self.rank] for batch in whole]  # of this process
        keys = ([(epoch, index) for index in batch.tolist()] for batch in (whole if self.in_memory else own))
        loader = self.source.loader(keys, self.workers, mix_seed(self.seed, epoch))
        for batch, index, (x, y) in zip(whole, own, loader, strict=True):
            first = sum(map(len, batch.tensor_split(self.world)[: self.rank])) if self.in_memory else 0
            rows = slice(first, first + len(index))
            yield TrainBatch(x[rows], y[rows], x, first, index)


class WrappedLoader(TrainLoader):
    """A user's data loader, with its own batches and augmentation; resumed in mid-epoch it skips the batches done.

    Its shuffling and transforms draw from torch's global generator, which is seeded before each batch.
    """

    def __init__(self, loader: "DataLoader[Any]", preprocess: Preprocess, seed: int) -> None:
        self.loader, self.preprocess, self.seed = loader, preprocess, seed
        self.name, self.checksum = type(loader.dataset).__name__, getattr(loader.dataset, "checksum", None)
        try:
            self.steps = len(loader)
        except TypeError as error:
            raise InputError("data must have a length, to count its epochs; this loader has none") from error
        if loader.batch_size is None:  # the data set yields batches
            self.batch = len(next(batches(loader, preprocess))[0]) if self.steps else 0
            self.images = self.steps * self.batch
        else:
            drawn: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
            self.batch, self.images = loader.batch_size, min(self.steps * loader.batch_size, len(drawn))

    def epoch(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """Yield the batches of an epoch from step ``start`` on."""
        source = batches(self.loader, self.preprocess)
        for step in range(self.steps):
            torch.manual_seed(mix_seed(self.seed, epoch, step))
            images, y = next(source)
            if step < start:
                continue
            if y is None:
                raise InputError("data must yield labels to train on: (images, labels) batches")
            x = to_unit(images)
            yield TrainBatch(x, y, x, 0, None)


class AugmentedDataset(Dataset[tuple[Tensor, int]]):
    """A data set indexed by (epoch, index), whose images are decoded, resized and augmented by that epoch's draw."""

    def __init__(self, data: Any, preprocess: Preprocess, recipe: Recipe, seed: int, labelled: bool = True) -> None:
        self.data, self.preprocess, self.recipe, self.seed, self.labelled = data, preprocess, recipe, seed, labelled
        self.mix = PixMix(preprocess.shape, seed) if recipe.pixmix and labelled else None
        self.cropped = replace(preprocess, crop=1.0), replace(recipe, resized_crop=False)  # after a crop of a picture

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        with seeded(mix_seed(self.seed, epoch, index)):  # for the data set's own transforms
            image, label = image_and_label(self.data[index])
        if label is None and self.labelled:
            raise InputError(f"data must give labels to train on: (image, label) pairs; number {index} has none")
        number, preprocess, recipe = torch.tensor([index]), self.preprocess, self.recipe
        image = open_image(image) if isinstance(image, (str, os.PathLike)) else image
        if recipe.resized_crop and isinstance(image, Image.Image):  # from all of its pixels
            draws = uniforms(self.seed, epoch, number, CROP_DRAWS)[0]
            image = random_resized_crop(image, preprocess, draws, recipe.smallest_crop)
            preprocess, recipe = self.cropped
        x = preprocess(image)
        if preprocess.is_image:
            x = self._augmented(x[None], recipe, epoch, number)[0]
        return x, int(label) if self.labelled else -1

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """A batch of images in [0, 1] and labels; the images of an `ImageSet` are augmented together."""
        if not isinstance(self.data, ImageSet):
            x, y = torch.utils.data.default_collate([self[key] for key in keys])
            return to_unit(x), y
        epochs, index = torch.tensor(keys).unbind(1)
        parts = []
        for epoch in epochs.unique():  # ascending, as in the keys
            part = index[epochs == epoch]
            parts.append(self._augmented(self.data.images[part], self.recipe, int(epoch), part))
        y = index if self.data.labels is None else self.data.labels[index]
        return to_unit(torch.cat(parts)), y

    def loader(self, batches: Iterable[list[tuple[int, int]]], workers: int, seed: int) -> "DataLoader[Any]":
        """A data loader of these batches."""
        count, generator = 0 if isinstance(self.data, ImageSet) else workers, torch.Generator().manual_seed(seed)
        return DataLoader(self, batch_sampler=batches, num_workers=count, collate_fn=_as_is, generator=generator)

    def _augmented(self, images: Tensor, recipe: Recipe, epoch: int, index: Tensor) -> Tensor:
        images = augment(images, recipe, self.seed, epoch, index)
        return images if self.mix is None else self.mix(to_unit(images), epoch, index)


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


def make_loader(
    data: Any, recipe: Recipe, seed: int, *, rank: int, world: int, workers: int, preprocess: Preprocess | None,
    net: Classifier | None = None,
) -> TrainLoader:  # fmt: skip
    """The loader for an `ImageSet`, a data set or a data loader; an automatic batch depends on ``net``."""
    if isinstance(recipe.batch, int) and recipe.batch % world:
        raise InputError(f"batch must divide among {world} processes; got {recipe.batch}")
    if not isinstance(data, DataLoader) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        kind = type(data).__name__
        raise InputError(f"data must be an ImageSet (ImageSet.from_arrays), a data set or a data loader, got {kind}")
    if isinstance(data, ImageSet):
        _check_set(data, preprocess)
    recorded = None if net is None else net.record.get("preprocess")
    if preprocess is None and recorded is not None and isinstance(data, StreamedSet) and data.preprocess is None:
        preprocess = Preprocess.from_record(recorded)
    preprocess = preprocess or Preprocess(shape_of_inputs(data))
    if recipe.pixmix and (isinstance(data, DataLoader) or not preprocess.is_image):
        raise InputError("pixmix needs a set of images; data is of vectors, or a loader with augmentation of its own")
    if isinstance(data, DataLoader):
        if world > 1:
            raise InputError("data must be a data set, not a data loader, to train in several processes")
        loader: TrainLoader = WrappedLoader(data, preprocess, seed)
    else:
        if isinstance(recipe.batch, int):
            batch = recipe.batch
        else:
            assert net is not None
            batch = auto_batch(len(data), net, preprocess.shape, world)
        loader = SetLoader(data, recipe, seed, rank, world, workers, preprocess, batch)
    if loader.steps == 0:
        raise InputError(f"data must hold a batch of at least {recipe.batch} images, got {loader.images}; lower batch")
    return loader


def epoch_order(images: int, seed: int, epoch: int) -> Tensor:
    """Permutation of the image indices in an epoch, fixed by the seed and the epoch."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))


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


def _check_set(data: ImageSet, preprocess: Preprocess | None) -> None:
    """Raise an error if an `ImageSet` cannot be trained on."""
    if data.labels is None:
        raise InputError(f"data must have labels to train on; the set {data.name!r} has none")
    classes, shape = data.labels.unique().tolist(), tuple(data.images.shape[1:])
    if classes[0] < 0 or len(classes) < 2:
        raise InputError(f"labels must be 0, 1, ... with at least two classes, got {classes[:5]} in {data.name!r}")
    if preprocess is not None and preprocess.shape != shape:
        raise InputError(f"preprocess must have the shape of the images, {shape}; got {preprocess.shape}")


def _as_is(batch: Any) -> Any:
    return batch


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
