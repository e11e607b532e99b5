"""Disagreement by distance from the data: of anchors in one network, of a network per anchor, of an ensemble."""

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from kedge.metrics import auroc
from kedge.scores import tau as tau_of
from kedge.studies.theory.toy import ToyProblem, ensemble, one_network, one_per_anchor, toy_problem, with_bias

POINTS = 40  # to train on
PER_INPUT = (1, 4, 16, POINTS)  # anchors that each training point is paired with
EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # bands of distance from the nearest training point
NEAR, FAR = 0.5, 4.0  # distances of the outside points for the AUROC
PER_ANCHOR, ENSEMBLE = "a network per anchor", "unanchored ensemble"
MEMBERS = 64  # quantiles that represent the ensemble's normal distribution


@dataclass(frozen=True)
class Disagreement:
    """Disagreement by distance from the nearest training point, over several draws of the toy problem.

    Args:
        edges: Edges of the bands of distance.
        deviation: By predictor, the deviation of decision values in each band, in the mean over points and draws.
        tau: By predictor, the paper's tau in each band, for the two logits f and -f.
        held_out: By predictor, both on held-out points.
        accuracy: By predictor, on held-out points.
        separates: By predictor, the AUROC of both for points at a distance of 0.5 to 4 against held-out ones.
        spans: By predictor, the lowest and the highest of these over the draws.
        grows: By predictor, in how many draws the deviation is larger at a distance of 8 to 16 than at 0.5 to 1.
    """

    edges: list[float]
    deviation: dict[str, list[float]]
    tau: dict[str, list[float]]
    held_out: dict[str, dict[str, float]]
    accuracy: dict[str, float]
    separates: dict[str, dict[str, float]]
    spans: dict[str, dict[str, list[float]]]
    grows: dict[str, int]


def trained_with(per_input: int) -> str:
    """The name of a network whose training points were each paired with so many anchors."""
    return f"one network, {per_input} anchor{'s' if per_input > 1 else ''} a point"


def draw_problem(seed: int, anchors: int) -> tuple[ToyProblem, Tensor]:
    """A toy problem, and some of its training points as anchors to predict with."""
    problem = toy_problem(POINTS, seed=seed)
    order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(seed))
    return problem, problem.x[order[:anchors]]


def decision_values(
    problem: ToyProblem, points: Tensor, anchors: Tensor, *, per_input: tuple[int, ...] = PER_INPUT, seed: int = 0
) -> dict[str, Tensor]:
    """Decision values (K, T) under each anchor, by predictor: single networks, and a network per anchor.

    There is a single network for each number in ``per_input``, of anchors that a training point is paired with.
    """
    x, points, anchors = with_bias(problem.x), with_bias(points), with_bias(anchors)
    values = {}
    for number in per_input:
        generator = torch.Generator().manual_seed(seed)
        values[trained_with(number)] = one_network(x, problem.y, points, anchors, per_input=number, generator=generator)
    return values | {PER_ANCHOR: one_per_anchor(x, problem.y, points, anchors)}


def decision_tau(values: Tensor) -> Tensor:
    """The paper's tau (T,) of decision values f (K, T), as the two logits f and -f."""
    return tau_of(torch.stack([values, -values], dim=-1))  # (T,)


def disagreement_by_distance(*, seed: int = 0, anchors: int = 10, repeats: int = 10) -> Disagreement:
    """Measure disagreement on held-out points and on circles around the data, from within it to 30 times its size.

    ``repeats`` problems are drawn, with the seeds from ``seed`` on.
    """
    runs = [_one_draw(seed + r, anchors) for r in range(repeats)]
    names = list(runs[0])

    def mean(name: str, key: str) -> list[float]:
        return [float(v) for v in torch.stack([run[name][key] for run in runs]).mean(dim=0)]

    def pair(name: str, key: str) -> dict[str, float]:
        return dict(zip(("deviation", "tau"), mean(name, key), strict=True))

    def span(name: str, column: int) -> list[float]:
        values = [float(run[name]["auroc"][column]) for run in runs]
        return [min(values), max(values)]

    def grew(run: dict[str, Tensor]) -> bool:
        return bool(run["deviation"][EDGES.index(8.0)] > run["deviation"][EDGES.index(0.5)])

    return Disagreement(
        list(EDGES),
        {name: mean(name, "deviation") for name in names},
        {name: mean(name, "tau") for name in names},
        {name: pair(name, "held out") for name in names},
        {name: fmean(float(run[name]["accuracy"]) for run in runs) for name in names},
        {name: pair(name, "auroc") for name in names},
        {name: {"deviation": span(name, 0), "tau": span(name, 1)} for name in names},
        {name: sum(grew(run[name]) for run in runs) for name in names},
    )


def circles(radii: int = 24, directions: int = 24) -> Tensor:
    """Points on circles around the data, each turned a little against the last, (radii * directions, 2)."""
    radius = torch.logspace(-1, math.log10(30), radii, dtype=torch.float64)
    turn = torch.arange(directions, dtype=torch.float64)[:, None] + torch.arange(radii, dtype=torch.float64) / radii
    angle = 2 * math.pi * turn / directions  # (directions, radii)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(0, 1)


def _one_draw(seed: int, anchors: int) -> dict[str, dict[str, Tensor]]:
    problem, chosen = draw_problem(seed, anchors)
    around, count = circles(), len(problem.held_out)
    points = torch.cat([problem.held_out, around])
    distance = torch.cdist(around, problem.x).amin(dim=1)
    band = torch.bucketize(distance, torch.tensor(EDGES[1:-1], dtype=torch.float64), right=True)
    outside = (distance >= NEAR) & (distance < FAR)

    def summary(mean: Tensor, deviation: Tensor, tau: Tensor) -> dict[str, Tensor]:
        both = torch.stack([deviation, tau])  # (2, T)
        inside, beyond = both[:, :count], both[:, count:]
        bands = torch.stack([beyond[:, band == b].mean(dim=1) for b in range(len(EDGES) - 1)], dim=1)  # (2, bands)
        areas = [auroc(i, b[outside]) for i, b in zip(inside, beyond, strict=True)]
        return {
            "deviation": bands[0],
            "tau": bands[1],
            "held out": inside.mean(dim=1),
            "accuracy": ((mean[:count] > 0) == (problem.held_out_y > 0)).double().mean(),
            "auroc": torch.tensor(areas, dtype=torch.float64),
        }

    summaries = {
        name: summary(values.mean(dim=0), values.std(dim=0), decision_tau(values))
        for name, values in decision_values(problem, points, chosen, seed=seed).items()
    }
    mean, deviation = ensemble(with_bias(problem.x), problem.y, with_bias(points))
    quantiles = torch.special.ndtri((torch.arange(MEMBERS, dtype=torch.float64) + 0.5) / MEMBERS)
    members = mean + quantiles[:, None] * deviation  # (MEMBERS, T)
    return summaries | {ENSEMBLE: summary(mean, deviation, decision_tau(members))}
