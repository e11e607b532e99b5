"""Two classes in the plane, and the predictions of infinitely wide networks under each anchor, or over an ensemble.

Inputs are rows. Letters: N training inputs x with targets y, T test inputs, K anchors, D values.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.checks import at_least, between
from kedge.errors import InputError
from kedge.studies.theory.ntk import dual_weights, encode, h_ntk, initial_kernel, predict


@dataclass(frozen=True)
class ToyProblem:
    """Points of two classes.

    Args:
        x: Training points around the origin, at a root-mean-square distance of one, (N, 2).
        y: Their classes, 1 and -1, (N,).
        held_out: Test points, (T, 2).
        held_out_y: Their classes, (T,).
    """

    x: Tensor
    y: Tensor
    held_out: Tensor
    held_out_y: Tensor


def toy_problem(n: int = 40, held_out: int = 200, *, noise: float = 0.1, seed: int = 0) -> ToyProblem:
    """Two interlocking half circles, in double precision."""
    at_least("n", n, 2)
    at_least("held_out", held_out, 1)
    between("noise", noise, 0, math.inf)
    generator = torch.Generator().manual_seed(seed)
    x, y = _half_circles(n, noise, generator)
    more, more_y = _half_circles(held_out, noise, generator)
    centre = x.mean(dim=0)
    scale = (x - centre).square().sum(dim=1).mean().sqrt()
    return ToyProblem((x - centre) / scale, y, (more - centre) / scale, more_y)


def with_bias(x: Tensor) -> Tensor:
    """Append a coordinate that is always one: the first layer's bias, which pairs keep once, beside the anchor."""
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=1)


def one_network(
    x: Tensor, y: Tensor, points: Tensor, anchors: Tensor, *, per_input: int, generator: torch.Generator
) -> Tensor:
    """The predictions (K, T) of one network, trained with random anchors, under each anchor.

    ``per_input`` is the number of training inputs that each training input is paired with; N for all.
    """
    if at_least("per_input", per_input, 1) > len(x):
        raise InputError(f"per_input must be at most the {len(x)} training inputs; got {per_input}: lower it")
    drawn = torch.stack([torch.randperm(len(x), generator=generator)[:per_input] for _ in x])  # (N, per_input)
    pairs = encode(x.repeat_interleave(per_input, dim=0), x[drawn].flatten(0, 1))  # (P, 2 D)
    weights = dual_weights(h_ntk(pairs, pairs), y.repeat_interleave(per_input))
    return torch.stack([h_ntk(encode(points, c), pairs) @ weights for c in anchors])  # (K, T)


def one_per_anchor(x: Tensor, y: Tensor, points: Tensor, anchors: Tensor) -> Tensor:
    """The predictions (K, T) of a network for each anchor, trained and used with that anchor alone."""

    def under(c: Tensor) -> Tensor:
        pairs = encode(x, c)
        return predict(h_ntk(pairs, pairs), h_ntk(encode(points, c), pairs), y)

    return torch.stack([under(c) for c in anchors])  # (K, T)


def ensemble(x: Tensor, y: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (T,) of the predictions of unanchored networks over their initial weights.

    With ``A = K_test K_train^-1`` a network ends at ``f_0(test) + A (y - f_0(train))``; the covariance of its initial
    outputs f_0 is `initial_kernel`.
    """
    a = dual_weights(h_ntk(x, x), h_ntk(x, points)).T  # (T, N)
    start = points.square().sum(dim=1) / 2
    variance = start - 2 * (a * initial_kernel(points, x)).sum(dim=1) + ((a @ initial_kernel(x, x)) * a).sum(dim=1)
    return a @ y, variance.clamp_min(0).sqrt()


def _half_circles(n: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = 1.0 - 2.0 * (torch.arange(n, dtype=torch.float64) % 2)
    angle = math.pi * torch.rand(n, generator=generator, dtype=torch.float64)
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    x = torch.where(y[:, None] > 0, upper, lower)
    return x + noise * torch.randn(n, 2, generator=generator, dtype=torch.float64), y
