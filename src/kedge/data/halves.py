"""Held-out images in two halves, for what learns from one and is judged by the other."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.data.batches import batches
from kedge.data.leakage import fingerprints
from kedge.data.preprocess import Preprocess
from kedge.errors import InputError


class Half(NamedTuple):
    """Images (N, D, ...), their labels (N,), -1 where there is none, and their fingerprints."""

    images: Tensor
    labels: Tensor
    prints: Tensor


def halves(held_out: Any, preprocess: Preprocess, why: str) -> tuple[Half, Half]:
    """Split images by their pixels: the halves do not depend on the order, and equal images come into one.

    Args:
        held_out: In any form that `kedge.data.batches` takes.
        preprocess: How they become inputs.
        why: Who needs two halves, for the error where there are too few images.

    Example:
        >>> one, other = halves(torch.rand(20, 3, 2, 2), Preprocess((3, 2, 2)), "an example needs them")
        >>> len(one.images) + len(other.images)
        20
    """
    images, labels, prints = [], [], []
    for x, y in batches(held_out, preprocess):
        images.append(x)
        labels.append(torch.full((len(x),), -1) if y is None else y)
        prints.append(fingerprints(x))
    x, y, marks = torch.cat(images), torch.cat(labels), torch.cat(prints)
    mine = marks[:, 0] % 2 == 0
    if not 0 < int(mine.sum()) < len(mine):
        raise InputError(f"held_out must have images enough for two halves, since {why}; got {len(mine)}")
    return Half(x[mine], y[mine], marks[mine]), Half(x[~mine], y[~mine], marks[~mine])
