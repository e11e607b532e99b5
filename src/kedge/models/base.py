"""What the built-in networks share: their checks, the call that builds them again, and layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from kedge.checks import at_least
from kedge.errors import InputError

SMALLEST = {"depth": 1, "width": 1, "classes": 2, "channels": 1}


@dataclass(frozen=True)
class Spec:
    """A network's architecture as plain data: ``build(spec.name, **spec.arguments)`` builds it again.

    Every argument is resolved, defaults included, so that a saved spec outlives a change of default.
    """

    name: str
    arguments: Mapping[str, Any]


class Network(nn.Module):
    """Base of the built-in networks; checks their arguments and keeps them as ``spec``.

    Each one ends in ``flatten``, whose output is the penultimate vector, and ``fc``, the linear layer that turns that
    vector into the logits, with at most a dropout between them. Every layer runs once per forward and none works in
    place, so each can be read by its name.

    Attributes:
        feature_layers: Submodules whose outputs are the stages, in order; the last is ``flatten``.
        spec: How to build the same architecture again.
    """

    feature_layers: ClassVar[tuple[str, ...]]
    spec: Spec

    def __init__(self, name: str, *, dropout: float, **arguments: int) -> None:
        super().__init__()
        for argument, value in arguments.items():
            at_least(argument, value, SMALLEST[argument])
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise InputError(f"dropout must be a number in [0, 1); got {dropout!r}")
        self.spec = Spec(name, {**arguments, "dropout": float(dropout)})


def dropout_layer(p: float) -> nn.Module:
    """A dropout layer, or none for p = 0: nn.Dropout(0) would still draw a mask, which moves the random state."""
    return nn.Dropout(p) if p else nn.Identity()


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A padded 3x3 convolution without a bias, since a batch norm follows or precedes it."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def kaiming(net: nn.Module) -> None:
    """Draw the weights of every convolution in ``net`` as He et al. do, by fan-out."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
