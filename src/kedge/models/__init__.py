"""Networks by name: ``build("wrn-40-2", classes=100)``."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from kedge.checks import one_of
from kedge.errors import InputError
from kedge.models.airbench import Airbench, airbench
from kedge.models.base import Network, Spec
from kedge.models.compact import Compact, compact
from kedge.models.features import read_features
from kedge.models.resnet import ResNet, resnet
from kedge.models.wrn import WideResNet, wrn

__all__ = [
    "Airbench",
    "Compact",
    "Network",
    "ResNet",
    "Spec",
    "WideResNet",
    "airbench",
    "build",
    "compact",
    "names",
    "read_features",
    "resnet",
    "wrn",
]

# What is fixed here by position is no argument of the name: build("wrn-40-2", depth=28) is an error.
_BUILDERS: dict[str, Callable[..., Network]] = {
    "wrn": wrn,
    "wrn-40-2": partial(wrn, 40, 2),
    "wrn-16-2": partial(wrn, 16, 2),
    "resnet18-cifar": partial(resnet, 18, "cifar"),
    "resnet34-cifar": partial(resnet, 34, "cifar"),
    "resnet50-cifar": partial(resnet, 50, "cifar"),
    "resnet18": partial(resnet, 18, "imagenet"),
    "resnet34": partial(resnet, 34, "imagenet"),
    "resnet50": partial(resnet, 50, "imagenet"),
    "compact": compact,
    "airbench": airbench,
}


def names() -> tuple[str, ...]:
    """Return the names that ``build`` knows.

    Example:
        >>> "wrn-40-2" in names()
        True
    """
    return tuple(_BUILDERS)


def build(name: str, **arguments: Any) -> Network:
    """Build a network by its name; its ``spec`` holds the call that builds the same architecture again.

    Args:
        name: One of ``names()``. "wrn" needs ``depth`` and ``width``.
        **arguments: Arguments of the builder: ``classes`` and ``channels`` everywhere, ``dropout`` for the wide
            networks, ``width`` for "compact" and "airbench".

    Returns:
        A network with freshly drawn weights.

    Raises:
        InputError: The name is unknown, or an argument is unknown, missing or out of range.

    Example:
        >>> build("wrn-16-2", classes=100).spec  # doctest: +NORMALIZE_WHITESPACE
        Spec(name='wrn',
             arguments={'depth': 16, 'width': 2, 'classes': 100, 'channels': 3, 'dropout': 0.0})
    """
    builder = _BUILDERS[one_of("name", name, names())]
    known = signature(builder).parameters
    unknown = [argument for argument in arguments if argument not in known]
    if unknown:
        raise InputError(f"{name!r} takes the arguments {', '.join(known)}; got {', '.join(unknown)}")
    missing = [key for key, value in known.items() if value.default is Parameter.empty and key not in arguments]
    if missing:
        raise InputError(f"{name!r} also needs {', '.join(missing)}")
    return builder(**arguments)
