"""Scores as checked arrays, and saved states."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kedge.checks import shape_of
from kedge.errors import InputError

Numbers: TypeAlias = ArrayLike | Tensor
Floats: TypeAlias = NDArray[np.float64]


def as_scores(name: str, values: Numbers, fewest: int = 0) -> Floats:
    """One finite score per image in float64; a single number is one image.

    Example:
        >>> as_scores("scores", [1, 2]), as_scores("scores", 0.5)
        (array([1., 2.]), array([0.5]))
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        array = np.atleast_1d(np.asarray(values))
    except ValueError as error:
        raise InputError(f"{name} must be (N,), one score per image; got lists of unequal length: {error}") from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} must hold real numbers, got dtype {array.dtype}; convert them to float")
    if array.ndim != 1:
        raise InputError(f"{name} must be (N,), one score per image, got {shape_of(array)}; pass scores.reshape(-1)")
    array = array.astype(np.float64, copy=False)
    if bad := int(np.count_nonzero(~np.isfinite(array))):
        raise InputError(
            f"{name} must be finite; {bad} of {array.size} values are NaN or infinite: find the images they come from"
        )
    if len(array) < fewest:
        raise InputError(
            f"{name} must hold at least {fewest} scores, got {len(array)}; "
            "pass one score per held-out in-distribution image"
        )
    return array


def known_state(state: Mapping[str, Any], keys: Iterable[str]) -> Mapping[str, Any]:
    """Return a saved state if it holds exactly these keys.

    Example:
        >>> known_state({"seed": 0}, ["seed"])
        {'seed': 0}
    """
    if missing := set(keys) ^ set(state):
        raise InputError(
            f"state must be what state() of the same class returned; got one in which {', '.join(sorted(missing))} "
            "is missing or unknown: save it with this version of kedge"
        )
    return state
