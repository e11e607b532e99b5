"""The optimizer that a recipe asks for."""

from typing import Any

import torch
from torch import nn

from kedge.anchoring import Anchored
from kedge.models.classifier import Classifier
from kedge.training.muon import Muon
from kedge.training.recipe import Recipe

REST = 1 / 12  # Adam's rate for what is no matrix, as a share of Muon's
HEAD = 10.0  # times that, for the last layer, which starts far from where it ends


def make_optimizer(net: Classifier, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD for all weights, Adam, or Muon. Every group's ``scale`` says how its rate relates to the recipe's.

    Muon takes the weights of convolutions and linear layers but the first and the last. All others go by Adam, with
    rates that fall with the square root of a layer's inputs, as the size of its weights does.
    """
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            [{"params": list(net.parameters()), "scale": 1.0}],
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
    if recipe.optimizer == "adam":
        every: list[dict[str, Any]] = [{"params": list(net.parameters()), "scale": 1.0}]
        return torch.optim.AdamW(every, lr=recipe.lr, weight_decay=recipe.weight_decay)
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    # Only weights that are parameters: one that is drawn from a distribution (SVI) has others behind it.
    layers = [m for m in net.modules() if isinstance(m, kinds) and "weight" in m._parameters]
    pair = set(net.anchored_layer.modules()) if isinstance(net, Anchored) else set()  # two layers that act as one
    first = pair or set(layers[:1])
    head = next((layer for layer in reversed(layers) if isinstance(layer, nn.Linear) and layer not in first), None)
    inner = [layer.weight for layer in layers if layer not in first and layer is not head]
    paired = {id(weight) for layer in pair for weight in layer.parameters(recurse=False)}
    own = {id(weight) for weight in inner}
    groups: list[dict[str, Any]] = [{"params": inner, "scale": 1.0, "muon": True}]
    for weight in (p for p in net.parameters() if id(p) not in own):
        halves = 2 if id(weight) in paired else 1
        scale = REST if weight.ndim < 2 else REST / (halves * weight[0].numel()) ** 0.5
        groups.append({"params": [weight], "scale": HEAD * scale if head and weight is head.weight else scale})
    return Muon([group for group in groups if group["params"]], lr=recipe.lr, momentum=recipe.momentum)
