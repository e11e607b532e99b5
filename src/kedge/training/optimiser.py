"""The optimiser that a recipe asks for."""

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.models.classifier import Classifier
from kedge.models.head import head_name
from kedge.training.muon import Muon
from kedge.training.recipe import Recipe

REST = 1 / 12  # Adam's rate for what is no matrix, as a share of Muon's
HEAD = 10.0  # times that, for the last layer, which starts far from where it ends


def make_optimiser(net: Classifier, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD for all weights, or Muon. Every group's ``scale`` says how its rate relates to the recipe's.

    Muon takes the weights between the first and the last layer; these two, biases and the parameters of norms go by
    Adam, with rates that fall with the square root of a layer's inputs, as the size of its weights does.
    """
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(
            [{"params": list(net.parameters()), "scale": 1.0}],
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
    layer = net.network.get_submodule(head_name(net.network))
    assert isinstance(layer, nn.Linear)
    head = layer.weight
    wide = [p for p in net.parameters() if p.ndim > 1]
    stem = net.stem.weight if isinstance(net, Anchored) else wide[0]
    inner = [p for p in wide if p is not stem and p is not head]
    groups = [
        {"params": inner, "scale": 1.0, "muon": True},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "scale": REST},
        {"params": [stem], "scale": REST / _inputs(stem) ** 0.5},
        {"params": [] if head is stem else [head], "scale": HEAD * REST / _inputs(head) ** 0.5},
    ]
    return Muon([group for group in groups if group["params"]], lr=recipe.lr, momentum=recipe.momentum)


def _inputs(weight: Tensor) -> int:
    """How many numbers each output of a layer is a sum of."""
    return weight[0].numel()
