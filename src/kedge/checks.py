"""Checks of arguments, and of what is installed: each error names what was expected, what came and what to do."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.errors import InputError, NotReadyError

T = TypeVar("T")


def one_of(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return ``value`` if it is among ``allowed``.

    Example:
        >>> one_of("init", "fresh", ("preserve", "fresh"))
        'fresh'
    """
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def resolve(name: str, value: str | Callable[..., T], known: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    """Turn a name into the function it stands for; a function passes as it is.

    Example:
        >>> resolve("score", "largest", {"largest": max})([1, 3, 2])
        3
    """
    if callable(value):
        return value
    if value not in known:
        raise InputError(f"{name} must be a function or one of {', '.join(map(repr, known))}; got {value!r}")
    return known[value]


def between(name: str, value: float, low: float, high: float, *, open_ends: bool = False) -> float:
    """Return ``value`` if it lies in [low, high], or in (low, high) with ``open_ends``.

    Example:
        >>> between("tpr", 0.95, 0, 1, open_ends=True)
        0.95
    """
    inside = low < value < high if open_ends else low <= value <= high
    if not inside:  # also catches NaN
        brackets = "()" if open_ends else "[]"
        raise InputError(f"{name} must lie in {brackets[0]}{low}, {high}{brackets[1]}; got {value!r}")
    return value


def at_least(name: str, value: int, low: int) -> int:
    """Return ``value`` if it is a whole number of at least ``low``.

    Example:
        >>> at_least("k", 5, 2)
        5
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} must be a whole number of at least {low}; got {value!r}")
    return value


def finite(name: str, values: Tensor, remedy: str) -> Tensor:
    """Return ``values`` if none of them is NaN or infinite.

    Example:
        >>> finite("x", torch.ones(2), "drop the image")
        tensor([1., 1.])
    """
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise InputError(f"{name} must be finite; {bad} of {values.numel()} values are NaN or infinite: {remedy}")
    return values


def needs(package: str, extra: str, what: str = "this") -> Any:
    """Import a package of an extra, or say how to install it.

    Args:
        package: The package, or a module of it.
        extra: What to install kedge with.
        what: That needs it.

    Example:
        >>> needs("no_such_package", "onnx", "an export")
        Traceback (most recent call last):
        kedge.errors.NotReadyError: an export needs no_such_package, which is missing: pip install 'kedge[onnx]'
    """
    try:
        return import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise NotReadyError(f"{what} needs {missing}, which is missing: pip install 'kedge[{extra}]'") from error


def shape_of(value: Any) -> str:
    """Describe a value for an error message: its shape if it has one, its type otherwise.

    Example:
        >>> shape_of(torch.zeros(3, 32, 32)), shape_of("text")
        ('(3, 32, 32)', 'str')
    """
    shape = getattr(value, "shape", None)
    return str(tuple(shape)) if shape is not None else type(value).__name__
