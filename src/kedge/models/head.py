"""The head of a network: the linear layer that turns the penultimate vector into the logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kedge.errors import ArchitectureError, InputError
from kedge.models.features import INPUT


@dataclass
class HeadOutput:
    """What a head with more than one output gives.

    Attributes:
        logits: (B, C), what a classifier reads.
        extra: Further outputs, (B, ...), for the method that put the head in place.
    """

    logits: Tensor
    extra: tuple[Tensor, ...]


def head_name(network: nn.Module, head: str | None = None) -> str:
    """The name of a network's last linear layer, or ``head`` where it is given, checked.

    Example:
        >>> head_name(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)))
        '3'
    """
    linear: list[str] = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name and not name.endswith((".layer_x", ".layer_c"))  # an anchored pair
    ]
    if head is None:
        if not linear:
            raise ArchitectureError(
                f"{type(network).__name__} has no linear layer inside it to be its head; wrap it in a module that ends "
                "in one"
            )
        return linear[-1]
    if head not in linear:
        raise InputError(f"head must name a linear layer, one of {linear[-5:]}; got {head!r}")
    return head


def check_head(network: nn.Module, head: str, logits: Tensor, features: Tensor) -> None:
    """Raise if the logits are not what the head makes of its input: then another layer is the head, or none is."""
    layer = network.get_submodule(head)
    with torch.no_grad():
        again = layer(features)
    again, logits = again.logits if isinstance(again, HeadOutput) else again, logits.detach()
    # A mean over anchors of what the head gives is not quite what it gives of their mean, by the precision's rounding.
    close = max(1e-3, 10 * torch.finfo(logits.dtype).eps)
    largest = float(logits.abs().max())
    if again.shape != logits.shape or not torch.allclose(again, logits, rtol=close, atol=close * largest):
        raise ArchitectureError(
            f"the logits are not the output of {head!r}, the network's last linear layer; pass head= with the name of "
            "the layer that gives them"
        )


def chosen_layers(network: nn.Module, layers: Sequence[str] | None) -> tuple[str, ...]:
    """The layers to read: those given, or a network's own ``feature_layers``, or the input of its head.

    Example:
        >>> chosen_layers(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), None)
        ('1:in',)
    """
    if layers is None:
        own = getattr(network, "feature_layers", None)
        return (head_name(network) + INPUT,) if own is None else tuple(own)
    if isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers must be a sequence of names; got {layers!r}, pass a list such as ['stage1']")
    if not layers or len(set(layers)) < len(layers):
        raise InputError(f"layers must be at least one name, and each once; got {list(layers)}")
    return tuple(layers)
