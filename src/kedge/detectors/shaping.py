"""Activation shaping: the features before the last layer are changed before their logits are scored.

Each shape is a pure function of features (B, d). `LogitDetector` takes the name of one as ``shape``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kedge.checks import between, one_of
from kedge.detectors.streaming_quantile import StreamingQuantile
from kedge.errors import InputError


def react(h: Tensor, high: float) -> Tensor:
    """Activations clipped at ``high`` (ReAct)."""
    return h.clamp(max=high)


def vra(h: Tensor, low: float, high: float) -> Tensor:
    """Activations clipped at ``high``, and zero below ``low`` (VRA)."""
    return h.clamp(max=high).masked_fill(h < low, 0.0)


def ash_p(h: Tensor, percentile: float) -> Tensor:
    """The largest activations of each image, and zero for the rest (ASH-P)."""
    values, index = _top(h, percentile)
    return torch.zeros_like(h).scatter(1, index, values)


def ash_b(h: Tensor, percentile: float) -> Tensor:
    """The sum of all activations spread evenly over the largest ones, and zero for the rest (ASH-B)."""
    values, index = _top(h, percentile)
    value = h.relu().sum(dim=1, keepdim=True) / values.shape[1]
    return torch.zeros_like(h).scatter(1, index, value.expand_as(values))


def ash_s(h: Tensor, percentile: float) -> Tensor:
    """The largest activations times exp(sum of all / sum of these), and zero for the rest (ASH-S)."""
    return ash_p(h, percentile) * top_ratio(h, percentile).exp()


def scale(h: Tensor, percentile: float) -> Tensor:
    """All activations times exp(sum of all / sum of the largest) (SCALE)."""
    return h * top_ratio(h, percentile).exp()


def lts(h: Tensor, percentile: float) -> Tensor:
    """The factor of the logits, (sum of all activations / sum of the largest) squared, (B, 1) (LTS)."""
    return top_ratio(h, percentile) ** 2


def top_ratio(h: Tensor, percentile: float | Tensor) -> Tensor:
    """The sum of an image's positive activations over that of the largest, (B, 1); one where none is positive.

    Args:
        h: Features (B, d).
        percentile: The share of activations that are not among the largest, of all images or of each, (B,).
    """
    width, share = h.shape[1], torch.as_tensor(percentile, dtype=torch.float64, device=h.device).expand(h.shape[0])
    largest = (width - (width * share).round()).clamp(min=1).long()  # at least one, (B,)
    sums = h.relu().sort(dim=1, descending=True).values.cumsum(dim=1)  # (B, d)
    top = sums.gather(1, largest[:, None] - 1)
    return torch.where(top > 0, sums[:, -1:] / top, 1.0)


def _top(h: Tensor, percentile: float) -> tuple[Tensor, Tensor]:
    """The activations above a share of each image's own, at least one, (B, k), and where they are."""
    width = h.shape[1]
    values, index = h.topk(max(1, width - round(width * percentile)), dim=1)
    return values, index


@dataclass(frozen=True)
class Shape:
    """A shape: its function and the default of its percentile, one number or two.

    Args:
        function: Of features (B, d) and numbers; returns features, or factors (B, 1) of the logits.
        percentile: Default from the shape's paper.
        grid: Values that `kedge.tune` tries.
        learns: Whether the numbers are those quantiles of the training activations, not the percentiles themselves.
        of_logits: Whether it returns factors of the logits.
    """

    function: Callable[..., Tensor]
    percentile: tuple[float, ...]
    grid: Sequence[float | tuple[float, ...]]
    learns: bool = False
    of_logits: bool = False

    def logits(self, logits: Tensor, features: Tensor, head: nn.Module, numbers: Sequence[float]) -> Tensor:
        """The logits (B, C) of shaped features (B, d)."""
        shaped = self.function(features, *numbers)
        shaped_logits: Tensor = logits * shaped if self.of_logits else head(shaped)
        return shaped_logits

    def checked(self, percentile: float | Sequence[float] | None) -> tuple[float, ...]:
        """The percentiles to use: those given, in order and in range, or the default."""
        if percentile is None:
            return self.percentile
        given = (percentile,) if isinstance(percentile, int | float) else tuple(percentile)
        if len(given) != len(self.percentile):
            count = "one number" if len(self.percentile) == 1 else f"{len(self.percentile)} numbers"
            raise InputError(f"percentile must be {count} for this shape, as {self.percentile}; got {percentile!r}")
        for value in given:
            between("percentile", value, 0, 1)
        if self.learns and (given[-1] == 0 or list(given) != sorted(given)):
            raise InputError(f"percentile must lie in (0, 1], as a share of the activations; got {percentile!r}")
        return given

    def learn(self, batches: Iterable[Tensor], percentiles: Sequence[float]) -> list[float]:
        """The quantiles of training features, from batches (B, d)."""
        activations = StreamingQuantile()
        for features in batches:
            activations.add(features)
        numbers = [activations.quantile(percentile) for percentile in percentiles]
        smallest = activations.smallest
        if percentiles[-1] < 1 and numbers[-1] - smallest <= 1e-5 * (activations.largest - smallest):
            raise InputError(
                f"percentile must be higher for this network: a share of {percentiles[-1]} of its activations have the "
                f"smallest value, {smallest:.3g}, so that clipping there leaves nothing of the others; try 0.99"
            )
        return numbers


SHARES = (0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95)
SHAPES = {
    "react": Shape(react, (0.9,), (0.7, 0.8, 0.85, 0.9, 0.95, 0.99), learns=True),
    "vra": Shape(vra, (0.6, 0.95), ((0.3, 0.95), (0.5, 0.9), (0.6, 0.95), (0.6, 0.99), (0.8, 0.99)), learns=True),
    "ash": Shape(ash_s, (0.9,), SHARES),
    "ash-s": Shape(ash_s, (0.9,), SHARES),
    "ash-p": Shape(ash_p, (0.6,), SHARES),
    "ash-b": Shape(ash_b, (0.65,), SHARES),
    "scale": Shape(scale, (0.85,), SHARES),
    "lts": Shape(lts, (0.95,), SHARES, of_logits=True),
}


def shape_named(name: str) -> Shape:
    """The shape of a name."""
    return SHAPES[one_of("shape", name, tuple(SHAPES))]
