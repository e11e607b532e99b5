"""All results of the study of the kernel, as plain data; `kedge.studies.theory.page` draws them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kedge.checks import at_least
from kedge.errors import InputError
from kedge.studies.theory.approximation import Approximation, approximation_errors
from kedge.studies.theory.disagreement import (
    ENSEMBLE,
    POINTS,
    Disagreement,
    decision_values,
    disagreement_by_distance,
    draw_problem,
)
from kedge.studies.theory.ntk import anchored_kernel, effective_rank, encode, h_ntk, spectrum
from kedge.studies.theory.toy import ToyProblem, ensemble, with_bias

SHOWN = 16  # anchors per training point, of the network that is drawn
REACH = 3.0  # of the grid, in either direction


@dataclass(frozen=True)
class Spectra:
    """Eigenvalues of the kernels of the toy problem's training points, largest first.

    Args:
        unanchored: Of [x, 1], (N,).
        own: Of pairs, each point with a random anchor of its own, (N,).
        shared: Of pairs with one anchor for all points, for each of K anchors, (K, N).
        ranks: Effective ranks of the three; of the last, the mean over anchors.
        apart: The distance between the kernels of two anchors over their norm, in the mean.
    """

    unanchored: Tensor
    own: Tensor
    shared: Tensor
    ranks: dict[str, float]
    apart: float


@dataclass(frozen=True)
class Decisions:
    """Decisions under each anchor on a grid over the plane.

    Args:
        axis: Coordinates of the grid in either direction, (G,).
        values: By predictor, decision values under each anchor, (K, G, G); rows go along the second coordinate.
        deviation: By predictor, their deviation over anchors, (G, G); of the ensemble, over initial weights.
        agreement: By predictor, Spearman's correlation over the grid of its deviation with the ensemble's.
    """

    axis: Tensor
    values: dict[str, Tensor]
    deviation: dict[str, Tensor]
    agreement: dict[str, float]


@dataclass(frozen=True)
class NTKStudy:
    """All results of `ntk_study`; ``problem`` and ``anchors`` (K, 2) are the first of ``repeats`` draws."""

    seed: int
    repeats: int
    problem: ToyProblem
    anchors: Tensor
    approximation: Approximation
    spectra: Spectra
    decisions: Decisions
    disagreement: Disagreement

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, numbers to six digits."""
        plain: dict[str, Any] = _plain(self)
        return plain


def ntk_study(*, seed: int = 0, anchors: int = 10, repeats: int = 10, grid: int = 61) -> NTKStudy:
    """Compare exact and approximate kernels, their spectra, and the decisions of anchors by distance.

    Args:
        seed: Random seed of points and anchors.
        anchors: Number of training points to predict with.
        repeats: Number of draws of the toy problem.
        grid: Number of points along a side of the grid.

    Example:
        >>> study = ntk_study(anchors=2, repeats=1, grid=3)
        >>> study.decisions.values["a network per anchor"].shape
        torch.Size([2, 3, 3])
    """
    if at_least("anchors", anchors, 2) > POINTS:
        raise InputError(f"anchors must be at most the {POINTS} training points; got {anchors}: lower it")
    at_least("repeats", repeats, 1)
    at_least("grid", grid, 2)
    problem, chosen = draw_problem(seed, anchors)
    return NTKStudy(
        seed,
        repeats,
        problem,
        chosen,
        approximation_errors(seed=seed),
        kernel_spectra(problem.x, chosen, seed=seed),
        decisions_on_grid(problem, chosen, seed=seed, grid=grid),
        disagreement_by_distance(seed=seed, anchors=anchors, repeats=repeats),
    )


def kernel_spectra(x: Tensor, anchors: Tensor, *, seed: int = 0) -> Spectra:
    """The spectra of the kernels of points (N, 2), with a bias, and of their pairs with anchors (K, 2)."""
    x = with_bias(x)
    pairs = encode(x, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))])
    kernels = torch.stack([anchored_kernel(x, x, c) for c in with_bias(anchors)])  # (K, N, N)
    unanchored, own = spectrum(h_ntk(x, x)), spectrum(h_ntk(pairs, pairs))
    shared = torch.stack([spectrum(kernel) for kernel in kernels])  # (K, N)
    flat = kernels.flatten(1)
    ranks = {
        "unanchored": effective_rank(unanchored),
        "an anchor each": effective_rank(own),
        "one anchor": fmean(effective_rank(row) for row in shared),
    }
    return Spectra(unanchored, own, shared, ranks, float(torch.pdist(flat).mean() / flat.norm(dim=1).mean()))


def decisions_on_grid(problem: ToyProblem, anchors: Tensor, *, seed: int = 0, grid: int = 61) -> Decisions:
    """The decision values of a single network and of a network per anchor, on a grid."""
    axis = torch.linspace(-REACH, REACH, grid, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis).flip(1)  # the second coordinate runs slowest
    under_anchors = decision_values(problem, points, anchors, per_input=(SHOWN,), seed=seed)
    _, reference = ensemble(with_bias(problem.x), problem.y, with_bias(points))
    deviation = {name: values.std(dim=0) for name, values in under_anchors.items()}
    return Decisions(
        axis,
        {name: values.unflatten(1, (grid, grid)) for name, values in under_anchors.items()},
        {name: values.unflatten(0, (grid, grid)) for name, values in (deviation | {ENSEMBLE: reference}).items()},
        {name: rank_correlation(values, reference) for name, values in deviation.items()},
    )


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation of two vectors without ties."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value
