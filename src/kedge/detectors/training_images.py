"""Fingerprints of the images of `Detector.fit`, by which `Detector.calibrate` refuses them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.anchoring.sampling import choose, is_sized
from kedge.data import ImageSet, Preprocess, batches
from kedge.data.features import Features
from kedge.data.leakage import fingerprints
from kedge.errors import InputError

KEPT = 2**14  # fingerprints that are kept, 8 bytes each
READ = 256  # images that are read for their fingerprints alone, where the method reads none
SHARED = 0.005  # held-out images that may equal training images; real sets have duplicates


def training_prints(
    train_set: Any, preprocess: Preprocess, read: Sequence[Tensor], tuned: Tensor | None = None
) -> Tensor:
    """Fingerprints as numbers (N,) of images that a method has ``read``, or of some training images if it read none.

    The smallest are kept: a random sample that does not depend on the order of the images. All of those that options
    were ``tuned`` on (M, 16) are added.
    """
    if tuned is not None:
        read_and_tuned: Tensor = torch.cat([training_prints(train_set, preprocess, read), _numbers(tuned)]).unique()
        return read_and_tuned
    if isinstance(train_set, Features):
        read = [train_set.prints]
    if not read and isinstance(train_set, Iterator):  # it may be read only once
        return torch.empty(0, dtype=torch.int64)
    if not read and not is_sized(train_set):
        read = [fingerprints(next(batches(train_set, preprocess))[0])]
    if not read:
        count = KEPT // 4 if isinstance(train_set, (Tensor, np.ndarray, ImageSet)) else READ
        read = [fingerprints(choose(train_set, preprocess, count, "random", seed=0, at_least=1))]
    smallest: Tensor = _numbers(torch.cat(list(read))).unique()[:KEPT]
    return smallest


def refuse_training_images(held_out: Tensor, fitted_on: Tensor) -> None:
    """Raise if held-out images, by their fingerprints (N, 16), are among those of `training_prints`."""
    shared = int(torch.isin(_numbers(held_out), fitted_on).sum())
    if shared > SHARED * min(len(held_out), len(fitted_on)):
        raise InputError(
            f"held_out must not hold images that the detector was fitted on; at least {shared} of {len(held_out)} are "
            "such, or its options were chosen on them, and the threshold would be too low for others: hold images out "
            "before fit, as train_set, held_out = images.split(0.9)"
        )


def _numbers(prints: Tensor) -> Tensor:
    """Half of each fingerprint (N, 16) as a number of 64 bits, (N,)."""
    return prints[:, :8].contiguous().view(torch.int64)[:, 0]
