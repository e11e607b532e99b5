"""An exponential moving average of a network's weights and statistics."""

import torch
from torch import Tensor, nn


class Average:
    """Keeps a running average of everything in a network that is a floating point number.

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(net.weight)
        >>> average = Average(net, decay=0.9)
        >>> _ = nn.init.ones_(net.weight)
        >>> average.update(net)
        >>> average.values["weight"]
        tensor([[0.1000]])
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in _floats(net).items()}

    def update(self, net: nn.Module) -> None:
        """Move the average towards the network as it is now."""
        with torch.no_grad():
            for name, value in _floats(net).items():
                self.values[name].lerp_(value, 1 - self.decay)

    def apply(self, net: nn.Module) -> None:
        """Give the network the averaged values."""
        with torch.no_grad():
            for name, value in _floats(net).items():
                value.copy_(self.values[name])


def _floats(net: nn.Module) -> dict[str, Tensor]:
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: value for name, value in named.items() if value.is_floating_point()}
