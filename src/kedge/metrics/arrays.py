"""Lists, arrays and tensors as NumPy arrays, checked."""

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kedge.checks import shape_of
from kedge.errors import InputError

Numbers: TypeAlias = ArrayLike | Tensor


def as_array(name: str, values: Numbers) -> NDArray[Any]:
    """Take a list, array or tensor (of any device, with or without gradient) as a NumPy array of real numbers."""
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


def sorted_scores(name: str, values: Numbers) -> NDArray[Any]:
    """One score per image, in rising order; at least one, none NaN."""
    array = as_array(name, values)
    if array.ndim != 1:
        raise InputError(f"{name} must be (N,), one score per image, got {shape_of(array)}; pass scores.reshape(-1)")
    if array.size == 0:
        raise InputError(f"{name} must hold at least one score, got none; check that its data set is not empty")
    array = np.sort(array)
    if array[-1] != array[-1]:  # a sort puts NaN last, so this one place tells
        no_nan(name, array)
    return array


def whole(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return the array if it holds one whole number per image."""
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"{name} must be (N,) with N at least 1, got {shape_of(array)}; pass one class per image")
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} must be whole class numbers, got dtype {array.dtype}; convert it to int64")
    return array


def class_numbers(labels: Numbers, n: int, classes: int | None = None) -> NDArray[Any]:
    """One class per prediction, below ``classes`` where their number is known."""
    array = whole("labels", as_array("labels", labels))
    if len(array) != n:
        raise InputError(f"labels must have one entry per prediction, ({n},), got {shape_of(array)}; pair them up")
    if classes is not None and not 0 <= array.min() <= array.max() < classes:
        raise InputError(
            f"labels must lie in 0..{classes - 1}, got {array.min()}..{array.max()}; "
            "number the classes from 0, in the order of the columns"
        )
    return array
