"""k-means: Lloyd's algorithm from seeded starting centres, in blocks of points so that memory stays small.

Own code instead of scikit-learn's: it runs on the device of the training, needs no further dependency, and repeats bit
for bit with any number of threads.
"""

import torch
from torch import Tensor

from kedge.checks import at_least, finite, shape_of
from kedge.errors import InputError

BLOCK = 2**22  # distances held at a time


def kmeans(
    points: Tensor, k: int, *, seed: int = 0, steps: int = 20, centres: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Assign points to k groups around k centres, each point to the nearest centre.

    A group that loses all its points takes the point that is furthest from its centre, of the groups with more than
    one. Where fewer than k points differ, some groups stay empty.

    Args:
        points: (N, d), N at least k.
        k: Number of groups.
        seed: Seed of the starting centres, drawn by k-means++.
        steps: Largest number of steps; ends earlier if no point changes its group.
        centres: Starting centres, (k, d), in place of drawn ones.

    Returns:
        The group of each point, (N,), and the centres, (k, d).

    Example:
        >>> groups, centres = kmeans(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), 2)
        >>> sorted(centres[:, 0].tolist()), bool(groups[0] == groups[1])
        ([0.5, 10.5], True)
    """
    if points.ndim != 2 or not points.is_floating_point() or len(points) < at_least("k", k, 1):
        raise InputError(
            f"points must be floating point numbers (N, d) with N at least k = {k}; got {shape_of(points)}"
        )
    finite("points", points, "leave these points out")
    at_least("steps", steps, 0)
    middle = points.mean(dim=0)  # around zero, so that squares of large numbers do not hide the distances
    points = points - middle
    if centres is None:
        centres = _plus_plus(points, k, seed)
    elif tuple(centres.shape) != (k, points.shape[1]):
        raise InputError(f"centres must be (k, d), ({k}, {points.shape[1]}) here; got {shape_of(centres)}")
    else:
        centres = centres.to(points) - middle
    groups = nearest(points, centres)
    for _ in range(steps):
        groups_before = groups
        groups = _fill_empty(points, centres, groups)
        sums = torch.zeros(centres.shape, dtype=torch.float64, device=points.device)
        for rows, numbers in zip(points.split(2**16), groups.split(2**16), strict=True):
            sums.index_add_(0, numbers, rows.double())
        centres = (sums / torch.bincount(groups, minlength=k)[:, None]).to(points)
        groups = nearest(points, centres)
        if groups.equal(groups_before):
            break
    return groups, centres + middle


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The group of the nearest centre, (N,); the first of equals."""
    lengths = centres.square().sum(dim=1)  # (k,)
    parts = points.split(max(1, BLOCK // len(centres)))
    # |x|^2 is the same for every centre.
    return torch.cat([(lengths - 2 * part @ centres.T).argmin(dim=1) for part in parts])


def _fill_empty(points: Tensor, centres: Tensor, groups: Tensor) -> Tensor:
    """The groups, each empty one given the furthest point that another can spare."""
    sizes = torch.bincount(groups, minlength=len(centres)).tolist()
    empty = [group for group, size in enumerate(sizes) if size == 0]
    if not empty:
        return groups
    filled, parts = groups.clone(), zip(points.split(2**16), groups.split(2**16), strict=True)
    distance = torch.cat([(part - centres[numbers]).square().sum(dim=1) for part, numbers in parts])
    for point in distance.argsort(descending=True, stable=True).tolist():
        group = int(groups[point])
        if sizes[group] > 1:
            sizes[group] -= 1
            filled[point] = empty.pop(0)
            if not empty:
                break
    return filled


def _plus_plus(points: Tensor, k: int, seed: int) -> Tensor:
    """Starting centres (k, d): points, each drawn by its squared distance to the nearest one drawn before it."""
    draws = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    lengths = points.square().sum(dim=1)  # (N,)
    chosen = [int(draws[0] * len(points))]
    nearest = torch.full_like(lengths, float("inf"))
    for draw in draws[1:]:
        last = chosen[-1]
        nearest = nearest.minimum(lengths + lengths[last] - 2 * points @ points[last]).clamp_min_(0)
        nearest[last] = 0
        reach = nearest.double().cumsum(dim=0)
        if float(reach[-1]) == 0:  # every point equals a centre: any will do
            chosen.append(int(draw * len(points)))
        else:
            chosen.append(min(int(torch.searchsorted(reach, draw * reach[-1], right=True)), len(points) - 1))
    return points[chosen]
