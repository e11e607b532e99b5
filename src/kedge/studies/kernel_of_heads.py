"""What the kernel of an infinitely wide two-layer head predicts for the deviation over anchors, beside a trained head.

The kernel is that of `kedge.studies.theory.ntk`: the first layer of a ReLU network is trained, on pairs [c, h - c] of
normalised features.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge import metrics
from kedge.anchoring import Anchored
from kedge.studies.head_scores import some_of
from kedge.studies.task import Task
from kedge.studies.theory.ntk import dual_weights, encode

PER_INPUT = 3  # anchors that each training feature is paired with
ANCHORS = 10  # to predict with
MOST_FITTED = 1_000  # training features
MOST = 150  # images of a set
PREDICTIONS = ("anchors", "gaussian process")
RIDGE = 1e-3  # relative to the kernel's mean diagonal


def head_kernel(a: Tensor, b: Tensor) -> Tensor:
    """`theory.ntk.h_ntk` by one matrix product: less exact at tiny angles, and fast for thousands of features."""
    dots = a @ b.T
    cosine = (dots / torch.outer(a.norm(dim=1), b.norm(dim=1)).clamp_min(1e-12)).clamp(-1, 1)
    return dots * (math.pi - cosine.arccos()) / (2 * math.pi)


@torch.no_grad()
def compare_kernels(task: Task, heads: Mapping[str, Anchored]) -> dict[str, Any]:
    """Rank correlations of the deviation of trained heads with both predictions, and the AUROC of all by group.

    ``"anchors"``: the deviation over anchors of the infinitely wide head, trained as the measured ones are.
    ``"gaussian process"``: the deviation of the process with the kernel of unanchored features.
    """
    train = some_of(task.train, MOST_FITTED)
    x = F.normalize(train.features.double(), dim=1)
    generator = torch.Generator().manual_seed(task.seed)
    assert train.labels is not None
    targets = F.one_hot(train.labels).double()
    targets = targets - targets.mean(dim=0)
    pairs = torch.cat([encode(x, x[torch.randperm(len(x), generator=generator)]) for _ in range(PER_INPUT)])
    weights = dual_weights(*_ridged(head_kernel(pairs, pairs), targets.repeat(PER_INPUT, 1)))
    anchors = torch.randperm(len(x), generator=generator)[:ANCHORS]
    inverse = torch.linalg.inv(_ridged(head_kernel(x, x), targets)[0])
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*heads, *PREDICTIONS)}
    sets = {task.test.name: task.test, **{each.name: each for each in (*task.near, *task.far)}}
    for name, each in sets.items():
        features = each.features[torch.randperm(len(each), generator=generator)[:MOST]]
        points = F.normalize(features.double(), dim=1)
        for kind, head in heads.items():
            found[kind][name] = deviation(head.per_anchor_logits(features.float()))
        outputs = torch.stack([head_kernel(encode(points, x[c]), pairs) @ weights for c in anchors])
        found["anchors"][name] = deviation(outputs)
        cross = head_kernel(points, x)
        variance = points.square().sum(dim=1) / 2 - ((cross @ inverse) * cross).sum(dim=1)
        found["gaussian process"][name] = variance.clamp_min(0).sqrt()
    known = task.test.name
    return {
        "correlation": {
            kind: {
                prediction: {
                    "all images": _correlation(found[kind].values(), found[prediction].values()),
                    "known images": _correlation([found[kind][known]], [found[prediction][known]]),
                }
                for prediction in PREDICTIONS
            }
            for kind in heads
        },
        "auroc": {
            kind: {
                group: sum(float(metrics.auroc(values[known], values[name])) for name in names) / len(names)
                for group, names in task.groups.items()
            }
            for kind, values in found.items()
        },
    }


def deviation(per_anchor: Tensor) -> Tensor:
    """The deviation over anchors of logits (K, B, C) less their mean over classes, root mean square over classes."""
    centred = per_anchor - per_anchor.mean(dim=-1, keepdim=True)
    return centred.var(dim=0).mean(dim=-1).sqrt()


def _ridged(kernel: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return kernel + RIDGE * kernel.diag().mean() * torch.eye(len(kernel), dtype=kernel.dtype), targets


def _correlation(one: Any, other: Any) -> float:
    """Spearman's rank correlation of values without ties."""
    ranks = [torch.cat(list(each)).argsort().argsort().double() for each in (one, other)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
