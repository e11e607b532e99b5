"""Batches out of anything: image sets, tensors, arrays, PIL images, paths, data sets and data loaders."""

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.checks import one_of, shape_of
from kedge.data.imageset import ImageSet
from kedge.data.preprocess import Preprocess
from kedge.data.reading import in_order
from kedge.data.streamed import Files, StreamedSet
from kedge.errors import InputError
from kedge.pixels import to_unit

Batch = tuple[Tensor, Tensor | None]

CHOICES = ("random", "balanced", "means")
_IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
_LABEL_KEYS = ("labels", "label", "targets", "target", "y")


def batches(source: Any, preprocess: Preprocess, *, size: int = 256) -> Iterator[Batch]:
    """Yield (images, labels) batches; labels is None where the source has none.

    Image files are decoded by threads, up to a batch ahead of the one that is yielded.

    Args:
        source: An `ImageSet`, a tensor or array of images, a PIL image, a path, a sequence of any of these, a data set
            or data loader of images, (image, label) pairs or mappings.
        preprocess: What the network takes.
        size: Images per batch; a data loader keeps its own.

    Example:
        >>> sizes = [len(x) for x, _ in batches(torch.rand(5, 3, 8, 8), Preprocess((3, 8, 8)), size=2)]
        >>> sizes
        [2, 2, 1]
    """
    empty, files = True, _is_files(source)
    parts: Iterator[tuple[Any, Any]] = _read_ahead(source, preprocess, size) if files else _raw(source, size)
    for images, labels in parts:
        if _is_array(images):
            x = preprocess.batch(images)
        else:
            x = _stack(images if files else [preprocess(item) for item in images])
        if len(x):
            empty = False
            yield x, _class_numbers(labels, len(x))
    if empty:
        raise InputError("the images must be at least one; the source is empty")


def gather(source: Any, preprocess: Preprocess, *, name: str | None = None) -> ImageSet:
    """Read a data set or a data loader into memory, as 8-bit images of the size that a network takes.

    Example:
        >>> gather(torch.rand(5, 3, 8, 8), Preprocess((3, 8, 8)), name="noise").images.dtype
        torch.uint8
    """
    images, labels = [], []
    for x, y in batches(source, preprocess):
        images.append(x if x.dtype == torch.uint8 else (x * 255).round().to(torch.uint8))
        labels.append(torch.full((len(x),), -1) if y is None else y)
    numbers = torch.cat(labels)
    own = getattr(source, "dataset", source)
    called = name or str(getattr(own, "name", type(own).__name__))
    classes = tuple(getattr(own, "classes", ()))
    return ImageSet(torch.cat(images), None if bool((numbers < 0).any()) else numbers, called, classes)


def shape_of_inputs(source: Any) -> tuple[int, ...]:
    """The shape (D, H, W) of one input of a source, without reading all of it.

    Example:
        >>> shape_of_inputs(torch.rand(5, 3, 8, 8))
        (3, 8, 8)
    """
    if isinstance(source, Iterator):
        raise InputError(
            "the training set must be a source that can be read more than once, such as a list or a data set; an "
            "iterator would lose its first image: pass list(...), or preprocess="
        )
    images, _ = next(_raw(source, 1), (None, None))
    if images is None or len(images) == 0:
        raise InputError("the training set must have at least one image; it is empty")
    first = images[0]
    if isinstance(first, (Image.Image, str, os.PathLike)):
        raise InputError(
            "images on disk have no size of their own for the network: pass preprocess=Preprocess((D, H, W))"
        )
    shape = tuple(first.shape)
    if isinstance(first, np.ndarray) and len(shape) == 2 and first.dtype == np.uint8:
        return (1, *shape)  # a grey image; floating point numbers are a signal
    if isinstance(first, np.ndarray) and len(shape) == 3 and shape[0] > shape[2]:
        return (shape[2], shape[0], shape[1])  # arrays hold images channels last
    return shape


def choose(source: Any, preprocess: Preprocess, k: int, how: str, seed: int, *, at_least: int | None = None) -> Tensor:
    """Draw k images of a training set: ``"random"``, or ``"balanced"`` over its classes. Seeded.

    ``"means"`` are no images of the set, but means over the images of a class each; over parts of them where there are
    fewer classes. A smaller set is an error, unless it has ``at_least`` so many.

    Example:
        >>> digits = ImageSet(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.arange(20) % 2)
        >>> choose(digits, Preprocess((1, 8, 8)), 4, "balanced", seed=0).shape
        torch.Size([4, 1, 8, 8])
    """
    one_of("anchors", how, CHOICES)
    generator = torch.Generator().manual_seed(seed)
    if how == "means":
        return _means(source, preprocess, k, generator)
    sized = _is_sized(source)
    labels = _known_labels(source) if sized and how == "balanced" else None
    if sized and (how == "random" or labels is not None):
        order = torch.randperm(len(source), generator=generator)
        if labels is not None:
            order = order[_round_robin(labels[order])]
        picked = [_item(source, int(i)) for i in order[:k]]
        chosen = torch.stack([preprocess(image) for image in picked])
    else:
        chosen = _reservoir(source, preprocess, k, how, generator)
    needed = k if at_least is None else at_least
    if len(chosen) < needed:
        raise InputError(
            f"the training set must have at least {needed} images to draw anchors from; it has {len(chosen)}"
        )
    return chosen


def _is_sized(source: Any) -> bool:
    """Whether its items can be had by number."""
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (str, Mapping))


def _means(source: Any, preprocess: Preprocess, k: int, generator: torch.Generator) -> Tensor:
    """The means of classes that are drawn; an image goes to the parts of its class in turn, where it has several."""
    if isinstance(source, Iterator):
        raise InputError('anchors="means" reads the training set twice, which an iterator cannot be; pass a data set')
    labels = _known_labels(source) if _is_sized(source) else None
    if labels is None:
        read = [y for _, y in batches(source, preprocess) if y is not None]
        labels = torch.cat(read) if read else torch.empty(0, dtype=torch.long)
    labels = labels[labels >= 0]
    if not len(labels):
        raise InputError('anchors="means" needs labels, and the training set has none; use "random"')
    classes = labels.unique()
    drawn = classes[torch.randperm(len(classes), generator=generator)].tolist()
    places: dict[int, list[int]] = {}
    for place in range(k):
        places.setdefault(drawn[place % len(drawn)], []).append(place)
    sums, counts = torch.zeros(k, *preprocess.shape, dtype=torch.float64), torch.zeros(k, dtype=torch.long)
    turns = {key: itertools.cycle(parts) for key, parts in places.items()}
    for x, y in batches(source, preprocess):
        taken = [] if y is None else [(row, next(turns[key])) for row, key in enumerate(y.tolist()) if key in turns]
        if taken:
            rows, into = map(torch.tensor, zip(*taken, strict=True))
            sums.index_add_(0, into, x[rows].double() / (255 if x.dtype == torch.uint8 else 1))
            counts += torch.bincount(into, minlength=k)
    if bool((counts == 0).any()):
        raise InputError(
            f"the training set must have at least {max(map(len, places.values()))} images of each class, to make {k} "
            f"means of {len(drawn)} classes; the smallest class has {int(labels.unique(return_counts=True)[1].min())}"
        )
    return (sums / counts.view(-1, *(1,) * len(preprocess.shape))).float()


def _reservoir(source: Any, preprocess: Preprocess, k: int, how: str, generator: torch.Generator) -> Tensor:
    """One pass over a stream: every image gets a random rank, and the best are kept (of each class if balanced)."""
    kept: dict[int, list[tuple[float, Tensor]]] = {}
    for x, y in batches(source, preprocess):
        if how == "balanced" and y is None:
            raise InputError('anchors="balanced" needs labels, and the training set has none; use "random"')
        ranks = torch.rand(len(x), generator=generator, dtype=torch.float64).tolist()
        keys = y.tolist() if how == "balanced" and y is not None else [0] * len(x)
        for rank, key, image in zip(ranks, keys, x, strict=True):
            bucket = kept.setdefault(key, [])
            if len(bucket) < k or rank < bucket[-1][0]:
                bucket.append((rank, image.clone()))
                bucket.sort(key=lambda pair: pair[0])
                del bucket[k:]
    columns = itertools.zip_longest(*sorted(kept.values(), key=lambda bucket: bucket[0][0]))
    images = [pair[1] for column in columns for pair in column if pair is not None]
    return torch.stack(images[:k])


def _raw(source: Any, size: int) -> Iterator[tuple[Any, Any]]:
    if isinstance(source, ImageSet):
        parts = source.labels.split(size) if source.labels is not None else itertools.repeat(None)
        yield from zip(source.images.split(size), parts)  # noqa: B905 -- repeat(None) has no end
    elif _is_array(source):
        yield from ((source[i : i + size], None) for i in range(0, len(source), size))
    elif isinstance(source, (Image.Image, str, os.PathLike)):
        yield [source], None
    elif isinstance(source, torch.utils.data.DataLoader):
        yield from (image_and_label(batch) for batch in source)
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping):
        yield from _gather((source[i] for i in range(len(source))), size)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        yield from _gather(source, size)
    else:
        raise InputError(
            "images must be an ImageSet, a tensor, an array, a PIL image, a path, a data set, a data loader or a "
            f"sequence of images; got {type(source).__name__}"
        )


def _is_files(source: Any) -> bool:
    """Whether threads may decode it: whatever else is given may be code of the user's own, for one thread."""
    if isinstance(source, StreamedSet):
        return isinstance(source.store, Files)
    return isinstance(source, (list, tuple)) and all(isinstance(item, (str, os.PathLike)) for item in source)


def _read_ahead(source: Any, preprocess: Preprocess, size: int) -> Iterator[tuple[list[Any], list[Any] | None]]:
    def read(index: int) -> tuple[Tensor, Any]:
        image, label = image_and_label(source[index])
        return preprocess(image), label

    tasks = (functools.partial(read, index) for index in range(len(source)))
    yield from _gather(in_order(tasks, ahead=2 * size), size)


def _gather(items: Iterable[Any], size: int) -> Iterator[tuple[list[Any], list[Any] | None]]:
    iterator = iter(items)
    while chunk := [image_and_label(item) for item in itertools.islice(iterator, size)]:
        labels = [label for _, label in chunk]
        known = all(label is not None for label in labels)
        yield [image for image, _ in chunk], labels if known else None


def image_and_label(item: Any) -> tuple[Any, Any]:
    """An item or a batch as (images, labels), from a pair, a mapping or the image alone.

    Example:
        >>> image_and_label({"image": "a.png", "label": 3})
        ('a.png', 3)
    """
    if isinstance(item, Mapping):
        image = next((item[key] for key in _IMAGE_KEYS if key in item), None)
        label = next((item[key] for key in _LABEL_KEYS if key in item), None)
        if image is None:
            raise InputError(f"a mapping must hold the image as one of {_IMAGE_KEYS}; got the keys {list(item)}")
    elif isinstance(item, (tuple, list)) and len(item) >= 1 and not isinstance(item[0], (int, float)):
        image, label = item[0], item[1] if len(item) > 1 else None
    else:
        image, label = item, None
    return image, label


def _item(source: Any, index: int) -> Any:
    return image_and_label(source[index])[0]


def _stack(images: list[Tensor]) -> Tensor:
    """One batch; torch would make 255.0 of a uint8 pixel that lies beside floating point images."""
    if len({image.dtype for image in images}) > 1:
        images = [to_unit(image, torch.float64) if image.dtype == torch.uint8 else image for image in images]
    return torch.stack(images)


def _class_numbers(labels: Any, n: int) -> Tensor | None:
    """The labels of a batch as int64 (n,), or None where there are none; -1 marks images without a label."""
    if labels is None:
        return None
    numbers = _whole_numbers(labels)
    if numbers is None or numbers.shape != (n,):
        came = shape_of(labels) if numbers is None else tuple(numbers.shape)
        raise InputError(
            f"labels must be one whole number per image, ({n},); got {came}: give images alone, or with the numbers of "
            "their classes"
        )
    return None if bool((numbers < 0).all()) else numbers


def _known_labels(source: Any) -> Tensor | None:
    """The class of each image where a data set lists them; some list their classes' names under the same name."""
    for name in ("labels", "targets"):  # ours, torchvision's
        labels = getattr(source, name, None)
        numbers = _whole_numbers(labels) if isinstance(labels, (Tensor, np.ndarray, Sequence)) else None
        if numbers is not None and numbers.shape == (len(source),):
            return numbers
    return None


def _whole_numbers(labels: Any) -> Tensor | None:
    try:
        numbers = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):  # strings, mappings, rows of different lengths
        return None
    return None if numbers.is_floating_point() or numbers.is_complex() else numbers.long()


def _round_robin(labels: Tensor) -> Tensor:
    """Positions that take one of each class in turn, keeping the given order within a class."""
    seen: dict[int, int] = {}
    turns = []
    for label in labels.tolist():
        turns.append(seen.get(label, 0))
        seen[label] = turns[-1] + 1
    return torch.argsort(torch.tensor(turns), stable=True)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))
