"""The head of a network: the linear layer that turns the penultimate vector into the logits, or what replaced it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from kedge.checks import finite
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier, evaluating
from kedge.models.ensemble import Ensemble
from kedge.models.features import INPUT

H = TypeVar("H", bound=nn.Module)


@dataclass
class HeadOutput:
    """The output of a head with more than one: logits (B, C), and ``extra`` ones (B, ...) for the head's method."""

    logits: Tensor
    extra: tuple[Tensor, ...]


def in_anchored_layer(name: str) -> bool:
    """Whether a module of this name is one of an anchored layer's pair, ``layer_x`` and ``layer_c``, or inside it."""
    return not {"layer_x", "layer_c"}.isdisjoint(name.split("."))


def head_name(network: nn.Module, head: str | None = None) -> str:
    """The name of a network's last linear layer, or ``head`` where it is given, checked."""
    linear = _linear_layers(network)
    if head is None and not linear:
        raise ArchitectureError(
            f"{type(network).__name__} has no linear layer inside it to be its head; pass a module that ends in one"
        )
    if head is not None and head not in linear:
        raise InputError(f"head must name a linear layer, one of {linear[-5:]}; got {head!r}")
    return linear[-1] if head is None else head


def find_head(net: Classifier, example: Tensor) -> str:
    """The name of the linear layer whose output is the network's logits, found by running the network.

    Args:
        net: The network; with anchors, their means are compared.
        example: A batch of images.
    """
    logits: Tensor | None = None
    with evaluating(net), torch.no_grad():
        for name in reversed(_linear_layers(net.network)):
            layer = net.network.get_submodule(name)
            if logits is not None and layer.out_features != logits.shape[1]:
                continue
            try:
                logits, features = net.features(example, [name + INPUT])
            except InputError:  # of a layer that does not run, or runs more than once; or of the network itself
                logits = net.features(example)[0] if logits is None else logits
                continue
            if _gives(layer, features[name + INPUT], finite("logits", logits, "check the network's weights")):
                return name
    raise ArchitectureError(
        f"the logits of {type(net.network).__name__} are not the output of one linear layer inside it; name another "
        "layer where the method reads one (layer=, kedge fit --layer), or wrap the network in a module that ends in a "
        "linear layer"
    )


def prepared_head(net: nn.Module, kind: type[H], method: str) -> tuple[str, H]:
    """The name inside the network, and the head of a kind, that ``method.prepare`` put there; else an error."""
    if isinstance(net, Classifier) and not isinstance(net, Ensemble):
        for name, module in net.network.named_modules():
            if isinstance(module, kind):
                return name, module
    lacks = "an ensemble" if isinstance(net, Ensemble) else "one without"
    raise InputError(
        f"net must be a network with a {kind.__name__}, got {lacks}: make it with {method}.prepare(net) and train it "
        f"with loss={method}.loss()"
    )


def head_to_prepare(net: nn.Module, kind: type[nn.Module], head: str | None) -> tuple[str, nn.Linear]:
    """The name and the linear layer that a method's ``prepare`` replaces by a head of a kind; raises if it has one."""
    network = net.network if isinstance(net, Classifier) else net
    if isinstance(net, Ensemble):
        raise InputError("net must be one network, got an ensemble; prepare each of its members")
    if any(isinstance(module, kind) for module in network.modules()):
        raise InputError(f"net must not have a {kind.__name__} yet; it has one: train it as it is")
    name = head_name(network, head)
    layer = network.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return name, layer


def check_head(network: nn.Module, head: str, logits: Tensor, features: Tensor) -> None:
    """Raise if the logits are not the head's output for its input."""
    if not _gives(network.get_submodule(head), features, logits):
        raise ArchitectureError(
            f"the logits are not the output of {head!r}, the network's last linear layer, whose input is read; "
            "pass head= with the name of the right layer"
        )


def chosen_layers(network: nn.Module, layers: Sequence[str] | None) -> tuple[str, ...]:
    """The layers to read: those given, or a network's own ``feature_layers``, or the input of its head."""
    if layers is None:
        own = getattr(network, "feature_layers", None)
        return (head_name(network) + INPUT,) if own is None else tuple(own)
    if isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers must be a sequence of names; got {layers!r}, pass a list such as ['stage1']")
    if not layers or len(set(layers)) < len(layers):
        raise InputError(f"layers must be at least one name, and each once; got {list(layers)}")
    return tuple(layers)


def _linear_layers(network: nn.Module) -> list[str]:
    """The names of the linear layers inside a network that are no part of an anchored layer."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in names if name and not in_anchored_layer(name)]


@torch.no_grad()
def _gives(layer: nn.Module, features: Tensor, logits: Tensor) -> bool:
    """Whether a layer gives the logits for these features, up to rounding."""
    again = layer(features)
    again, logits = again.logits if isinstance(again, HeadOutput) else again, logits.detach()
    # A mean over anchors of the head's outputs differs by rounding from its output for the mean of their features.
    close = max(1e-3, 10 * torch.finfo(logits.dtype).eps)
    largest = float(logits.abs().max())
    return again.shape == logits.shape and torch.allclose(again, logits, rtol=close, atol=close * largest)
