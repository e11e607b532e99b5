"""StreamedSet: images that stay on disk and are decoded one by one."""

import functools
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from PIL import Image
from torch import Tensor

from kedge.checks import one_of, shape_of
from kedge.data.decoding import open_image
from kedge.data.imageset import ImageSet, split_indices
from kedge.data.preprocess import Preprocess
from kedge.errors import InputError, KedgeWarning

ON_ERROR = ("refuse", "skip")
SMALL_SIDE = 64  # pixels; `settled` reads sets of images up to this size ...
SMALL_BYTES = 2**30  # ... and up to this size in all into memory
_GRAY = ("1", "L", "LA", "I", "F")


class _MixedSizesError(InputError):
    """Images of several sizes do not fit into one tensor."""


class Store(Protocol):
    """Encoded images by number, such as the files of a folder or the values of a database."""

    @property
    def names(self) -> tuple[str, ...]:
        """One name per image, relative to the store."""

    def stream(self, index: int) -> BinaryIO:
        """The encoded image as an open file."""

    def size(self, index: int) -> int:
        """The number of bytes of the encoded image."""

    def pick(self, indices: Sequence[int]) -> "Store":
        """The same store with only these images."""


@dataclass(frozen=True)
class Files:
    """Image files in a folder, by their relative names with forward slashes.

    Example:
        >>> Files(Path("photos"), ("cat/1.jpg", "dog/2.jpg")).pick([1]).names
        ('dog/2.jpg',)
    """

    root: Path
    names: tuple[str, ...]

    def stream(self, index: int) -> BinaryIO:
        """Open the file."""
        return (self.root / self.names[index]).open("rb")

    def size(self, index: int) -> int:
        """The file's size on disk."""
        return (self.root / self.names[index]).stat().st_size

    def pick(self, indices: Sequence[int]) -> "Files":
        """Only these files."""
        return replace(self, names=tuple(self.names[i] for i in indices))


@dataclass(frozen=True, eq=False)
class StreamedSet:
    """A named set of images on disk, for images too large or too many for an `ImageSet`.

    It is a map-style torch Dataset: ``set[i]`` gives a PIL image (a uint8 tensor with ``preprocess``) and its label, -1
    if it has none. An image that cannot be decoded raises an `InputError` with its name; `readable` leaves such images
    out beforehand.

    Args:
        store: The encoded images, such as `Files`.
        labels: (N,) whole numbers, -1 for images without a label.
        name: Name of the set.
        classes: Names of the classes; labels must lie within them.
        preprocess: Applied to each image on access.
        skipped: The images that `readable` left out, and why.

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
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.labels is None:
            return
        if self.labels.shape != (len(self),) or self.labels.is_floating_point():
            raise InputError(
                f"labels must be one whole number per image, ({len(self)},); got {self.labels.dtype} "
                f"{shape_of(self.labels)} in the set {self.name!r}"
            )
        labels = self.labels.long()
        outside = (labels < -1) | (labels >= len(self.classes)) if self.classes else labels < -1
        if bool(outside.any()):
            first = int(outside.nonzero()[0])
            top = len(self.classes) - 1 if self.classes else "any class"
            raise InputError(
                f"labels must lie in -1 (none) to {top}; {self.store.names[first]} in the set {self.name!r} "
                f"has {int(labels[first])}"
            )
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.store.names)

    def __getitem__(self, index: int) -> tuple[Image.Image | Tensor, int]:
        image = self.image(index)
        label = -1 if self.labels is None else int(self.labels[index])
        return image if self.preprocess is None else self.preprocess(image), label

    def image(self, index: int) -> Image.Image:
        """Decode one image, without preprocessing."""
        name = self.store.names[index]
        try:
            stream = self.store.stream(index)
        except OSError as error:
            raise InputError(f"{name} in the set {self.name!r} cannot be opened: {error.strerror or error}") from error
        with stream:
            return open_image(stream, name=f"{name} in the set {self.name!r}")

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the sorted names, sizes in bytes and labels of the images; their pixels are not read."""
        labels = [-1] * len(self) if self.labels is None else self.labels.tolist()
        lines = sorted(f"{name}\t{self.store.size(i)}\t{labels[i]}\n" for i, name in enumerate(self.store.names))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def subset(self, indices: Tensor | Sequence[int], *, name: str | None = None) -> "StreamedSet":
        """The images at ``indices``, in that order, or those where a mask is true; nothing is read."""
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool:
            if chosen.shape != (len(self),):
                raise InputError(f"a mask must have one value per image, ({len(self)},); got {tuple(chosen.shape)}")
            chosen = chosen.nonzero()[:, 0]
        order = chosen.long()
        labels = None if self.labels is None else self.labels[order]
        return replace(self, store=self.store.pick(order.tolist()), labels=labels, name=name or self.name)

    def split(self, fraction: float, *, seed: int = 0) -> tuple["StreamedSet", "StreamedSet"]:
        """Shuffle and cut in two: the first part holds ``fraction`` of the images."""
        first, rest = split_indices(len(self), fraction, seed)
        return self.subset(first), self.subset(rest)

    def readable(self) -> "StreamedSet":
        """The images that can be decoded: each is read once, and a warning lists the others (see ``skipped``)."""
        good, bad = [], []
        for index in range(len(self)):
            try:
                self.image(index)
            except InputError as error:
                bad.append(str(error))
            else:
                good.append(index)
        if not bad:
            return self
        if not good:
            raise InputError(f"none of the {len(self)} images of the set {self.name!r} can be read; first: {bad[0]}")
        noun = "image was" if len(bad) == 1 else "images were"
        warnings.warn(f"{len(bad)} {noun} skipped: {'; '.join(bad)}", KedgeWarning, stacklevel=2)
        return replace(self.subset(good), skipped=(*self.skipped, *bad))

    def to_memory(self, preprocess: Preprocess | None = None) -> ImageSet:
        """Decode every image into an `ImageSet`; without ``preprocess`` they must all be of one size."""
        if not len(self):
            raise InputError(f"the set {self.name!r} is empty")
        rule = preprocess or self.preprocess or self._common_size()
        images = torch.empty((len(self), *rule.shape), dtype=torch.uint8)
        for index in range(len(self)):
            images[index] = rule(self.image(index))
        return ImageSet(images, self.labels, self.name, self.classes)

    def header(self, index: int) -> tuple[tuple[int, int], bool]:
        """The (width, height) of an image and whether it is gray, without decoding it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with self.store.stream(index) as stream, Image.open(stream) as image:
                    return image.size, image.mode.split(";")[0] in _GRAY
        except Exception:  # whatever is wrong with it, decoding raises an error with the file's name
            decoded = self.image(index)
            return decoded.size, decoded.mode in _GRAY

    def _common_size(self) -> Preprocess:
        size, gray = self.header(0)
        for index in range(1, len(self)):
            other, other_gray = self.header(index)
            gray = gray and other_gray
            if other != size:
                names = self.store.names
                raise _MixedSizesError(
                    f"images in memory must be of one size; {names[0]} of the set {self.name!r} is "
                    f"{size[0]} x {size[1]} and {names[index]} is {other[0]} x {other[1]}: "
                    "pass to_memory(Preprocess((3, H, W))), or use the streamed set as it is"
                )
        return Preprocess((1 if gray else 3, size[1], size[0]))


def settled(images: StreamedSet, on_error: str = "refuse") -> ImageSet | StreamedSet:
    """Read a set into memory if its images are small and of one size; otherwise return it as it is.

    Args:
        images: The set on disk.
        on_error: ``"refuse"`` an image that cannot be decoded with an error, or ``"skip"`` it with a warning.
    """
    one_of("on_error", on_error, ON_ERROR)
    if on_error == "skip":
        images = images.readable()
    if not len(images):
        return images
    first, _ = images.header(0)
    if max(first) > SMALL_SIDE or len(images) * 3 * first[0] * first[1] > SMALL_BYTES:
        return images
    try:
        return images.to_memory()
    except _MixedSizesError:
        return images
