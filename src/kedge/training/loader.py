"""Training data as batches in a fixed order: the same for any number of processes and after any restart."""

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
from kedge.training.recipes import Recipe

NEEDS_PICTURES = "resized_crop cuts from large images: pass a data set of PIL images or paths, or switch it off"


@dataclass(frozen=True)
class TrainBatch:
    """One process's part of a step's images.

    Anchors are drawn from the images ``among``, of which ``x`` are the rows from ``first`` on. ``index`` are the
    indices of ``x`` in the data set, or None if unknown.
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
    batch: int  # images per step, over all processes
    preprocess: Preprocess

    @abstractmethod
    def epoch(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """Yield the batches of an epoch from step ``start`` on."""


class MemoryLoader(TrainLoader):
    """Batches of an `ImageSet`, augmented as a whole.

    Every process builds the whole batch and takes its rows: anchors may come from any of them, and the result does not
    depend on the number of processes.
    """

    def __init__(
        self, data: ImageSet, recipe: Recipe, seed: int, rank: int, world: int, preprocess: Preprocess | None
    ) -> None:
        if data.labels is None:
            raise InputError(f"data must have labels to train on; the set {data.name!r} has none")
        if int(data.labels.min()) < 0 or len(data.labels.unique()) < 2:
            raise InputError(
                f"labels must be 0, 1, ... with at least two classes, got {data.labels.unique().tolist()[:5]} "
                f"in the set {data.name!r}"
            )
        if recipe.resized_crop:
            raise InputError(NEEDS_PICTURES)
        shape = tuple(data.images.shape[1:])
        self.data, self.labels, self.recipe, self.seed = data, data.labels, recipe, seed
        self.name, self.checksum, self.images = data.name, data.checksum, len(data)
        self.steps, self.batch = len(data) // recipe.batch, recipe.batch
        self.preprocess = preprocess or Preprocess(shape)
        if self.preprocess.shape != shape:
            raise InputError(
                f"preprocess must have the shape of the images of an ImageSet, {shape}; got {self.preprocess.shape}"
            )
        share = recipe.batch // world
        self.rows = slice(rank * share, (rank + 1) * share)

    def epoch(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """Yield the batches of an epoch from step ``start`` on."""
        for index in epoch_order(self.images, self.seed, epoch).split(self.batch)[start : self.steps]:
            x = to_unit(augment(self.data.images[index], self.recipe, self.seed, epoch, index))
            yield TrainBatch(x[self.rows], self.labels[index][self.rows], x, self.rows.start, index[self.rows])


class DatasetLoader(TrainLoader):
    """Batches of a map-style data set, read by worker processes; anchors come from the process's own images."""

    def __init__(
        self, data: Any, recipe: Recipe, seed: int, rank: int, world: int, workers: int, preprocess: Preprocess
    ) -> None:
        self.data, self.recipe, self.seed, self.rank, self.world = data, recipe, seed, rank, world
        self.workers, self.preprocess = workers, preprocess
        self.name, self.checksum, self.images = name_of(data), getattr(data, "checksum", None), len(data)
        self.steps, self.batch = self.images // recipe.batch, recipe.batch

    def epoch(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """Yield the batches of an epoch from step ``start`` on; the data set's own transforms run in the workers."""
        order = epoch_order(self.images, self.seed, epoch)[: self.steps * self.batch]
        indices = order.view(self.steps, self.world, -1)[start:, self.rank]  # (steps, images of this process)
        loader: DataLoader[Any] = DataLoader(
            AugmentedDataset(self.data, self.preprocess, self.recipe, self.seed),
            batch_sampler=[[(epoch, index) for index in batch] for batch in indices.tolist()],
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(mix_seed(self.seed, epoch)),
        )
        for index, (images, y) in zip(indices, loader, strict=True):
            x = to_unit(images)
            yield TrainBatch(x, y, x, 0, index)


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

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        with seeded(mix_seed(self.seed, epoch, index)):  # for the data set's own transforms
            image, label = image_and_label(self.data[index])
        if label is None and self.labelled:
            raise InputError(f"data must give labels to train on: (image, label) pairs; number {index} has none")
        number = torch.tensor([index])
        if self.recipe.resized_crop:
            image = open_image(image) if isinstance(image, (str, os.PathLike)) else image
            if not isinstance(image, Image.Image):
                raise InputError(f"{NEEDS_PICTURES}; number {index} is {shape_of(image)}")
            image = random_resized_crop(image, self.preprocess, uniforms(self.seed, epoch, number, 40)[0])
        x = self.preprocess(image)
        if self.preprocess.is_image:
            x = augment(x[None], self.recipe, self.seed, epoch, number)[0]
        return x, int(label) if self.labelled else -1


def make_loader(
    data: Any, recipe: Recipe, seed: int, *, rank: int, world: int, workers: int, preprocess: Preprocess | None
) -> TrainLoader:
    """The loader for an `ImageSet`, a data set or a data loader."""
    if recipe.batch % world:
        raise InputError(f"batch must divide among {world} processes; got {recipe.batch}")
    if isinstance(data, ImageSet):
        loader: TrainLoader = MemoryLoader(data, recipe, seed, rank, world, preprocess)
    elif isinstance(data, DataLoader):
        if world > 1:
            raise InputError("data must be a data set, not a data loader, to train in several processes")
        loader = WrappedLoader(data, preprocess or Preprocess(shape_of_inputs(data)), seed)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        preprocess = preprocess or Preprocess(shape_of_inputs(data))
        loader = DatasetLoader(data, recipe, seed, rank, world, workers, preprocess)
    else:
        raise InputError(
            f"data must be an ImageSet, a data set or a data loader, got {type(data).__name__}; "
            "ImageSet.from_arrays makes a set of arrays"
        )
    if loader.steps == 0:
        raise InputError(
            f"data must hold at least one batch of {recipe.batch} images, got {loader.images}; lower batch"
        )
    return loader


def epoch_order(images: int, seed: int, epoch: int) -> Tensor:
    """Permutation of the image indices in an epoch, fixed by the seed and the epoch."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))


def name_of(data: Any) -> str:
    """Name of a data set, for records."""
    return str(getattr(data, "name", type(data).__name__))
