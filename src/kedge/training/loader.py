"""Feeds: training data as numbered batches, the same for every process and after every restart."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kedge.checks import shape_of
from kedge.data import ImageSet, Preprocess, batches, shape_of_inputs
from kedge.data.batches import image_and_label
from kedge.data.decoding import open_image
from kedge.errors import InputError
from kedge.pixels import to_unit
from kedge.seeds import mix_seed, seeded
from kedge.training.augment import augment, random_resized_crop, uniforms
from kedge.training.recipe import Recipe

CUTS = "resized_crop cuts from large images: pass a data set of PIL images or paths, or switch it off"


@dataclass(frozen=True)
class Batch:
    """The part of a step's images that this process trains on.

    ``among`` are the images that anchors are drawn from, of which ``x`` are those from row ``first`` on; ``index`` are
    the numbers of ``x`` in the set, where they are known.
    """

    x: Tensor
    y: Tensor
    among: Tensor
    first: int
    index: Tensor | None


class TrainLoader(ABC):
    """Where batches come from. Every epoch has ``steps`` of them, in an order fixed by the seed and the epoch."""

    name: str
    checksum: str | None
    images: int
    steps: int
    batch: int  # images per step, of all processes together
    preprocess: Preprocess

    @abstractmethod
    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on."""


class MemoryFeed(TrainLoader):
    """An `ImageSet`: batches are cut and augmented whole, so no process waits for a worker.

    Every process makes the whole batch and takes its rows: anchors may come from any of them, and the result is the
    same however many processes share the work.
    """

    def __init__(
        self, data: ImageSet, recipe: Recipe, seed: int, rank: int, world: int, preprocess: Preprocess | None
    ) -> None:
        assert data.labels is not None
        self.data, self.labels, self.recipe, self.seed = data, data.labels, recipe, seed
        self.name, self.checksum, self.images = data.name, data.checksum, len(data)
        self.steps, self.batch = len(data) // recipe.batch, recipe.batch
        self.preprocess = preprocess or Preprocess(tuple(data.images.shape[1:]))
        if self.preprocess.shape != tuple(data.images.shape[1:]):
            raise InputError(
                f"preprocess must have the shape of the images of an ImageSet, {tuple(data.images.shape[1:])}; got "
                f"{self.preprocess.shape}"
            )
        share = recipe.batch // world
        self.rows = slice(rank * share, (rank + 1) * share)

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Cut, augment and scale batch after batch."""
        order = epoch_order(self.images, self.seed, epoch)
        for step in range(start, self.steps):
            index = order[step * self.recipe.batch : (step + 1) * self.recipe.batch]
            x = to_unit(augment(self.data.images[index], self.recipe, self.seed, epoch, index))
            yield Batch(x[self.rows], self.labels[index][self.rows], x, self.rows.start, index[self.rows])


class DatasetFeed(TrainLoader):
    """A map-style data set, read by worker processes; anchors come from the process's own part of the batch."""

    def __init__(
        self, data: Any, recipe: Recipe, seed: int, rank: int, world: int, workers: int, preprocess: Preprocess
    ) -> None:
        self.data, self.recipe, self.seed, self.rank, self.world = data, recipe, seed, rank, world
        self.workers, self.preprocess = workers, preprocess
        self.name = str(getattr(data, "name", type(data).__name__))
        self.checksum = getattr(data, "checksum", None)
        self.images = len(data)
        self.steps, self.batch = self.images // recipe.batch, recipe.batch

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Read batch after batch; the data set's own transforms run in the workers."""
        share = self.recipe.batch // self.world
        order = epoch_order(self.images, self.seed, epoch)[: self.steps * self.recipe.batch]
        mine = order.view(self.steps, self.world, share)[start:, self.rank]  # (steps, share)
        loader: DataLoader[Any] = DataLoader(
            Numbered(self.data, self.preprocess, self.recipe, self.seed),
            batch_sampler=[[(epoch, index) for index in batch] for batch in mine.tolist()],
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(mix_seed(self.seed, epoch)),
        )
        for index, (x, y) in zip(mine, loader, strict=True):
            x = to_unit(x)
            yield Batch(x, y, x, 0, index)


class LoaderFeed(TrainLoader):
    """A user's own data loader, with its own batches and augmentation; restarted in mid-epoch it skips what was done.

    Its shuffling and its transforms draw from torch's generator, which is seeded before each batch.
    """

    def __init__(self, loader: "DataLoader[Any]", preprocess: Preprocess, seed: int) -> None:
        self.loader, self.preprocess, self.seed = loader, preprocess, seed
        self.name, self.checksum = type(loader.dataset).__name__, getattr(loader.dataset, "checksum", None)
        try:
            self.steps = len(loader)
        except TypeError as error:
            raise InputError(
                "data must have a length, so that its epochs can be counted; this loader has none"
            ) from error
        if loader.batch_size is None:  # batches of the loader's own making
            self.batch = len(next(batches(loader, preprocess))[0]) if self.steps else 0
            self.images = self.steps * self.batch
        else:
            drawn: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
            self.batch, self.images = loader.batch_size, min(self.steps * loader.batch_size, len(drawn))

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Go through the loader once."""
        source = batches(self.loader, self.preprocess)
        for step in range(self.steps):
            torch.manual_seed(mix_seed(self.seed, epoch, step))
            x, y = next(source)
            if step < start:
                continue
            if y is None:
                raise InputError("data must yield labels to train on: (images, labels) batches")
            x = to_unit(x)
            yield Batch(x, y, x, 0, None)


class Numbered(Dataset[tuple[Tensor, int]]):
    """A data set whose images are decoded, resized and augmented, each by a draw of the epoch and its own number."""

    def __init__(self, data: Any, preprocess: Preprocess, recipe: Recipe, seed: int, labelled: bool = True) -> None:
        self.data, self.preprocess, self.recipe, self.seed, self.labelled = data, preprocess, recipe, seed, labelled

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        with seeded(mix_seed(self.seed, epoch, index)):  # for transforms of the data set's own
            image, label = image_and_label(self.data[index])
        if label is None and self.labelled:
            raise InputError(f"data must give labels to train on: (image, label) pairs; number {index} has none")
        number = torch.tensor([index])
        if self.recipe.resized_crop:
            image = open_image(image) if isinstance(image, (str, os.PathLike)) else image
            if not isinstance(image, Image.Image):
                raise InputError(f"{CUTS}; number {index} is {shape_of(image)}")
            image = random_resized_crop(image, self.preprocess, uniforms(self.seed, epoch, number, 40)[0])
        x = self.preprocess(image)
        if self.preprocess.is_image:
            x = augment(x[None], self.recipe, self.seed, epoch, number)[0]
        return x, int(label) if self.labelled else -1


def make_feed(
    data: Any, recipe: Recipe, seed: int, *, rank: int, world: int, workers: int, preprocess: Preprocess | None
) -> TrainLoader:
    """The feed for whatever a user trains on, checked."""
    if recipe.batch % world:
        raise InputError(f"batch must divide among {world} processes; got {recipe.batch}")
    if isinstance(data, ImageSet):
        if data.labels is None:
            raise InputError(f"data must have labels to train on; the set {data.name!r} has none")
        if int(data.labels.min()) < 0 or len(data.labels.unique()) < 2:
            raise InputError(
                f"labels must be 0, 1, ... with at least two classes, got {data.labels.unique().tolist()[:5]} "
                f"in the set {data.name!r}"
            )
        if recipe.resized_crop:
            raise InputError(CUTS)
        feed: TrainLoader = MemoryFeed(data, recipe, seed, rank, world, preprocess)
    elif isinstance(data, DataLoader):
        if world > 1:
            raise InputError("data must be a data set, not a data loader, to train in several processes")
        feed = LoaderFeed(data, preprocess or Preprocess(shape_of_inputs(data)), seed)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        feed = DatasetFeed(data, recipe, seed, rank, world, workers, preprocess or Preprocess(shape_of_inputs(data)))
    else:
        raise InputError(
            f"data must be an ImageSet, a data set or a data loader, got {type(data).__name__}; "
            "ImageSet.from_arrays makes a set of arrays"
        )
    if feed.steps == 0:
        raise InputError(f"data must hold at least one batch of {recipe.batch} images, got {feed.images}; lower batch")
    return feed


def epoch_order(images: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch: a permutation fixed by the seed and the epoch.

    Example:
        >>> sorted(epoch_order(4, seed=0, epoch=1).tolist())
        [0, 1, 2, 3]
    """
    return torch.randperm(images, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
