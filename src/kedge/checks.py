"""Checks of arguments and of installed packages. Each error says what was expected, what came and what to do."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from kedge.errors import InputError, NotReadyError

if TYPE_CHECKING:  # the command line imports this module for its help, without torch
    from torch import Tensor

T = TypeVar("T")


def one_of(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return ``value`` if it is one of ``allowed``."""
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def resolve(name: str, value: str | Callable[..., T], names: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    """Return the function that a name stands for; a function is returned as it is."""
    if callable(value):
        return value
    if value not in names:
        raise InputError(f"{name} must be a function or one of {', '.join(map(repr, names))}; got {value!r}")
    return names[value]


def between(name: str, value: float, low: float, high: float, *, open_ends: bool = False) -> float:
    """Return ``value`` if it lies in [low, high], or in (low, high) with ``open_ends``."""
    if not (low < value < high if open_ends else low <= value <= high):  # also catches NaN
        brackets = "()" if open_ends else "[]"
        raise InputError(f"{name} must lie in {brackets[0]}{low}, {high}{brackets[1]}; got {value!r}")
    return value


def at_least(name: str, value: int, low: int) -> int:
    """Return ``value`` if it is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} must be a whole number of at least {low}; got {value!r}")
    return value


def all_finite(values: "Tensor") -> bool:
    """Whether no value is NaN or infinite; by their sum, which takes a fraction of the time, where that is enough."""
    return not values.is_floating_point() or bool(values.sum().isfinite()) or bool(values.isfinite().all())


def finite(name: str, values: "Tensor", remedy: str) -> "Tensor":
    """Return ``values`` if all are finite."""
    if not all_finite(values):
        bad = int((~values.isfinite()).sum())
        raise InputError(f"{name} must be finite; {bad} of {values.numel()} values are NaN or infinite: {remedy}")
    return values


def needs(package: str, extra: str, what: str = "this") -> Any:
    """Import a package of an extra, or raise an error with the command that installs it."""
    try:
        return import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise NotReadyError(f"{what} needs {missing}, which is missing: pip install 'kedge[{extra}]'") from error
    except RuntimeError as error:  # such as two compiled packages that do not fit
        raise NotReadyError(f"{what} needs {package}, which cannot be imported here: {error}") from error


def layout_hint(shape: Sequence[int], channels: int) -> str:
    """What to do about images of the wrong shape."""
    last = len(shape) == 4 and shape[3] == channels
    return "channels come first: pass x.permute(0, 3, 1, 2)" if last else "for one image pass x[None]"


def shape_of(value: Any) -> str:
    """The shape of a value, or the name of its type, for error messages."""
    shape = getattr(value, "shape", None)
    return str(tuple(shape)) if shape is not None else type(value).__name__
