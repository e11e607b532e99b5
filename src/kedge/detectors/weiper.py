"""WeiPer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.checks import at_least, between
from kedge.detectors.bank import sample_rows
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.seeds import mix_seed

ROWS = 1024  # training images at a time
SMOOTHING = (4, 15)  # bins that are averaged: of the features, of the perturbed logits
EPSILONS = (0.01, 0.025)  # added to the probability of each bin, likewise


@register
class WeiPer(FeatureDetector):
    """Weight perturbations (Granz, Heurich and Landgraf, NeurIPS 2024): how an image's activations are distributed.

    Each row of the last layer's weight is perturbed by a random vector of ``delta`` times its length, ``repeats``
    times, which gives repeats x C perturbed logits. The score (WeiPer+KLD) is ``KL(h) + weight KL(z') - msp_weight
    MSP(z')``: the symmetric Kullback-Leibler divergences between the histogram of the image's features h, and of its
    perturbed logits z', and the mean of such histograms over the training images; and the mean over repeats of the
    largest softmax probability. An image's own histograms are smoothed first. Use it with wide features, whose
    histograms mean something, and on images near to the training set. One forward pass and repeats times the last
    layer; `fit` reads the training set once. The defaults are those of the published code, which the paper tunes on
    OOD validation images; training histograms and their range are of at most ``limit`` images, where the paper takes
    up to 300,000. https://arxiv.org/abs/2405.17164

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer.
        delta: Length of the perturbations, relative to the weights.
        repeats: How often the weights are perturbed.
        bins: Bins of the histograms, from the smallest to the largest value of the training images.
        weight: Of the divergence of the perturbed logits; the paper's lambda 1.
        msp_weight: Of the largest probability; the paper's lambda 2.
        limit: Training images to use at most, a random sample.
        seed: Random seed of the perturbations and of the sample.
        head: See `FeatureDetector`.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> WeiPer(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "weiper"
    options = ("delta", "repeats", "bins", "weight", "msp_weight", "limit", "seed", "head")
    learned = ("ranges", "histograms")
    grid: Mapping[str, Sequence[Any]] = {"delta": (1.0, 1.8, 2.4), "weight": (0.1, 1.0, 2.5, 5.0)}

    def __init__(
        self,
        net: nn.Module,
        *,
        delta: float = 1.8,
        repeats: int = 100,
        bins: int = 100,
        weight: float = 2.5,
        msp_weight: float = 0.1,
        limit: int = 10_000,
        seed: int = 0,
        head: str | None = None,
    ) -> None:
        super().__init__(net, head=head)
        self.delta = between("delta", delta, 0, float("inf"))
        self.repeats, self.bins = at_least("repeats", repeats, 1), at_least("bins", bins, 2)
        self.weight = between("weight", weight, 0, float("inf"))
        self.msp_weight = between("msp_weight", msp_weight, 0, float("inf"))
        self.limit, self.seed = at_least("limit", limit, 1), at_least("seed", seed, 0)
        self.ranges: Any = None  # smallest and largest feature and perturbed logit, (2, 2)
        self.histograms: Any = None  # means of the training images' own, of features and perturbed logits, (2, bins)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Learn the range and the mean histogram of features and of perturbed logits."""
        bank = sample_rows((batch.features for batch in batches), self.limit, self.seed)
        low = bank.new_full((2,), torch.inf, dtype=torch.float64)
        high = -low
        for h in bank.split(ROWS):
            for i, values in [(0, h), *((1, logits) for logits in self._perturbed(h))]:
                low[i], high[i] = low[i].minimum(values.min()), high[i].maximum(values.max())
        self.ranges = torch.stack([low, high], dim=1)
        total = sum(self._histograms(h)[0].sum(dim=1) for h in bank.split(ROWS))
        self.histograms = total / len(bank)

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits as they are, and the score of the histograms."""
        parts = [self._histograms(h) for h in features.split(ROWS)]
        histograms, msp = torch.cat([each for each, _ in parts], dim=1), torch.cat([each for _, each in parts])
        known = self.histograms.to(features.device)
        plain, perturbed = (
            symmetric_kl(known[i] + EPSILONS[i], smoothed(histograms[i], SMOOTHING[i]) + EPSILONS[i]) for i in (0, 1)
        )
        return Outputs(logits, (plain + self.weight * perturbed - self.msp_weight * msp).to(features.dtype))

    def _histograms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Histograms of features and of perturbed logits, (2, B, bins), and the mean largest probability, (B,)."""
        ranges = self.ranges.to(h.device)
        counts, msp = torch.zeros(1), torch.zeros(1)
        for logits in self._perturbed(h):
            counts = counts.to(h.device) + histogram(logits, ranges[1], self.bins) / self.repeats
            msp = msp.to(h.device) + logits.softmax(dim=1).amax(dim=1) / self.repeats
        return torch.stack([histogram(h, ranges[0], self.bins), counts]), msp

    def _perturbed(self, h: Tensor) -> Iterator[Tensor]:
        """The logits (B, C) of each perturbed head. Perturbations are drawn again in each call, and never stored."""
        layer = self.last_layer
        for repeat in range(self.repeats):
            yield F.linear(h, perturbed_weight(layer.weight, self.delta, mix_seed(self.seed, repeat)), layer.bias)


def perturbed_weight(weight: Tensor, delta: float, seed: int) -> Tensor:
    """A weight (C, d) plus a random vector for each row, of length delta times the row's."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight)
    lengths: Tensor = weight.norm(dim=1, keepdim=True)
    return weight + delta * lengths * F.normalize(noise, dim=1)


def histogram(values: Tensor, ends: Tensor, bins: int) -> Tensor:
    """The share of each row's values (B, n) in each bin between two ends (2,), (B, bins), in float64."""
    values, (low, high) = values.double(), ends
    index = ((values - low) * (bins / (high - low).clamp_min(1e-12))).long().clamp(0, bins - 1)
    inside = ((values >= low) & (values <= high)).double() / values.shape[1]
    return values.new_zeros(len(values), bins).scatter_add(1, index, inside)


def smoothed(histograms: Tensor, size: int) -> Tensor:
    """Histograms (B, bins) whose bins are means over ``size`` neighbours; the outer bins go on beyond the ends."""
    before = (size - 1) // 2
    padded = F.pad(histograms[:, None], (before, size - 1 - before), mode="replicate")
    return F.avg_pool1d(padded, size, stride=1)[:, 0]


def symmetric_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) + KL(q, p) of the distributions that p and q (..., bins) are proportional to."""
    p, q = p / p.sum(dim=-1, keepdim=True), q / q.sum(dim=-1, keepdim=True)
    return ((p - q) * (p.log() - q.log())).sum(dim=-1)
