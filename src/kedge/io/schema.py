"""What a file may hold: plain data is checked against type annotations before anything is built from it."""

import contextlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from kedge.errors import FileFormatError, KedgeError, NotReadyError

LISTS = (tuple, list, Sequence)


class Named(TypedDict):
    """A built-in network, or a conversion, and its arguments."""

    name: str
    arguments: dict[str, Any]


class AnchoredPart(TypedDict):
    """The anchored layer and the options of `kedge.anchor`."""

    layer: str
    options: dict[str, Any]


class NetworkPart(TypedDict):
    """A network without its weights."""

    spec: Named | None
    type: str
    normalised: bool
    anchored: AnchoredPart | None
    conversions: list[Named]
    channels_last: bool
    record: dict[str, Any]


class EnsemblePart(TypedDict):
    """Several networks."""

    ensemble: list["EnsemblePart | NetworkPart"]
    record: dict[str, Any]


class DetectorPart(TypedDict):
    """The name of a method, and its arguments."""

    name: str
    config: dict[str, Any]


class CalibrationPart(TypedDict):
    """The numbers of a calibration; ``threshold`` may be infinite, and is computed anew."""

    alpha: float
    delta: float | None
    threshold: Any
    temperature: float
    images: int


class Header(TypedDict):
    """The header of a saved detector in this version; keys that are not listed have no effect."""

    detector: DetectorPart
    network: EnsemblePart | NetworkPart
    preprocess: dict[str, Any]
    classes: list[str]
    calibration: CalibrationPart | None
    versions: dict[str, str | None]


def check(value: Any, hint: Any, name: str) -> None:
    """Raise an error unless plain data is as an annotation says; numbers must be finite, and True is not a number.

    Example:
        >>> check({"alpha": [0.05, True]}, dict[str, list[float]], "header")
        Traceback (most recent call last):
        ...
        kedge.errors.FileFormatError: header.alpha[1] must be float, got True
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((each for each in typing.get_args(hint) if _is(each, value)), hint)
    if not _is(hint, value):
        if typing.is_typeddict(hint) and isinstance(value, dict):
            missing = sorted(hint.__required_keys__ - value.keys())
            raise FileFormatError(f"{name} must have the keys {', '.join(missing)} too")
        expected = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        raise FileFormatError(f"{name} must be {expected}, got {repr(value)[:80]}")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in LISTS:
        each = inner if origin is tuple and Ellipsis not in inner else inner[:1] * len(value)
        for number, (item, kind) in enumerate(zip(value, each, strict=True)):
            check(item, kind, f"{name}[{number}]")
    elif origin in (dict, Mapping) or typing.is_typeddict(hint):
        kinds = typing.get_type_hints(hint) if origin is None else dict.fromkeys(value, inner[1])
        for key, kind in kinds.items():
            check(value[key], kind, f"{name}.{key}")


def arguments(target: Callable[..., Any], values: Any, name: str) -> dict[str, Any]:
    """Plain data as keyword arguments of a function or class; unknown, missing and ill-typed ones are errors."""
    check(values, dict[str, Any], name)
    parameters, more = _parameters(target)
    for key, value in values.items():
        if key in parameters:
            check(value, parameters[key].annotation, f"{name}.{key}")
        elif not more:
            raise FileFormatError(f"{name} must have the keys {', '.join(parameters)}; got {key!r} too")
    return dict(values)


@contextlib.contextmanager
def readable(path: str | os.PathLike[str], what: str, *, keep: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever goes wrong with a file's content into a `FileFormatError`, except for errors to ``keep``."""
    kept: tuple[type[Exception], ...] = (FileFormatError, NotReadyError, *keep)
    try:
        yield
    except kept:
        raise
    except Exception as error:  # the checksum is right and the content is not: it may fail in any way
        reason = str(error) if isinstance(error, KedgeError) else f"{type(error).__name__}: {error}"
        raise FileFormatError(f"{path} is a kedge file, but not {what} that this kedge can read: {reason}") from error


def _is(hint: Any, value: Any) -> bool:
    """Whether a value is of an annotation's kind, whatever it holds; functions and tensors are not plain data."""
    origin = typing.get_origin(hint)
    if hint is float:
        return type(value) in (int, float) and abs(value) < 1e300  # neither NaN nor infinite
    if hint is int:
        return type(value) is int and abs(value) < 2**63
    if typing.is_typeddict(hint):
        return isinstance(value, dict) and hint.__required_keys__ <= value.keys()
    if origin in LISTS:
        fixed = origin is tuple and Ellipsis not in typing.get_args(hint)
        return isinstance(value, list) and (not fixed or len(value) == len(typing.get_args(hint)))
    if origin in (dict, Mapping):
        return isinstance(value, dict)
    return hint is Any or (hint in (bool, str, types.NoneType) and type(value) is hint)


def _parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters of a function or class, and whether it takes more; those that a class passes on are its base's."""
    own = inspect.signature(target, eval_str=True).parameters.values()
    result = {p.name: p for p in own if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    more = any(p.kind is p.VAR_KEYWORD for p in own)
    if more and inspect.isclass(target):
        base, more = _parameters(target.__mro__[1])
        result = base | result
    return result, more
