"""Networks by name: ``build("wrn-40-2", classes=100)``."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from kedge.checks import one_of
from kedge.errors import InputError
from kedge.models.airbench import Airbench
from kedge.models.base import Network, Spec
from kedge.models.compact import Compact
from kedge.models.features import read_features
from kedge.models.resnet import ResNet
from kedge.models.small_resnet import DEPTHS, SmallResNet
from kedge.models.wrn import WideResNet

__all__ = [
    "Airbench", "Compact", "Network", "ResNet", "SmallResNet", "Spec", "WideResNet", "build", "model_names",
    "read_features",
]  # fmt: skip

# An argument that is given here by position cannot be given again: build("wrn-40-2", depth=28) is an error.
_BUILDERS: dict[str, Callable[..., Network]] = {
    "wrn": WideResNet,
    "wrn-40-2": partial(WideResNet, 40, 2),
    "wrn-16-2": partial(WideResNet, 16, 2),
    **{f"resnet{depth}-cifar": partial(ResNet, depth, "cifar") for depth in (18, 34, 50)},
    **{f"resnet{depth}": partial(ResNet, depth, "imagenet") for depth in (18, 34, 50)},
    **{f"resnet{depth}": partial(SmallResNet, depth) for depth in DEPTHS},
    "compact": Compact,
    "airbench": Airbench,
}


def model_names() -> tuple[str, ...]:
    """The names that `build` takes."""
    return tuple(_BUILDERS)


def build(name: str, **arguments: Any) -> Network:
    """A network by its name, with freshly drawn weights; its ``spec`` builds the same architecture again.

    Args:
        name: One of ``model_names()``. ``"wrn"`` needs ``depth`` and ``width``.
        **arguments: Arguments of the network: ``classes``, ``channels`` and ``dropout`` everywhere, ``width`` for
            ``"compact"`` and ``"airbench"``.

    Example:
        >>> build("compact", width=4).spec
        Spec(name='compact', arguments={'width': 4, 'classes': 10, 'channels': 3, 'dropout': 0.0})
    """
    builder = _BUILDERS[one_of("name", name, model_names())]
    parameters = signature(builder).parameters
    unknown = [argument for argument in arguments if argument not in parameters]
    if unknown:
        raise InputError(f"{name!r} takes the arguments {', '.join(parameters)}; got {', '.join(unknown)}")
    missing = [key for key, value in parameters.items() if value.default is Parameter.empty and key not in arguments]
    if missing:
        raise InputError(f"{name!r} also needs {', '.join(missing)}")
    return builder(**arguments)
