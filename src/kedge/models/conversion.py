"""Conversions: changes of a network that a method needs, recorded so that a saved network can be built again."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from kedge.checks import one_of
from kedge.models.classifier import Classifier

Conversion = Callable[..., nn.Module]
CONVERSIONS: dict[str, Conversion] = {}  # by name; each method registers its own


def conversion(name: str) -> Callable[[Conversion], Conversion]:
    """Decorator: register a function that changes a network in place, or returns another, under its name in files."""

    def register(function: Conversion) -> Conversion:
        CONVERSIONS[name] = function
        return function

    return register


def head_conversion(name: str, kind: Callable[..., nn.Module]) -> None:
    """Register the conversion that puts ``kind(head, **arguments)`` in the place of a network's head."""

    @conversion(name)
    def replace(network: nn.Module, *, head: str, **arguments: Any) -> nn.Module:
        network.set_submodule(head, kind(network.get_submodule(head), **arguments))
        return network


def convert(net: nn.Module, name: str, **arguments: Any) -> Any:
    """A converted copy of a network, or of the one inside a `Classifier`; the arguments go into files as plain data."""
    copied = copy.deepcopy(net)
    if isinstance(copied, Classifier):
        copied.network = apply(copied.network, name, **arguments)
        return copied
    return apply(copied, name, **arguments)


def apply(network: nn.Module, name: str, **arguments: Any) -> nn.Module:
    """Convert a network in place and record it in ``network.conversions``."""
    before = getattr(network, "conversions", [])
    spec = getattr(network, "spec", None)
    converted: Any = CONVERSIONS[one_of("conversion", name, tuple(CONVERSIONS))](network, **arguments)
    converted.conversions = [*before, {"name": name, "arguments": arguments}]
    if spec is not None:
        converted.spec = spec
    return converted  # type: ignore[no-any-return]
