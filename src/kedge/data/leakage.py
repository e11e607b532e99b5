"""Images recognized by their pixels: shared between sets, or divided into halves that share none."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.data.batches import batches
from kedge.data.features import Features
from kedge.data.preprocess import Preprocess
from kedge.errors import InputError


def fingerprints(images: Tensor) -> Tensor:
    """A hash of each image's pixels at 8 bits, or of a vector or signal as it is, (N, 16) uint8."""
    pixels = images
    if images.ndim == 4 and images.dtype != torch.uint8:
        pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    if len(pixels) == 0:
        return torch.empty(0, 16, dtype=torch.uint8)
    rows = pixels.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()  # NumPy has no bfloat16
    digests = b"".join(hashlib.blake2b(row, digest_size=16).digest() for row in rows)
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 16)


def shared(ours: Tensor, theirs: Tensor) -> Tensor:
    """The positions in ``theirs`` of images that are in ``ours`` too; both are `fingerprints`."""
    seen = {bytes(row) for row in ours.numpy()}
    positions = [i for i, row in enumerate(theirs.numpy()) if bytes(row) in seen]
    return torch.tensor(positions, dtype=torch.long)


class Half(NamedTuple):
    """Images (N, D, ...), or their `Features`; their labels (N,), -1 for none; and their fingerprints."""

    images: Any
    labels: Tensor
    prints: Tensor


def even(prints: Tensor) -> Tensor:
    """Which of images with fingerprints (N, 16) belong to the first half, (N,): about half of them."""
    return prints[:, 0] % 2 == 0


def smallest_prints(prints: Tensor, count: int) -> Tensor:
    """Which of images with fingerprints (N, 16) have the ``count`` smallest, (N,); more where equal images follow."""
    numbers = prints[:, :8].contiguous().view(torch.int64)[:, 0]
    return numbers <= numbers.sort().values[count - 1]


def halves(
    held_out: Any, preprocess: Preprocess, why: str, first_of: Callable[[Tensor], Tensor] = even
) -> tuple[Half, Half]:
    """Divide images by their pixels: independent of their order, and equal images come into the same half.

    ``why`` is the reason for two parts, for the error if there are too few images; ``first_of`` chooses the first by
    the fingerprints, half of them by default.
    """
    if isinstance(held_out, Features):
        y, marks = held_out.labels, held_out.prints
        y = torch.full((len(held_out),), -1) if y is None else y
    else:
        images, labels, prints = [], [], []
        for x, classes in batches(held_out, preprocess):
            images.append(x)
            labels.append(torch.full((len(x),), -1) if classes is None else classes)
            prints.append(fingerprints(x))
        pixels, y, marks = torch.cat(images), torch.cat(labels), torch.cat(prints)
    first = first_of(marks)
    if not 0 < int(first.sum()) < len(first):
        raise InputError(f"held_out must have images enough for two halves, since {why}; got {len(first)}")
    taken = held_out.subset if isinstance(held_out, Features) else pixels.__getitem__
    return Half(taken(first), y[first], marks[first]), Half(taken(~first), y[~first], marks[~first])
