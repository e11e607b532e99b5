"""Muon: steps of equal size in every direction of a weight matrix (K. Jordan and others, 2024)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that pulls singular values into about [0.7, 1.2]
ITERATIONS = 3


def orthogonalised(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """The matrix with singular values brought near 1 by Newton-Schulz iterations.

    Example:
        >>> made = orthogonalised(torch.diag(torch.tensor([3.0, 1.0, 2.0])), iterations=5)
        >>> bool((made.diag() - 1).abs().max() < 0.35)
        True
    """
    a, b, c = COEFFICIENTS
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for the matrices among a network's weights, Adam for all others, in one optimizer.

    A group with ``muon`` is stepped by the orthogonalised momentum; its weights are kept at a norm of the square root
    of their number of rows, so that a rate means the same relative change for each. Other groups are stepped by Adam.

    Args:
        groups: Of parameters, each with ``muon`` or without.
        lr: Where a group has none of its own.
        momentum: Of Muon, with Nesterov's look ahead.
        betas: Of Adam.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> muon = Muon([{"params": [layer.weight], "muon": True}], lr=0.1)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> muon.step()
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.6,
        betas: tuple[float, float] = (0.85, 0.95),
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "muon": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with the gradients as they are."""
        for group in self.param_groups:
            step = self._muon if group["muon"] else self._adam
            for weight in group["params"]:
                if weight.grad is not None:
                    step(weight, group)

    def _muon(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        velocity = state.setdefault("momentum_buffer", torch.zeros_like(weight))
        velocity.mul_(group["momentum"]).add_(weight.grad)
        ahead = weight.grad + group["momentum"] * velocity
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        weight.sub_(group["lr"] * orthogonalised(ahead.flatten(1)).view_as(weight))

    def _adam(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[weight], group["betas"]
        mean = state.setdefault("exp_avg", torch.zeros_like(weight))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(weight))
        state["step"] = state.get("step", 0) + 1
        mean.lerp_(weight.grad, 1 - first)
        square.mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
        size = (square / (1 - second ** state["step"])).sqrt_().add_(1e-8)
        weight.addcdiv_(mean, size, value=-group["lr"] / (1 - first ** state["step"]))
