"""The registry of detectors, filled where each class is defined."""

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, TypeVar

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


@functools.cache
def _import_all() -> None:
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, prefix=f"{name}."):
            importlib.import_module(module.name)
