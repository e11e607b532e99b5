"""An anchored layer inside a network: what lies before it runs once per image, what lies behind it once per anchor.

B rows reach the layer, and K * B leave it. Where a skip connection carries x around the layer, or the network reads B
before it, those rows do not fit; the network then runs under `torch.func.vmap` over the anchors, which computes once
what does not depend on them, and lets x meet the K outputs where they are added.
"""

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from kedge.anchoring.layer import Multiplied, OneAnchor, calling
from kedge.models.classifier import logits_of
from kedge.models.features import read_features

CLOSE = 1e-3  # of the largest logit, between the two ways to compute it


def per_anchor(
    network: nn.Module,
    augmented: dict[int, Tensor],
    maps: Tensor,
    views: Sequence[int],
    layers: Sequence[str] = (),
    *,
    by_vmap: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-anchor logits (K, B, C) and the mean over anchors of the layers' outputs, of normalised images.

    Args:
        network: The network with the anchored layer.
        augmented: The views of the images (B, D, ...), by number.
        maps: The anchors' parts, (K, 1 or B, ...).
        views: The view that each anchor is paired with.
        layers: Names of the layers to read.
        by_vmap: Whether to run it under vmap rather than with K * B rows behind the layer.
    """

    def multiplied(x: Tensor, parts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with calling(Multiplied(parts)):
            output, features = read_features(network, x, layers) if layers else (network(x), {})
        values = {
            name: value.expand(len(parts), *value.shape) if len(value) == len(x) else value.unflatten(0, (-1, len(x)))
            for name, value in features.items()
        }
        return logits_of(output).unflatten(0, (len(parts), len(x))), values

    def run(x: Tensor, part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with calling(OneAnchor(part)):
            output, features = read_features(network, x, layers) if layers else (network(x), {})
        return logits_of(output), features

    logits: list[Tensor] = []
    places: list[int] = []
    sums = dict.fromkeys(layers, torch.zeros((), dtype=maps.dtype, device=maps.device))
    for number in dict.fromkeys(views):
        own = [place for place, view in enumerate(views) if view == number]
        if by_vmap:
            rows, features = vmap(functools.partial(run, augmented[number]), randomness="different")(maps[own])
        else:
            rows, features = multiplied(augmented[number], maps[own])
        logits.append(rows)
        places += own
        sums = {name: sums[name] + value.sum(dim=0) for name, value in features.items()}
    order = torch.tensor(places, device=maps.device).argsort()
    return torch.cat(logits)[order], {name: value / len(maps) for name, value in sums.items()}


@torch.no_grad()
def runs_once(network: nn.Module, x: Tensor, output: Tensor, *, by_vmap: bool) -> bool:
    """Whether `per_anchor` gives what the network gives under one anchor at a time.

    Args:
        network: The network with the anchored layer, in evaluation mode.
        x: One image, normalised.
        output: What the anchored layer makes of it, (1, ...).
        by_vmap: See `per_anchor`.
    """
    noise = torch.randn((2, *output.shape), generator=torch.Generator().manual_seed(0)).to(output)
    maps = noise * output.std(correction=0)
    images = torch.cat([x, -x, x / 2])
    try:
        logits, _ = per_anchor(network, {0: images.clone()}, maps, [0, 0], by_vmap=by_vmap)
        for part, rows in zip(maps, logits, strict=True):
            with calling(OneAnchor(part)):
                expected = logits_of(network(images.clone()))
            if not bool((rows - expected).abs().max() <= CLOSE * expected.abs().max()):
                return False
    except Exception:  # of rows that do not fit, or of operations that vmap does not know
        return False
    return True


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Their sums, versions and places, by which a change shows; cheaper to keep than the tensors themselves."""
    marks = [(float(t.sum(dtype=torch.float64)), 0 if t.is_inference() else t._version, t.data_ptr()) for t in tensors]
    return torch.tensor(marks, dtype=torch.float64)
