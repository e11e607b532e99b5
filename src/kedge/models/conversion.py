"""Conversions: changes of a network that its method needs, recorded so that a saved network can be built again."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from kedge.checks import one_of
from kedge.models.classifier import Classifier

Conversion = Callable[..., nn.Module]

# By name; the methods enter their own where they are defined.
CONVERSIONS: dict[str, Conversion] = {}


def conversion(name: str) -> Callable[[Conversion], Conversion]:
    """Enter a function that changes a network in place, or returns another, under a name that files refer to.

    Example:
        >>> @conversion("example")
        ... def shift(network: nn.Module, *, by: float) -> nn.Module:
        ...     return nn.Sequential(network, nn.Threshold(-1e9, by))
        >>> convert(nn.Linear(2, 2), "example", by=1.0).conversions
        [{'name': 'example', 'arguments': {'by': 1.0}}]
        >>> del CONVERSIONS["example"]
    """

    def enter(function: Conversion) -> Conversion:
        CONVERSIONS[name] = function
        return function

    return enter


def convert(net: nn.Module, name: str, **arguments: Any) -> Any:
    """Make a converted copy of a network, or of the one inside a `Classifier`; the original stays as it is.

    Args:
        net: The network.
        name: Of a conversion.
        **arguments: Of the conversion; plain data, since they go into files.
    """
    copied = copy.deepcopy(net)
    if isinstance(copied, Classifier):
        copied.network = apply(copied.network, name, **arguments)
        return copied
    return apply(copied, name, **arguments)


def apply(network: nn.Module, name: str, **arguments: Any) -> nn.Module:
    """Convert a network in place and note it down."""
    done = list(getattr(network, "conversions", ()))
    spec = getattr(network, "spec", None)
    changed: Any = CONVERSIONS[one_of("conversion", name, tuple(CONVERSIONS))](network, **arguments)
    changed.conversions = [*done, {"name": name, "arguments": arguments}]
    if spec is not None:
        changed.spec = spec
    return changed  # type: ignore[no-any-return]
