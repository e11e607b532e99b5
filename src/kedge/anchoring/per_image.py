"""Anchors of an image's own, chosen by its pixels, so that its score does not depend on its batch."""

import hashlib

import torch
from torch import Tensor

from kedge.seeds import mix_seed


def choose_per_image(x: Tensor, anchors: int, k: int, seed: int) -> Tensor:
    """Choose k of so many anchors for each image by a hash of its pixels: (k, B).

    Example:
        >>> image = torch.rand(1, 3, 4, 4)
        >>> bool((choose_per_image(image, 50, 5, 0) == choose_per_image(image, 50, 5, 0)).all())
        True
    """
    pixels = x if x.dtype == torch.uint8 else (x * 255).round().to(torch.int32)  # 8-bit images hash alike as floats
    pixels = pixels.to(torch.int32).cpu().flatten(1)
    chosen = []
    for row in pixels:
        digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(mix_seed(seed, int.from_bytes(digest, "little")))
        chosen.append(torch.randperm(anchors, generator=generator)[:k])
    return torch.stack(chosen, dim=1)
