"""Leakage: images that must be strangers to a test set, found in it by their pixels."""

import hashlib

import torch
from torch import Tensor


def fingerprints(images: Tensor) -> Tensor:
    """A hash of each image's pixels at 8 bits, (N, 16) uint8; the same for uint8 images and floats in [0, 1].

    Vectors and signals are hashed as they are.

    Example:
        >>> image = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
        >>> bool((fingerprints(image) == fingerprints(image / 255)).all())
        True
    """
    pixels = images
    if images.ndim == 4 and images.dtype != torch.uint8:
        pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    if len(pixels) == 0:
        return torch.empty(0, 16, dtype=torch.uint8)
    rows = pixels.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()  # NumPy has no bfloat16
    digests = [list(hashlib.blake2b(row.tobytes(), digest_size=16).digest()) for row in rows]
    return torch.tensor(digests, dtype=torch.uint8).view(len(digests), 16)


def shared(ours: Tensor, theirs: Tensor) -> Tensor:
    """The positions in ``theirs`` of images that are in ``ours`` too, both as fingerprints.

    Example:
        >>> a = fingerprints(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1))
        >>> shared(a[:2], a[1:4])
        tensor([0])
    """
    known = {bytes(row) for row in ours.numpy()}
    found = [i for i, row in enumerate(theirs.numpy()) if bytes(row) in known]
    return torch.tensor(found, dtype=torch.long)
