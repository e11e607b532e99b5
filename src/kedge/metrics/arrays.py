"""Lists, arrays and tensors as checked NumPy arrays."""

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kedge.checks import shape_of
from kedge.errors import InputError

Numbers: TypeAlias = ArrayLike | Tensor


def as_array(name: str, values: Numbers) -> NDArray[Any]:
    """Convert a list, array or tensor (any device, with or without gradient) to a NumPy array of real numbers."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # NumPy has no bfloat16
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be an array of numbers, got {type(values).__name__}: {error}") from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} must hold real numbers, got dtype {array.dtype}; convert it to float")
    return array


def no_nan(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return the array if it holds no NaN."""
    if bad := int(np.count_nonzero(np.isnan(array))):
        raise InputError(f"{name} must not hold NaN; {bad} of {array.size} values are NaN: find out where they arise")
    return array


def score_per_image(name: str, values: Numbers) -> NDArray[Any]:
    """Return one score per image, (N,) with N at least 1, without NaN."""
    array = as_array(name, values)
    if array.ndim != 1:
        raise InputError(f"{name} must be (N,), one score per image, got {shape_of(array)}; pass scores.reshape(-1)")
    if array.size == 0:
        raise InputError(f"{name} must hold at least one score, got none; check that its data set is not empty")
    return no_nan(name, array)


def class_per_image(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return the array if it holds one class number per image, (N,) with N at least 1."""
    if values.ndim != 1 or values.size == 0:
        raise InputError(f"{name} must be (N,) with N at least 1, got {shape_of(values)}; pass one class per image")
    if values.dtype.kind not in "iu":
        raise InputError(f"{name} must be whole class numbers, got dtype {values.dtype}; convert it to int64")
    return values


def labels_of(labels: Numbers, n: int, classes: int | None = None) -> NDArray[Any]:
    """Return one label for each of n predictions, below ``classes`` if their number is known."""
    array = class_per_image("labels", as_array("labels", labels))
    if len(array) != n:
        raise InputError(f"labels must have one entry per prediction, ({n},), got {shape_of(array)}; pair them up")
    if classes is not None and not 0 <= array.min() <= array.max() < classes:
        raise InputError(
            f"labels must lie in 0..{classes - 1}, got {array.min()}..{array.max()}; "
            "number the classes from 0, in the order of the columns"
        )
    return array


def right_per_image(right: Numbers, n: int) -> NDArray[Any]:
    """Return whether each of n images was classified correctly: True and False, or 1 and 0 with -1 for unknown."""
    array = as_array("right", right)
    if array.shape != (n,) or array.dtype.kind not in "bi" or not -1 <= array.min() <= array.max() <= 1:
        raise InputError(
            f"right must be one truth value per ID image, ({n},), or 1, 0 and -1 for unknown; "
            f"got {array.dtype} {shape_of(array)}"
        )
    if array.max() < 0:
        raise InputError("right must be known for at least one image, got -1 for all; pass None without labels")
    return array


def probability_per_class(probabilities: Numbers, labels: Numbers) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return probabilities of all classes, (N, C), and the true classes, (N,)."""
    p = no_nan("probabilities", as_array("probabilities", probabilities))
    if p.ndim != 2:
        raise InputError(f"probabilities must be (N, C), got {shape_of(p)}; pass one row per image")
    truth = labels_of(labels, *p.shape)
    low, sums = p.min(), p.sum(axis=-1, dtype=np.float64)
    if low < 0 or not np.allclose(sums, 1, rtol=0, atol=1e-3):
        got = f"values from {low:.4g} and sums from {sums.min():.4g} to {sums.max():.4g}"
        raise InputError(f"probabilities must be at least 0 with rows that sum to 1, got {got}; pass a softmax")
    return p, truth
