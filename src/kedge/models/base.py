"""What every built-in network carries: the call that builds it again, and the names of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from kedge.errors import InputError


@dataclass(frozen=True)
class Spec:
    """A network's architecture as plain data: ``build(spec.name, **spec.arguments)`` builds it again.

    Every argument is resolved, defaults included, so that a saved spec outlives a change of default.

    Attributes:
        name: A name that ``kedge.models.build`` knows.
        arguments: The builder's arguments; numbers only, so the spec goes into JSON as it is.

    Example:
        >>> Spec("compact", {"width": 16, "classes": 10, "channels": 1}).arguments["width"]
        16
    """

    name: str
    arguments: Mapping[str, int | float]


class Network(nn.Module):
    """Base of the built-in networks.

    Each one ends in ``flatten``, whose output is the penultimate vector, and ``fc``, the linear layer that turns that
    vector into the logits: ``net(x)`` is ``net.fc`` of the output of ``net.flatten``, with nothing after it and at most
    a dropout between them. Every
    layer runs once per forward and none works in place, so each can be read by its name.

    Attributes:
        feature_layers: Submodules whose outputs are the stages, in order; the last is ``flatten``.
        spec: How to build the same architecture again.

    Example:
        >>> import kedge.models
        >>> net = kedge.models.build("compact", width=8)
        >>> isinstance(net, Network), net.feature_layers[-1]
        (True, 'flatten')
    """

    feature_layers: ClassVar[tuple[str, ...]]
    spec: Spec


def share(name: str, value: float) -> float:
    """Return ``value`` if it is a number in [0, 1).

    Example:
        >>> share("dropout", 0.3)
        0.3
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{name} must be a number in [0, 1); got {value!r}")
    return value


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a padded 3x3 convolution; it has no bias, since a batch norm follows or precedes it.

    Example:
        >>> conv3x3(3, 16, stride=2)
        Conv2d(3, 16, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)
    """
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def kaiming(net: nn.Module) -> None:
    """Draw the weights of every convolution in ``net`` as He et al. do, by fan-out.

    Example:
        >>> layer = nn.Conv2d(16, 64, 3)
        >>> kaiming(layer)
        >>> round(layer.weight.std().item() * (64 * 9 / 2) ** 0.5, 1)
        1.0
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
