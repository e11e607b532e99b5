"""StreamedSet: images that stay on disk and are decoded one by one."""

import functools
import hashlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol, overload

import torch
from PIL import Image
from torch import Tensor

from kedge.checks import one_of
from kedge.data.decoding import open_image
from kedge.data.imageset import ImageSet, Splittable, check_labels, labels_in_words
from kedge.data.preprocess import Preprocess
from kedge.data.reading import in_order
from kedge.display import counted
from kedge.errors import InputError, KedgeWarning
from kedge.files import regular_file

ON_ERROR = ("raise", "skip")
SMALL_SIDE = 64  # pixels; `in_memory_if_small` reads sets of images up to this size ...
SMALL_BYTES = 2**30  # ... and up to this size in all into memory
_GRAY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F")


class _MixedSizesError(InputError):
    """Images of several sizes do not fit into one tensor."""


class Store(Protocol):
    """Encoded images by number, such as the files of a folder or the values of a database; a frozen dataclass."""

    @property
    def names(self) -> tuple[str, ...]:
        """One name per image, relative to the store."""

    def stream(self, index: int) -> BinaryIO:
        """The encoded image as an open file."""

    def size(self, index: int) -> int:
        """The number of bytes of the encoded image."""


@dataclass(frozen=True)
class Files:
    """Image files in a folder, by their relative names with forward slashes."""

    root: Path
    names: tuple[str, ...]

    def stream(self, index: int) -> BinaryIO:
        """Open the file, if it is a regular one."""
        return regular_file(self.root / self.names[index]).open("rb")

    def size(self, index: int) -> int:
        """The file's size on disk."""
        return (self.root / self.names[index]).stat().st_size


@dataclass(frozen=True, eq=False, repr=False)
class StreamedSet(Splittable):
    """A named set of images on disk, for images too large or too many for an `ImageSet`.

    It is a map-style torch Dataset: ``set[i]`` gives a PIL image (a uint8 tensor with ``preprocess``) and its label, -1
    if it has none; ``set[:100]`` gives a set of the first hundred.

    Args:
        store: The encoded images, such as `Files`.
        labels: (N,) whole numbers, -1 for images without a label.
        name: Name of the set.
        classes: Names of the classes; labels must lie within them.
        preprocess: Applied to each image on access.
        on_error: What ``set[i]`` does with an image that cannot be decoded: ``"raise"`` an `InputError` with its name,
            or ``"skip"`` to the next image that can, and list it in ``skipped``. The latter is for training, which
            would stop after hours otherwise; for anything else, `readable` leaves such images out beforehand.
        left_out: The images that `readable` left out, and why.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (40, 30)).save(folder / "black.png")
        >>> photos = StreamedSet(Files(folder, ("black.png",)), name="photos")
        >>> photos[0][0].size, photos[0][1]
        ((40, 30), -1)
        >>> photos.to_memory(Preprocess((3, 8, 8))).images.shape
        torch.Size([1, 3, 8, 8])
    """

    store: Store
    labels: Tensor | None = None
    name: str = "images"
    classes: tuple[str, ...] = ()
    preprocess: Preprocess | None = None
    on_error: str = "raise"
    left_out: tuple[str, ...] = ()
    _damaged: Tensor = field(init=False, repr=False)  # (N,) seen by all processes that read the set

    def __post_init__(self) -> None:
        one_of("on_error", self.on_error, ON_ERROR)
        if self.labels is not None:
            labels = check_labels(self.labels, len(self), self.classes, self.name, self.store.names)
            object.__setattr__(self, "labels", labels)
        damaged = torch.zeros(len(self), dtype=torch.bool) if self.on_error == "skip" else torch.zeros(0)
        object.__setattr__(self, "_damaged", damaged.share_memory_() if len(damaged) else damaged)

    def __len__(self) -> int:
        return len(self.store.names)

    def __repr__(self) -> str:
        return f"StreamedSet({self.name!r}, {counted(len(self), 'image')} on disk, {labels_in_words(self)})"

    @overload
    def __getitem__(self, index: int) -> tuple[Image.Image | Tensor, int]: ...
    @overload
    def __getitem__(self, index: slice) -> "StreamedSet": ...

    def __getitem__(self, index: int | slice) -> "tuple[Image.Image | Tensor, int] | StreamedSet":
        if isinstance(index, slice):
            return self._sliced(index)
        place = index
        if self.on_error == "skip":
            image, place = self._next_readable(index)
        else:
            image = self.image(index)
        label = -1 if self.labels is None else int(self.labels[place])
        return image if self.preprocess is None else self.preprocess(image), label

    def _next_readable(self, index: int) -> tuple[Image.Image, int]:
        """The image at ``index``, or the next one that can be decoded, and its index."""
        start = range(len(self))[index]
        for place in itertools.chain(range(start, len(self)), range(start)):
            if not self._damaged[place]:
                try:
                    return self.image(place), place
                except InputError:
                    self._damaged[place] = True
        raise InputError(f"none of the {len(self)} images of the set {self.name!r} can be read")

    def image(self, index: int) -> Image.Image:
        """Decode one image, without preprocessing."""
        name = f"{self.store.names[index]} in the set {self.name!r}"
        try:
            stream = self.store.stream(index)
        except (OSError, InputError) as error:
            raise InputError(f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
        with stream:
            return open_image(stream, name=name)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The images that were left out, or skipped so far by any process that reads this set, and why."""
        reasons = (self._problem(index) for index in self._damaged.nonzero()[:, 0].tolist())
        return (*self.left_out, *(reason for reason in reasons if reason))

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the sorted names, sizes in bytes and labels of the images; their pixels are not read."""
        labels = [-1] * len(self) if self.labels is None else self.labels.tolist()
        lines = sorted(f"{name}\t{self.store.size(i)}\t{labels[i]}\n" for i, name in enumerate(self.store.names))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def subset(self, indices: Tensor | Sequence[int], *, name: str | None = None) -> "StreamedSet":
        """The images at ``indices``, in that order, or those where a mask is true; nothing is read."""
        chosen = self._chosen(indices)
        labels = None if self.labels is None else self.labels[chosen]
        names = tuple(self.store.names[i] for i in chosen.tolist())
        store: Store = replace(self.store, names=names)  # type: ignore[type-var]
        return replace(self, store=store, labels=labels, name=name or self.name)

    def readable(self) -> "StreamedSet":
        """The images that can be decoded: each is read once, and a warning lists the others (see ``skipped``)."""
        tasks = (functools.partial(self._problem, index) for index in range(len(self)))
        workers = None if isinstance(self.store, Files) else 1
        problems = list(in_order(tasks, ahead=64, workers=workers))
        bad = [problem for problem in problems if problem]
        if not bad:
            return self
        if len(bad) == len(self):
            raise InputError(f"none of the {len(self)} images of the set {self.name!r} can be read; first: {bad[0]}")
        noun = "image was" if len(bad) == 1 else "images were"
        warnings.warn(f"{len(bad)} {noun} skipped: {'; '.join(bad)}", KedgeWarning, stacklevel=2)
        good = self.subset([index for index, problem in enumerate(problems) if not problem])
        return replace(good, left_out=(*self.left_out, *bad))

    def to_memory(self, preprocess: Preprocess | None = None) -> ImageSet:
        """Decode every image into an `ImageSet`; without ``preprocess`` they must all be of one size."""
        if not len(self):
            raise InputError(f"the set {self.name!r} is empty")
        rule = preprocess or self.preprocess
        if rule is not None:
            images = torch.stack([rule(self.image(index)) for index in range(len(self))])
        else:
            pictures = list(self._of_one_size())
            gray = all(picture.mode in _GRAY for picture in pictures)
            rule = Preprocess((1 if gray else 3, pictures[0].height, pictures[0].width))
            images = torch.stack([rule(picture) for picture in pictures])
        return ImageSet(images, self.labels, self.name, self.classes)

    def _of_one_size(self) -> Iterator[Image.Image]:
        size, names = None, self.store.names
        for index in range(len(self)):
            image = self.image(index)
            size = size or image.size
            if image.size != size:
                raise _MixedSizesError(
                    f"images in memory must be of one size; {names[0]} of the set {self.name!r} is "
                    f"{size[0]} x {size[1]} and {names[index]} is {image.width} x {image.height}: "
                    "pass to_memory(Preprocess((3, H, W))), or use the streamed set as it is"
                )
            yield image

    def _problem(self, index: int) -> str:
        """Why an image cannot be decoded; empty if it can."""
        try:
            self.image(index)
        except InputError as error:
            return str(error)
        return ""


def in_memory_if_small(images: StreamedSet, on_error: str = "raise") -> ImageSet | StreamedSet:
    """Read a set into memory if its images are small and of one size; otherwise return it as it is.

    Args:
        images: The set on disk.
        on_error: ``"raise"`` an error for an image that cannot be decoded, or ``"skip"`` it with a warning.
    """
    if one_of("on_error", on_error, ON_ERROR) == "skip":
        images = images.readable()
    if not len(images):
        return images
    first = images.image(0).size
    if max(first) > SMALL_SIDE or len(images) * 3 * first[0] * first[1] > SMALL_BYTES:
        return images
    try:
        return images.to_memory()
    except _MixedSizesError:
        return images
