"""Batches of image sets, tensors, arrays, PIL images, paths, data sets and data loaders."""

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.checks import shape_of
from kedge.data.features import Features
from kedge.data.imageset import ImageSet
from kedge.data.mapped import mapped_pixels
from kedge.data.preprocess import Preprocess
from kedge.data.reading import in_order
from kedge.data.streamed import Files, StreamedSet
from kedge.errors import InputError
from kedge.pixels import dense, to_unit
from kedge.progress import progress_bar

Batch = tuple[Tensor, Tensor | None]

_IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
_LABEL_KEYS = ("labels", "label", "targets", "target", "y")


def batches(
    source: Any, preprocess: Preprocess, *, size: int | None = None, nan: bool = False, label: str | None = None
) -> Iterator[Batch]:
    """Yield (images, labels) batches; labels is None if the source has none.

    Image files are decoded by threads, up to a batch ahead.

    Args:
        source: An `ImageSet`, a tensor or array of images, a PIL image, a path, a sequence of any of these, a data set
            or data loader of images, (image, label) pairs or mappings.
        preprocess: How they become inputs.
        size: Images per batch, by default `Preprocess.batch_size`; a data loader keeps its own batch size.
        nan: Whether images with NaN or infinite pixels pass; otherwise they are an error.
        label: What is done with the batches, for a progress bar; None for no bar.

    Example:
        >>> sizes = [len(x) for x, _ in batches(torch.rand(5, 3, 8, 8), Preprocess((3, 8, 8)), size=2)]
        >>> sizes
        [2, 2, 1]
    """
    if label is not None:
        with progress_bar(label, _count(source)) as update:
            done = 0
            for x, y in batches(source, preprocess, size=size, nan=nan):
                yield x, y
                done += len(x)
                update(done)
        return
    size = preprocess.batch_size if size is None else size
    empty, files = True, _is_files(source)
    parts: Iterator[tuple[Any, Any]] = _read_ahead(source, preprocess, size, nan) if files else _raw(source, size)
    for images, labels in parts:
        if _is_array(images):
            x = preprocess.batch(images, nan=nan)
        else:
            x = _stack(images if files else [preprocess(item, nan=nan) for item in images])
        if len(x):
            empty = False
            yield x, _class_numbers(labels, len(x))
    if empty:
        raise InputError("the images must be at least one; the source is empty")


def name_of(data: Any) -> str:
    """The name of a set of images, or that of its kind."""
    return str(getattr(data, "name", type(data).__name__))


def gather(source: Any, preprocess: Preprocess, *, name: str | None = None) -> ImageSet:
    """Read a data set or a data loader into an `ImageSet`, as 8-bit images of the network's input size."""
    images, labels = [], []
    for x, y in batches(source, preprocess, label="reading"):
        images.append(_as_pixels(x))
        labels.append(torch.full((len(x),), -1) if y is None else y)
    numbers = torch.cat(labels)
    data = getattr(source, "dataset", source)
    classes = tuple(getattr(data, "classes", ()))
    return ImageSet(torch.cat(images), None if bool((numbers < 0).any()) else numbers, name or name_of(data), classes)


def gather_on_disk(source: StreamedSet, preprocess: Preprocess, folder: Path, *, name: str | None = None) -> ImageSet:
    """The same in a file, memory-mapped, for sets that are too large for memory; a second call opens the file."""
    identity = {"images": source.checksum, "preprocess": asdict(preprocess)}
    pixels = mapped_pixels(
        folder, name or source.name, identity, (len(source), *preprocess.shape),
        lambda: (_as_pixels(x) for x, _ in batches(source, preprocess, label="reading")),
    )  # fmt: skip
    labels = source.labels
    if labels is not None and bool((labels < 0).any()):
        labels = None
    return ImageSet(pixels, labels, name or source.name, source.classes)


def _as_pixels(x: Tensor) -> Tensor:
    return x if x.dtype == torch.uint8 else (x * 255).round().to(torch.uint8)


def preprocess_for(source: Any, record: Mapping[str, Any], given: Preprocess | None = None) -> Preprocess:
    """How a source becomes inputs: as its `Features` were made, as given, as a network's record says, or as it is."""
    if isinstance(source, Features):
        return source.preprocess
    recorded = record.get("preprocess")
    return given or (Preprocess(shape_of_inputs(source)) if recorded is None else Preprocess.from_record(recorded))


def shape_of_inputs(source: Any) -> tuple[int, ...]:
    """The shape (D, H, W) of one input of a source, without reading all of it."""
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
            "PIL images and files do not determine the network's input size: pass preprocess=Preprocess((D, H, W)), or "
            "--size to a command"
        )
    shape = tuple(first.shape)
    if isinstance(first, Tensor) and len(shape) == 3 and shape[2] in (1, 3, 4) and shape[0] > 4:
        raise InputError(
            f"images must be tensors (D, H, W), channels first; got {shape}: pass x.permute(0, 3, 1, 2), or an array; "
            f"if {shape[0]} is the number of channels, pass preprocess=Preprocess({shape})"
        )
    if isinstance(first, np.ndarray) and len(shape) == 2 and first.dtype == np.uint8:
        return (1, *shape)  # a gray image; floating point numbers are a signal
    if isinstance(first, np.ndarray) and len(shape) == 3 and shape[0] > shape[2]:
        return (shape[2], shape[0], shape[1])  # arrays are channels last
    return shape


def _raw(source: Any, size: int) -> Iterator[tuple[Any, Any]]:
    if isinstance(source, ImageSet):
        parts = source.labels.split(size) if source.labels is not None else itertools.repeat(None)
        yield from zip(source.images.split(size), parts)  # noqa: B905 -- repeat(None) has no end
    elif _is_array(source):
        if (dense("images", source) if isinstance(source, Tensor) else source).ndim == 0:
            raise InputError("images must be (B, D, H, W) or a list of images; got a single number")
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


def names_of(source: Any) -> tuple[str, ...]:
    """The names of the images of a source, if they are files; otherwise none."""
    if isinstance(source, StreamedSet):
        return source.store.names
    if isinstance(source, (str, os.PathLike)):
        return (os.fspath(source),)
    return tuple(map(os.fspath, source)) if _is_files(source) else ()


def _count(source: Any) -> int | None:
    """The number of images of a source, if it is known."""
    if isinstance(source, (Image.Image, str, os.PathLike)):
        return 1
    try:
        return len(getattr(source, "dataset", source))
    except (TypeError, RuntimeError):  # a single number, a nested tensor: refused when they are read
        return None


def _is_files(source: Any) -> bool:
    """Whether threads may decode it; other sources may run the user's own code, which need not be thread-safe."""
    if isinstance(source, StreamedSet):
        return isinstance(source.store, Files)
    return isinstance(source, (list, tuple)) and all(isinstance(item, (str, os.PathLike)) for item in source)


def _read_ahead(
    source: Any, preprocess: Preprocess, size: int, nan: bool
) -> Iterator[tuple[list[Any], list[Any] | None]]:
    def read(index: int) -> tuple[Tensor, Any]:
        image, label = image_and_label(source[index])
        return preprocess(image, nan=nan), label

    tasks = (functools.partial(read, index) for index in range(len(source)))
    yield from _gather(in_order(tasks, ahead=2 * size), size)


def _gather(items: Iterable[Any], size: int) -> Iterator[tuple[list[Any], list[Any] | None]]:
    iterator = iter(items)
    while chunk := [image_and_label(item) for item in itertools.islice(iterator, size)]:
        labels = [label for _, label in chunk]
        yield [image for image, _ in chunk], labels if all(label is not None for label in labels) else None


def image_and_label(item: Any) -> tuple[Any, Any]:
    """An item or a batch as (images, labels), from a pair, a mapping or the image alone."""
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


def _stack(images: list[Tensor]) -> Tensor:
    """One batch; uint8 images among floating point ones are scaled, which torch.stack would not do."""
    if len({image.dtype for image in images}) > 1:
        images = [to_unit(image, torch.float64) if image.dtype == torch.uint8 else image for image in images]
    return torch.stack(images)


def _class_numbers(labels: Any, n: int) -> Tensor | None:
    """The labels of a batch as int64 (n,), or None if there are none; -1 marks images without a label."""
    if labels is None:
        return None
    try:
        numbers = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):  # strings, mappings, rows of different lengths
        numbers = torch.zeros(())
    if numbers.shape != (n,) or numbers.is_floating_point() or numbers.is_complex():
        raise InputError(
            f"labels must be one whole number per image, ({n},); got {shape_of(labels)}: pass images alone, or with "
            "class numbers"
        )
    return None if bool((numbers < 0).all()) else numbers.long()


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))
