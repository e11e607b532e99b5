"""ReAct, and quantiles of a stream of numbers in memory of a fixed size."""

import math

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import between, finite, one_of
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError

BINS = 2**20  # at most four times as wide as the numbers need: within 4e-6 of their range


@register
class ReAct(FeatureDetector):
    """Rectified activations (Sun, Guo and Li, NeurIPS 2021): the energy after clipping large activations.

    The vector z before the last layer is clipped at a percentile c of the activations of all training images, and the
    score is that of the logits ``W min(z, c) + b``; labels come from the unclipped logits. Unknown images tend to make
    a few units far more active than any training image does, and clipping removes the confidence that comes from them.
    Use it on large networks, where energy is fooled by such units; on small ones it may cost more than it gains. One
    forward pass; `fit` reads the training set once. https://arxiv.org/abs/2111.12797

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors the mean vector is clipped.
        percentile: The share of the training activations to leave as they are, in (0, 1].
        score: ``"energy"``, as in the paper, ``"msp"``, ``"max_logit"``, ``"entropy"`` or ``"kl_uniform"``.
        head: See `FeatureDetector`.

    Attributes:
        clip: The value that activations are clipped at, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> ReAct(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "react"
    options = ("percentile", "score:score_by", "head")
    learned = ("clip",)

    def __init__(
        self, net: nn.Module, *, percentile: float = 0.9, score: str = "energy", head: str | None = None
    ) -> None:
        super().__init__(net, head=head)
        if percentile == 0:
            raise InputError("percentile must lie in (0, 1], as a share of the activations; got 0")
        self.percentile = between("percentile", percentile, 0, 1)
        self.score_by = one_of("score", score, tuple(scores.SCORES))
        self.clip: float | None = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Take the percentile of all activations of the training images."""
        activations = StreamingQuantile()
        for batch in batches:
            activations.add(batch.features)
        clip, smallest = activations.quantile(self.percentile), activations.smallest
        if self.percentile < 1 and clip - smallest <= 1e-5 * (activations.largest - smallest):
            raise InputError(
                f"percentile must be higher for this network: a share of {self.percentile} of its activations have the "
                f"smallest value, {smallest:.3g}, so that clipping there leaves nothing of the others; try 0.99"
            )
        self.clip = clip

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The unclipped logits, and the score of the logits of clipped activations."""
        clipped = self.last_layer(features.clamp(max=self.clip))  # (B, C)
        return Outputs(logits, scores.SCORES[self.score_by](clipped))


class StreamingQuantile:
    """A histogram whose range doubles for numbers outside it, each time merging neighbouring bins.

    A quantile is that of `numpy.quantile` (linear between neighbours) to within 1e-5 of the range of the numbers; the
    smallest and the largest number are exact.
    """

    def __init__(self) -> None:
        self.count = 0
        self.smallest = math.inf
        self.largest = -math.inf
        self._bins = torch.zeros(BINS, dtype=torch.int64)
        self._low = self._span = 0.0  # the bins cover [low, low + span]

    def add(self, values: Tensor) -> None:
        """Count more numbers, in a tensor of any shape."""
        values = finite("values", values, "find out where they arise").detach().flatten().cpu().double()
        if len(values) == 0:
            return
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        if self.count == 0:
            self._low = self.smallest
            self._span = self.largest - self.smallest or 1e-9 * max(1.0, abs(self.smallest))  # equal numbers
        while not self._low <= self.smallest <= self.largest <= self._low + self._span:
            merged, empty = self._bins.view(-1, 2).sum(dim=1), torch.zeros(BINS // 2, dtype=torch.int64)
            downwards = self.smallest < self._low
            self._bins = torch.cat([empty, merged] if downwards else [merged, empty])
            self._low -= self._span if downwards else 0.0
            self._span *= 2
        index = ((values - self._low) * (BINS / self._span)).long().clamp(0, BINS - 1)
        self._bins += index.bincount(minlength=BINS)
        self.count += len(values)

    def quantile(self, q: float) -> float:
        """The number below which a fraction ``q`` of the numbers lies."""
        between("q", q, 0, 1)
        if self.count == 0:
            raise NotReadyError("there is no quantile of no numbers: call add(values) first")
        position = q * (self.count - 1)
        low, high = self._at(math.floor(position)), self._at(math.ceil(position))
        return low + (position - math.floor(position)) * (high - low)

    def _at(self, rank: int) -> float:
        """The number of a rank from 0, with the numbers of a bin spread evenly over it."""
        if rank in (0, self.count - 1):
            return self.smallest if rank == 0 else self.largest
        upto = self._bins.cumsum(dim=0)
        bin_ = int(torch.searchsorted(upto, rank, right=True))
        inside = (rank - int(upto[bin_] - self._bins[bin_]) + 0.5) / int(self._bins[bin_])
        value = self._low + (bin_ + inside) * self._span / BINS
        return min(max(value, self.smallest), self.largest)
