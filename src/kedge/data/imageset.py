"""ImageSet: images, labels and a name, in memory."""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, overload

import numpy as np
import torch
from torch import Tensor

from kedge.checks import between, shape_of
from kedge.display import counted, html_facts
from kedge.errors import InputError
from kedge.pixels import dense

MOST_CLASSES = 2**20  # a larger label is a mistake, and would need as many counts or outputs


class Splittable(ABC):
    """What sets of images in memory and on disk share."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def subset(self, indices: Tensor | Sequence[int], *, name: str | None = None) -> Self:
        """The images at ``indices``, in that order, or those where a mask is true."""

    def facts(self) -> Mapping[str, Any]:
        """What a notebook shows."""
        classes: Sequence[str] = getattr(self, "classes", ())
        named = (
            f"{len(classes)}: {', '.join(classes[:8])}{', ...' * (len(classes) > 8)}" if classes else "without names"
        )
        return {"set": repr(self), "classes": named}

    def split(self, fraction: float, *, seed: int = 0) -> tuple[Self, Self]:
        """Shuffle and cut in two: the first part holds ``fraction`` of the images."""
        between("fraction", fraction, 0, 1, open_ends=True)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        cut = round(fraction * len(self))
        return self.subset(order[:cut]), self.subset(order[cut:])

    def _repr_html_(self) -> str:
        return html_facts(self.facts())

    def _sliced(self, index: slice) -> Self:
        return self.subset(list(range(len(self))[index]))

    def _chosen(self, indices: Tensor | Sequence[int]) -> Tensor:
        """Indices or a mask as indices."""
        chosen = torch.as_tensor(indices)
        if chosen.dtype != torch.bool:
            return chosen.long()
        if chosen.shape != (len(self),):
            raise InputError(f"a mask must have one value per image, ({len(self)},); got {tuple(chosen.shape)}")
        return chosen.nonzero()[:, 0]


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet(Splittable):
    """A named set of uint8 images (N, D, H, W), with int64 labels (N,) if it has any, -1 for images without one.

    It is also a map-style torch Dataset: ``set[i]`` gives the image and its label (-1 without labels), and
    ``set[:100]`` a set of the first hundred.

    Example:
        >>> black = ImageSet(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), name="black")
        >>> first, rest = black.split(0.8)
        >>> len(first), len(rest), black[0][1]
        (8, 2, -1)
    """

    images: Tensor
    labels: Tensor | None = None
    name: str = "images"
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.images, Tensor) or self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise InputError(
                f"images must be a uint8 tensor (N, D, H, W), got {getattr(self.images, 'dtype', '')} "
                f"{shape_of(self.images)}; ImageSet.from_arrays converts other layouts"
            )
        dense("images", self.images)
        if self.labels is not None:
            object.__setattr__(self, "labels", check_labels(self.labels, len(self), self.classes, self.name))

    @classmethod
    def from_arrays(
        cls, images: Any, labels: Any = None, *, name: str = "images", classes: Sequence[str] = ()
    ) -> "ImageSet":
        """Build a set from uint8 arrays (N, H, W) or (N, H, W, D), the layout of image files."""
        array = np.asarray(images)
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise InputError(f"images must be uint8 (N, H, W) or (N, H, W, D), got {array.dtype} {shape_of(array)}")
        if array.ndim == 3:
            array = array[..., None]
        tensor = torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))  # (N, D, H, W)
        numbers = None if labels is None else np.asarray(labels)
        if numbers is not None and numbers.dtype.kind not in "biuf":
            raise InputError(f"labels must be whole numbers; got {numbers.dtype} in the set {name!r}")
        if numbers is not None:
            numbers = numbers.astype(numbers.dtype.newbyteorder("="))  # torch has no other byte order
        return cls(tensor, None if numbers is None else torch.as_tensor(numbers), name, tuple(classes))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images.shape[1:]))
        return f"ImageSet({self.name!r}, {counted(len(self), 'image')}, {shape}, {labels_in_words(self)})"

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...
    @overload
    def __getitem__(self, index: slice) -> "ImageSet": ...

    def __getitem__(self, index: int | slice) -> "tuple[Tensor, int] | ImageSet":
        if isinstance(index, slice):
            return self._sliced(index)
        return self.images[index], -1 if self.labels is None else int(self.labels[index])

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the shape, the pixels and the labels."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.contiguous().numpy().data)  # no copy: the pixels may be on disk
        if self.labels is not None:
            digest.update(self.labels.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def subset(self, indices: Tensor | Sequence[int], *, name: str | None = None) -> "ImageSet":
        """The images at ``indices``, in that order, or those where a mask is true."""
        chosen = self._chosen(indices)
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, images=self.images[chosen], labels=labels, name=name or self.name)


def labels_in_words(images: Any) -> str:
    """Whether a set has labels, and of how many classes."""
    if images.labels is None:
        return "no labels"
    count = len(images.classes) or int(images.labels.max()) + 1 if len(images) else 0
    return counted(count, "class", "classes")


def check_labels(labels: Any, n: int, classes: Sequence[str], name: str, files: Sequence[str] = ()) -> Tensor:
    """Labels (n,) as int64, if all are -1 (none) or the number of one of the classes.

    ``name`` is the set's name for errors, and ``files`` the names of its images, if they have names.
    """
    if not isinstance(labels, Tensor) or labels.shape != (n,) or labels.is_floating_point() or labels.is_complex():
        got = f"{getattr(labels, 'dtype', '')} {shape_of(labels)}".strip()
        raise InputError(f"labels must be a tensor of whole numbers, one per image, ({n},); got {got} in {name!r}")
    numbers = dense("labels", labels).long()
    most = len(classes) or MOST_CLASSES
    for first in ((numbers < -1) | (numbers >= most)).nonzero()[:1, 0].tolist():
        raise InputError(
            f"labels must lie in -1 (none) to {most - 1}; {int(numbers[first])} is the label of "
            f"{files[first] if files else f'image {first}'} in the set {name!r}: number the classes from 0 on"
        )
    return numbers
