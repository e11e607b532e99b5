"""Unanchored networks made of anchored ones: with another first layer, or at the mean of the anchors."""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from kedge.anchoring.anchored import Anchored
from kedge.errors import NotReadyError
from kedge.models.classifier import Classifier
from kedge.models.conversion import apply, conversion


class Shifted(nn.Module):
    """A layer whose output, of a shape per image, is shifted by the constant part of an anchor."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        weight = next(layer.parameters())
        self.layer = layer
        # By this name `kedge.export` sees that the sum belongs to the first layer.
        self.anchor_maps = nn.Parameter(torch.zeros((1, *shape), dtype=weight.dtype, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the anchor's part, (B, ...)."""
        shifted: Tensor = self.layer(x) + self.anchor_maps
        return shifted


@conversion("mean anchor")
def shift(network: nn.Module, *, layer: str, shape: list[int]) -> nn.Module:
    """Add a constant to the output of a network's first layer: zero, until it is set or learned."""
    network.set_submodule(layer, Shifted(network.get_submodule(layer), tuple(shape)))
    return network


def under_mean_anchor(net: Anchored) -> Classifier:
    """An unanchored copy of an anchored network that computes its output at the mean of its anchors.

    The anchored layer is affine, so the mean of the anchors' parts is the part of their mean, and it becomes a
    constant of the copy. The disagreement between anchors is lost.

    Example:
        >>> from kedge import anchor
        >>> net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2)), init="fresh").eval()
        >>> net.set_anchors(torch.rand(5, 3, 2, 2))
        >>> x = torch.rand(7, 3, 2, 2)
        >>> bool(torch.allclose(under_mean_anchor(net)(x), net(x), atol=1e-5))  # linear all through
        True
    """
    if net.anchors is None:
        raise NotReadyError("the network has no anchors to take the mean of: call set_anchors(images), or fit AMP")
    with torch.no_grad():
        part = net.shared_maps().mean(dim=0)  # (1, ...)
    unanchored = with_first_layer(net, copy.deepcopy(net.anchored_layer.layer_x))
    unanchored.network = apply(unanchored.network, "mean anchor", layer=net.layer, shape=list(part.shape[1:]))
    with torch.no_grad():
        cast(Shifted, unanchored.network.get_submodule(net.layer)).anchor_maps.copy_(part)
    unanchored.record = dict(net.record)
    unanchored.outliers = None if net.outliers is None else net.outliers.clone()
    return unanchored.train(net.training)


def with_first_layer(net: Anchored, layer: nn.Module) -> Classifier:
    """An unanchored copy of an anchored network with another layer in place of the anchored one."""
    network = copy.deepcopy(net.network)
    network.set_submodule(net.layer, layer)
    unanchored = Classifier(network)
    if net.has_statistics:
        unanchored.set_statistics(net.mean, net.std)
    return unanchored
