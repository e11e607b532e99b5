"""Optimizers of a recipe: SGD, AdamW, or Muon (K. Jordan and others, 2024); and the moving average of the weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from kedge.anchoring import Anchored
from kedge.models.classifier import Classifier
from kedge.training.probe import layer_depths
from kedge.training.recipes import Recipe

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that pulls singular values into about [0.7, 1.2]
ITERATIONS = 3
BETAS = (0.85, 0.95)  # of Adam
REST = 1 / 12  # Adam's learning rate for parameters that are not matrices, as a fraction of Muon's
HEAD = 10.0  # factor for the last layer, which starts far from where it ends


def make_optimizer(net: Classifier, recipe: Recipe, shape: tuple[int, ...] = ()) -> torch.optim.Optimizer:
    """Build the optimizer of a recipe. Each group's learning rate is its ``scale`` times the recipe's rate.

    ``shape`` is that of one input, for ``layer_rates``.

    Muon takes the weights of convolutions and linear layers except the first and the last. All other parameters use
    Adam, with rates that fall with the square root of a layer's inputs, as the size of its weights does.
    """
    everything: list[dict[str, Any]] = [{"params": list(net.parameters()), "scale": 1.0}]
    if recipe.optimizer == "sgd":
        options: dict[str, Any] = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
        return torch.optim.SGD(everything, lr=recipe.lr, weight_decay=recipe.weight_decay, **options)
    if recipe.optimizer == "adam":
        groups = everything if recipe.layer_rates is None else _by_layer(net, recipe, shape)
        return torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    # Only weights that are parameters: a weight drawn from a distribution (SVI) has other parameters behind it.
    layers = [m for m in net.modules() if isinstance(m, kinds) and "weight" in m._parameters]
    stem = [net.network.get_submodule(net.layer)] if isinstance(net, Anchored) else layers[:1]
    first = {module for layer in stem for module in layer.modules()}  # an anchored layer may be a pair that acts as one
    matrices = [p for layer in stem for p in layer.parameters() if p.ndim > 1]
    inputs = {id(p): sum(m[0].numel() for m in matrices) for p in matrices}
    head = next((layer for layer in reversed(layers) if isinstance(layer, nn.Linear) and layer not in first), None)
    inner = [layer.weight for layer in layers if layer not in first and layer is not head]
    own = {id(weight) for weight in inner}
    groups = [{"params": inner, "scale": 1.0, "muon": True}]
    for weight in (p for p in net.parameters() if id(p) not in own):
        scale = REST if weight.ndim < 2 else REST / inputs.get(id(weight), weight[0].numel()) ** 0.5
        groups.append({"params": [weight], "scale": HEAD * scale if head and weight is head.weight else scale})
    return Muon([group for group in groups if group["params"]], lr=recipe.lr, momentum=recipe.momentum)


def _by_layer(net: Classifier, recipe: Recipe, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Groups of one layer's weights each, with a learning rate by its depth; biases and norms apart, without decay."""
    assert recipe.layer_rates is not None
    first, last = recipe.layer_rates
    depths = layer_depths(net, shape)
    head = max(depths.values())
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, weight in net.named_parameters():
        groups.setdefault((depths[name], weight.ndim > 1), []).append(weight)
    scales = [first * (last / first) ** (depth / max(1, head - 1)) for depth in range(head)] + [1.0]
    return [
        {"params": weights, "scale": scales[depth], "weight_decay": recipe.weight_decay if decays else 0.0}
        for (depth, decays), weights in groups.items()
    ]


def orthogonalized(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Return the matrix with singular values near 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for the groups with ``muon``, Adam for the others, in one optimizer.

    Muon steps by the orthogonalized momentum and keeps each weight at a norm of the square root of its number of rows,
    so that a learning rate means the same relative change for each weight.

    ``momentum`` is the Nesterov momentum of Muon, ``betas`` are those of Adam.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> muon = Muon([{"params": [layer.weight], "muon": True}], lr=0.1)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> muon.step()
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float = 0.6, betas: tuple[float, float] = BETAS
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "muon": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters by their gradients."""
        for group in self.param_groups:
            step = self._muon if group["muon"] else self._adam
            for weight in group["params"]:
                if weight.grad is not None:
                    step(weight, group)

    def _muon(self, weight: Tensor, group: dict[str, Any]) -> None:
        velocity = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        velocity.mul_(group["momentum"]).add_(weight.grad)
        ahead = weight.grad + group["momentum"] * velocity
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        weight.sub_(group["lr"] * orthogonalized(ahead.flatten(1)).view_as(weight))

    def _adam(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[weight], group["betas"]
        mean = state.setdefault("exp_avg", torch.zeros_like(weight))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(weight))
        state["step"] = state.get("step", 0) + 1
        mean.lerp_(weight.grad, 1 - first)
        square.mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
        size = (square / (1 - second ** state["step"])).sqrt_().add_(1e-8)
        weight.addcdiv_(mean, size, value=-group["lr"] / (1 - first ** state["step"]))


class WeightAverage:
    """Exponential moving average of a network's floating-point parameters and buffers.

    torch's `AveragedModel` is not used: its first update copies instead of averaging, and with ``use_buffers`` it
    averages integer buffers (fingerprints of outliers) too.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in _floats(net).items()}

    def update(self, net: nn.Module, step: int) -> None:
        """Move the average towards the values after a step; in the first steps faster."""
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        average(list(self.values.values()), list(_floats(net).values()), 0)

    @torch.no_grad()
    def apply(self, net: nn.Module) -> None:
        """Copy the averaged values into the network."""
        for name, value in _floats(net).items():
            value.copy_(self.values[name])


def _floats(net: nn.Module) -> dict[str, Tensor]:
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: value for name, value in named.items() if value.is_floating_point()}
