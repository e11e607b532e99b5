"""ImageSet: images, labels and a name, in memory."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.checks import between, shape_of
from kedge.errors import InputError


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A named set of uint8 images (N, D, H, W), with int64 labels (N,) if it has any.

    It is also a map-style torch Dataset: ``set[i]`` gives the image and its label (-1 without labels).

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
        if self.labels is None:
            return
        if not isinstance(self.labels, Tensor):
            raise InputError(
                f"labels must be a tensor, got {type(self.labels).__name__} in the set {self.name!r}; "
                "ImageSet.from_arrays converts others"
            )
        if self.labels.shape != (len(self.images),):
            raise InputError(
                f"labels must be one per image, ({len(self.images)},); got {tuple(self.labels.shape)} "
                f"in the set {self.name!r}"
            )
        if self.labels.is_floating_point() or self.labels.is_complex():
            raise InputError(f"labels must be whole numbers, got {self.labels.dtype} in the set {self.name!r}")
        object.__setattr__(self, "labels", self.labels.long())

    @classmethod
    def from_arrays(
        cls, images: Any, labels: Any = None, *, name: str = "images", classes: Sequence[str] = ()
    ) -> "ImageSet":
        """Build a set from uint8 arrays (N, H, W) or (N, H, W, D), the layout of image files.

        Example:
            >>> ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8)).images.shape
            torch.Size([5, 1, 8, 8])
        """
        array = np.asarray(images)
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise InputError(f"images must be uint8 (N, H, W) or (N, H, W, D), got {array.dtype} {shape_of(array)}")
        if array.ndim == 3:
            array = array[..., None]
        tensor = torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))  # (N, D, H, W)
        return cls(tensor, None if labels is None else torch.as_tensor(np.asarray(labels)), name, tuple(classes))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], -1 if self.labels is None else int(self.labels[index])

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the shape, the pixels and the labels."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.contiguous().numpy().tobytes())
        if self.labels is not None:
            digest.update(self.labels.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def subset(self, indices: Tensor | Sequence[int], *, name: str | None = None) -> "ImageSet":
        """The images at ``indices``, in that order, or those where a mask is true."""
        chosen = torch.as_tensor(indices)
        if chosen.dtype != torch.bool:
            chosen = chosen.long()
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, images=self.images[chosen], labels=labels, name=name or self.name)

    def split(self, fraction: float, *, seed: int = 0) -> tuple["ImageSet", "ImageSet"]:
        """Shuffle and cut in two: the first part holds ``fraction`` of the images."""
        first, rest = split_indices(len(self), fraction, seed)
        return self.subset(first), self.subset(rest)


def split_indices(n: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of n images, shuffled and cut in two."""
    between("fraction", fraction, 0, 1, open_ends=True)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: round(fraction * n)], order[round(fraction * n) :]
