"""Errors of the approximations of the anchored kernel, and the order in which they fall with the anchor's length."""

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch.nn.functional import normalize

from kedge.checks import at_least
from kedge.studies.theory.ntk import (
    FORMS,
    anchored_kernel,
    approximate_anchored_kernel,
    dot_shift,
    h_ntk,
    on_sphere,
    spectrum,
)

HALVINGS = 12  # anchors of length 1/2, 1/4, ...
COSINE = 0.9  # points at a larger |x . z| are left to the diagonal: the terms of gamma grow without bound there


@dataclass(frozen=True)
class Approximation:
    """Errors of the anchored kernel's approximations on the sphere, at anchors of falling length.

    Args:
        lengths: Length of the anchor, 1/2, 1/4, ...
        largest: By comparison, the largest error over pairs of different points, at each length.
        orders: By comparison, the power of the length that the error falls with, from the two shortest anchors.
        unexplained: By form of gamma, the largest error over the largest change that the shortest anchor makes.
        defined: The share of pairs for which the paper's form has a value when the anchor is a point of the set.
        smallest: The smallest eigenvalue of the exact kernel, of the first-order one, and of the exact gamma.
    """

    lengths: list[float]
    largest: dict[str, list[float]]
    orders: dict[str, float]
    unexplained: dict[str, float]
    defined: float
    smallest: dict[str, float]


def approximation_errors(*, points: int = 60, seed: int = 0) -> Approximation:
    """Measure the approximations on random points of the sphere in three dimensions, for one direction of c."""
    at_least("points", points, 3)
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(points, 3, generator=generator, dtype=torch.float64), dim=1)
    direction = normalize(torch.randn(3, generator=generator, dtype=torch.float64), dim=0)
    u, plain = x @ x.T, h_ntk(x, x)
    used = (u.abs() <= COSINE).triu(1)
    lengths = [0.5**k for k in range(1, HALVINGS + 1)]
    largest: dict[str, list[float]] = {}
    for length in lengths:
        c = length * direction
        exact, paper = anchored_kernel(x, x, c), approximate_anchored_kernel(x, x, c)
        first = approximate_anchored_kernel(x, x, c, "first order")
        errors = {
            "paper against its unit-norm formula": (paper - on_sphere(u - dot_shift(x, x, c)))[used],
            "paper against exact": (paper - exact)[used],
            "first order against exact": (first - exact)[used],
            "unanchored against exact": (plain - exact)[used],
            "paper against exact, diagonal": (paper - exact).diagonal(),
        }
        for kind, error in errors.items():
            largest.setdefault(kind, []).append(float(error[~error.isnan()].abs().max()))
    kernels = {"exact": exact, "first order": first, "exact gamma": plain - exact}  # of the shortest anchor
    moved = largest["unanchored against exact"][-1]
    different = torch.ones_like(u, dtype=torch.bool).triu(1)
    return Approximation(
        lengths,
        largest,
        {kind: math.log2(values[-2] / values[-1]) for kind, values in largest.items()},
        {form: largest[f"{form} against exact"][-1] / moved for form in FORMS},
        fmean(float(((u - dot_shift(x, x, c)).abs() < 1)[different].double().mean()) for c in x),
        {name: float(spectrum(kernel)[-1]) for name, kernel in kernels.items()},
    )
