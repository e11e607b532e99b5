"""A small regressor from features of an image to the logarithm of the expected error."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-5  # errors below it count as this large, as in DEUP's published code
PENALTY = 1.0  # on the squared weights, next to the sum of the squared residuals
STEPS = 500  # of Newton's method, which takes less than a hundred


@dataclass(frozen=True)
class ErrorPredictor:
    """A perceptron with one hidden layer on standardised features.

    Attributes:
        features: Mean and standard deviation of each feature over the fitted images, (2, F).
        errors: Mean and standard deviation of the logarithms of their errors, (2,).
        first: Weights of the hidden layer, its biases in the last row, (F + 1, H).
        last: Weights of the output, its bias last, (H + 1,).
    """

    features: Tensor
    errors: Tensor
    first: Tensor
    last: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """The expected error, (N, F) -> (N,), in float64."""
        moments, errors, first, last = (
            value.to(features.device, torch.float64) for value in (self.features, self.errors, self.first, self.last)
        )
        z = (features.double() - moments[0]) / moments[1]
        return (errors[0] + errors[1] * perceptron(z, first, last)).exp()


def perceptron(z: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """A hidden layer of tanh and a linear output, (N, F) -> (N,); bounded far from the fitted images."""
    return _with_ones((_with_ones(z) @ first).tanh()) @ last


def misfit(z: Tensor, target: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """The fitted loss: the sum of the squared residuals and of the squared weights, without the biases, per image."""
    residuals = perceptron(z, first, last) - target
    squares = first[:-1].square().sum() + last[:-1].square().sum()
    return (residuals.square().sum() + PENALTY * squares) / len(z)


def derivatives(z: Tensor, target: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient (P,) and Hessian (P, P) of the misfit with respect to ``first``, row by row, and then ``last``."""
    rows = _with_ones(z)  # (N, F + 1)
    (inputs, hidden), count = first.shape, first.numel()
    values = (rows @ first).tanh()  # (N, H)
    slopes = 1 - values.square()
    back = slopes * last[:-1]
    residuals = _with_ones(values) @ last - target  # (N,)
    jacobian = torch.cat([(rows[:, :, None] * back[:, None, :]).flatten(1), _with_ones(values)], dim=1)  # (N, P)
    hessian = jacobian.T @ jacobian
    # The residuals times the second derivatives, which mix only the weights of one and the same hidden unit.
    unit = torch.arange(hidden, device=z.device)
    bends = residuals[:, None] * -2 * values * back  # (N, H)
    products = (rows[:, :, None] * rows[:, None, :]).flatten(1)  # (N, (F + 1)^2)
    inner = (bends.T @ products).view(hidden, inputs, inputs)
    hessian[:count, :count].view(inputs, hidden, inputs, hidden)[:, unit, :, unit] += inner
    outer = rows.T @ (residuals[:, None] * slopes)  # (F + 1, H)
    hessian[:count, count:-1].view(inputs, hidden, hidden)[:, unit, unit] += outer
    hessian[count:-1, :count].view(hidden, inputs, hidden)[unit, :, unit] += outer.T
    penalised = [torch.cat([torch.ones_like(w[:-1]), torch.zeros_like(w[-1:])]).flatten() for w in (first, last)]
    ridge = PENALTY * torch.cat(penalised)  # (P,)
    gradient = jacobian.T @ residuals + ridge * torch.cat([first.flatten(), last])
    return 2 * gradient / len(z), 2 * (hessian + ridge.diag()) / len(z)


def fit_predictor(features: Tensor, errors: Tensor, *, hidden: int, seed: int, rounding: float) -> ErrorPredictor:
    """Fit an error predictor in float64.

    The logarithm of the error is fitted, as in DEUP's published code: errors span several powers of ten, and a mean
    square of the errors themselves would be that of the few largest. Newton's method runs until the gradient vanishes,
    so that the predictor depends on the images alone and not on when it was stopped.

    Args:
        features: (N, F).
        errors: (N,), not negative.
        hidden: Width of the hidden layer.
        seed: Seed of the starting weights.
        rounding: Features that vary by less than this, relative to their size, are taken as constant.
    """
    with torch.no_grad():
        phi, target = features.double(), errors.double().clamp_min(SMALLEST).log()
        mean, std = phi.mean(dim=0), phi.std(dim=0, correction=0)
        # A constant feature is left as it is, so that the penalty takes its weights to zero.
        std = torch.where(std > rounding * phi.abs().amax(dim=0).clamp_min(1), std, 1.0)
        centre, scale = target.mean(), target.std(correction=0)
        scale = torch.where(scale > 0, scale, 1.0)
        first, last = _start(phi.shape[1], hidden, seed)
        first, last = newton((phi - mean) / std, (target - centre) / scale, first.to(phi), last.to(phi))
        return ErrorPredictor(torch.stack([mean, std]), torch.stack([centre, scale]), first, last)


def newton(z: Tensor, target: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Weights at a minimum of the misfit, downhill from the given ones."""
    weights, damping = torch.cat([first.flatten(), last]), 1e-3

    def split(values: Tensor) -> tuple[Tensor, Tensor]:
        return values[: first.numel()].view_as(first), values[first.numel() :]

    reached = misfit(z, target, *split(weights))
    for _ in range(STEPS):
        gradient, hessian = derivatives(z, target, *split(weights))
        if float(gradient.abs().max()) < 1e-10:
            break
        curvature, directions = torch.linalg.eigh(hessian)
        slope = directions.T @ gradient
        # Absolute curvatures lead away from saddle points, where ordinary Newton steps lead to them.
        while damping < 1e9:
            step = -directions @ (slope / (curvature.abs() + damping))
            ahead = misfit(z, target, *split(weights + step))
            if bool(ahead < reached):
                break
            damping *= 4
        else:  # no step is better within the precision of float64
            break
        weights, reached, damping = weights + step, ahead, max(damping / 4, 1e-12)
    return split(weights)


def _start(features: int, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    """Starting weights that keep the scale of their inputs, and no biases."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(features, hidden, generator=generator, dtype=torch.float64) / math.sqrt(features)
    last = torch.randn(hidden, generator=generator, dtype=torch.float64) / math.sqrt(hidden)
    return torch.cat([first, first.new_zeros(1, hidden)]), torch.cat([last, last.new_zeros(1)])


def _with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
