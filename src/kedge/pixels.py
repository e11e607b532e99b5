"""Pixels: from uint8 to [0, 1], in one place."""

import torch
from torch import Tensor

from kedge.errors import InputError


def dense(name: str, values: Tensor) -> Tensor:
    """Return ``values`` if they are an ordinary tensor: every value in memory, and no floating point of 8 bits."""
    odd = {"nested": values.is_nested, "quantised": values.is_quantized, "meta": values.is_meta}
    odd[str(values.layout)] = values.layout != torch.strided
    odd[str(values.dtype)] = values.is_floating_point() and values.element_size() == 1
    if any(odd.values()):
        kind = next(kind for kind, holds in odd.items() if holds)
        raise InputError(f"{name} must be a dense tensor; got a {kind} one: pass x.to_dense() or x.float()")
    return values


def to_unit(images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Images in [0, 1]: uint8 divided by 255, as float32 or ``dtype``; floating point images are only cast to it.

    Example:
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    if images.dtype == torch.uint8:
        return images.to(dtype or torch.float32) / 255
    return images if dtype is None else images.to(dtype)
