"""The registry of detectors, filled where each class is defined."""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kedge.checks import one_of
from kedge.errors import InputError

if TYPE_CHECKING:
    from kedge.detectors.base import Detector

PACKAGES = ("kedge.detectors", "kedge.experimental")  # importing their modules registers every detector of kedge
DETECTORS: dict[str, type["Detector"]] = {}  # by the name in files; `registered` imports what is missing
D = TypeVar("D", bound="type[Detector]")


def register(cls: D) -> D:
    """Class decorator that registers a detector under its ``name``, for `kedge.load` and the command line."""
    if DETECTORS.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise InputError(f"name must be unique; {cls.name!r} is already the name of {DETECTORS[cls.name].__name__}")
    DETECTORS[cls.name] = cls
    return cls


def registered() -> dict[str, type["Detector"]]:
    """All detectors, sorted by name."""
    _import_all()
    return dict(sorted(DETECTORS.items()))


def named_methods() -> dict[str, tuple[type["Detector"], Mapping[str, Any]]]:
    """Every method by name: a detector and its options, none for the detector's own name; see ``Detector.variants``."""
    kinds = registered().items()
    named: dict[str, tuple[type[Detector], Mapping[str, Any]]] = {name: (kind, {}) for name, kind in kinds}
    return named | {name: (kind, options) for _, kind in kinds for name, options in kind.variants.items()}


def post_hoc(*, unanchored: bool = False) -> dict[str, tuple[type["Detector"], Mapping[str, Any]]]:
    """The methods of `named_methods` that are built on one network, without a training of their own.

    With ``unanchored`` those alone that read any unanchored network as evaluation runs it, and no combinations.
    """

    def needs_more(kind: type["Detector"]) -> bool:
        required = [name for name, p in inspect.signature(kind).parameters.items() if p.default is p.empty]
        combines = required == ["detectors"] and not unanchored  # it takes a network too
        return hasattr(kind, "prepare") or not (required == ["net"] or combines)

    def special(kind: type["Detector"]) -> bool:
        return unanchored and (kind.changes_network or kind.reads == "per_anchor_logits")

    return {name: made for name, made in named_methods().items() if not needs_more(made[0]) and not special(made[0])}


def method_of(method: str, argument: str = "method") -> tuple[type["Detector"], Mapping[str, Any]]:
    """The detector and the options that a name stands for; names with commas between stand for their combination."""
    methods, names = named_methods(), method.split(",")
    for name in names:
        one_of(argument, name, tuple(methods))
    return methods[method] if len(names) == 1 else (DETECTORS["combined"], {"parts": names})


def make(method: str, net: Any, **options: Any) -> "Detector":
    """A detector by the name of its method, before `fit`; see `method_of`."""
    kind, given = method_of(method)
    return kind(net, **{**given, **options})


@functools.cache
def _import_all() -> None:
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, prefix=f"{name}."):
            importlib.import_module(module.name)
