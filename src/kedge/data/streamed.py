"""StreamedSet: images that stay on disk until they are asked for."""

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

from kedge.checks import between, one_of, shape_of
from kedge.data.decoding import open_image
from kedge.data.imageset import ImageSet
from kedge.data.preprocess import Preprocess
from kedge.errors import InputError, KedgeWarning

ON_ERROR = ("refuse", "skip")
SMALL_SIDE = 64  # images up to this size ...
SMALL_BYTES = 2**30  # ... and sets up to this size are read into memory by `load`
_GREY = ("1", "L", "LA", "I", "F")


class _MixedSizesError(InputError):
    """Images of several sizes do not fit into one tensor."""


class Store(Protocol):
    """Where encoded images lie: a folder, a database."""

    @property
    def names(self) -> tuple[str, ...]:
        """One per image, relative to the store."""

    def stream(self, index: int) -> BinaryIO:
        """The bytes of an image."""

    def size(self, index: int) -> int:
        """How many bytes these are."""

    def pick(self, indices: Sequence[int]) -> "Store":
        """The same store with some of its images."""


@dataclass(frozen=True)
class Files:
    """Image files under a folder, by their relative names with forward slashes.

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
        """Its size on disk."""
        return (self.root / self.names[index]).stat().st_size

    def pick(self, indices: Sequence[int]) -> "Files":
        """Some of the files."""
        return replace(self, names=tuple(self.names[i] for i in indices))


@dataclass(frozen=True, eq=False)
class StreamedSet:
    """A named set of images on disk, decoded one by one: for images too large or too many for an `ImageSet`.

    It is a map-style torch Dataset: ``set[i]`` gives a PIL image (a uint8 tensor with ``preprocess``) and its label, -1
    where it has none. An image that cannot be decoded raises an `InputError` with its name; `readable` leaves such
    images out beforehand.

    Args:
        store: Where the images lie, such as `Files`.
        labels: (N,) whole numbers, -1 for images without a label.
        name: Of the set.
        classes: Their names; labels must lie within them.
        preprocess: Applied to every image that is taken out.
        skipped: What `readable` left out, and why.

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
        """Decode one image, as it is."""
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
        """The images at ``indices``, in that order, or those where a mask is true; nothing is read.

        Example:
            >>> StreamedSet(Files(Path("photos"), ("1.jpg", "2.jpg"))).subset([1]).store.names
            ('2.jpg',)
        """
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool:
            if chosen.shape != (len(self),):
                raise InputError(f"a mask must have one value per image, ({len(self)},); got {tuple(chosen.shape)}")
            chosen = chosen.nonzero()[:, 0]
        order = chosen.long().tolist()
        labels = None if self.labels is None else self.labels[chosen.long()]
        return replace(self, store=self.store.pick(order), labels=labels, name=name or self.name)

    def split(self, fraction: float, *, seed: int = 0) -> tuple["StreamedSet", "StreamedSet"]:
        """Shuffle and cut in two: the first part holds ``fraction`` of the images.

        Example:
            >>> photos = StreamedSet(Files(Path("photos"), tuple("abcde")))
            >>> [len(part) for part in photos.split(0.8)]
            [4, 1]
        """
        between("fraction", fraction, 0, 1, open_ends=True)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        cut = round(fraction * len(self))
        return self.subset(order[:cut]), self.subset(order[cut:])

    def readable(self) -> "StreamedSet":
        """The images that can be decoded: each is read once, and a warning names what is left out (see ``skipped``).

        Example:
            >>> StreamedSet(Files(Path("photos"), ())).readable().skipped
            ()
        """
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
        """Decode every image into an `ImageSet`; without ``preprocess`` they must all be of one size.

        Example:
            >>> StreamedSet(Files(Path("photos"), ())).to_memory(Preprocess((3, 8, 8)))
            Traceback (most recent call last):
            kedge.errors.InputError: the set 'images' is empty
        """
        if not len(self):
            raise InputError(f"the set {self.name!r} is empty")
        rule = preprocess or self.preprocess or self._own_size()
        images = torch.empty((len(self), *rule.shape), dtype=torch.uint8)
        for index in range(len(self)):
            images[index] = rule(self.image(index))
        return ImageSet(images, self.labels, self.name, self.classes)

    def header(self, index: int) -> tuple[tuple[int, int], bool]:
        """The (width, height) of an image and whether it is grey, without decoding it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with self.store.stream(index) as stream, Image.open(stream) as image:
                    return image.size, image.mode.split(";")[0] in _GREY
        except Exception:  # whatever is wrong with it, decoding gives the error with the file's name
            decoded = self.image(index)
            return decoded.size, decoded.mode in _GREY

    def _own_size(self) -> Preprocess:
        size, grey = self.header(0)
        for index in range(1, len(self)):
            other, other_grey = self.header(index)
            grey = grey and other_grey
            if other != size:
                names = self.store.names
                raise _MixedSizesError(
                    f"images in memory must be of one size; {names[0]} of the set {self.name!r} is "
                    f"{size[0]} x {size[1]} and {names[index]} is {other[0]} x {other[1]}: "
                    "pass to_memory(Preprocess((3, H, W))), or use the set as it is, streamed"
                )
        return Preprocess((1 if grey else 3, size[1], size[0]))


def settled(images: StreamedSet, on_error: str = "refuse") -> ImageSet | StreamedSet:
    """Read a set into memory where its images are small and of one size; leave it streamed otherwise.

    Args:
        images: The set as it lies on disk.
        on_error: ``"refuse"`` an image that cannot be decoded with an error, or ``"skip"`` it with a warning.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> Image.new("L", (28, 28)).save(folder / "black.png")
        >>> settled(StreamedSet(Files(folder, ("black.png",)))).images.shape
        torch.Size([1, 1, 28, 28])
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
