"""Scores as checked arrays, and saved states."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kedge.checks import shape_of
from kedge.errors import InputError
from kedge.metrics.arrays import Numbers as Numbers
from kedge.metrics.arrays import as_array

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def as_scores(name: str, values: Numbers, fewest: int = 0) -> Floats:
    """Return one finite score per image in float64; a single number is one image."""
    array = np.atleast_1d(as_array(name, values))
    if array.ndim != 1:
        raise InputError(f"{name} must be (N,), one score per image, got {shape_of(array)}; pass scores.reshape(-1)")
    array = array.astype(np.float64, copy=False)
    if bad := int(np.count_nonzero(~np.isfinite(array))):
        raise InputError(
            f"{name} must be finite; {bad} of {array.size} values are NaN or infinite: find the images they come from"
        )
    if len(array) < fewest:
        raise InputError(f"{name} must hold at least {fewest} scores, got {len(array)}; pass one per held-out image")
    return array


def check_state(state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise unless a saved state holds exactly these keys."""
    if wrong := set(keys) ^ set(state):
        names = ", ".join(sorted(wrong))
        raise InputError(f"state must be from state() of this class and version; {names} is missing or unknown")
