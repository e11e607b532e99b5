"""OpenMax, and the fit of its Weibull distributions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.detectors.base import Outputs
from kedge.detectors.features import TrainingFeatures
from kedge.detectors.logits import LogitDetector
from kedge.detectors.registry import register
from kedge.errors import InputError

TRANSLATION = 10_000.0  # libMR, which the paper uses, moves the smallest distance of a tail here before it fits


@register
class OpenMax(LogitDetector):
    """OpenMax (Bendale and Boult, CVPR 2016): the odds of an unknown class that takes its share of the largest logits.

    For each class, m_c is the mean of the logits of its training images that are classified correctly, and F_c a
    Weibull distribution of the ``tail`` largest of their distances ``||z - m_c||``. The logit of the i-th largest of
    ``alpha`` classes gives the part ``w = (alpha + 1 - i) / alpha F_c(||z - m_c||)`` of itself to the unknown class:
    ``z'_c = (1 - w) z_c`` and ``z'_0 = sum w z_c``. The score is ``z'_0 - logsumexp(z')``, the log-odds of the unknown
    class. Use it to see an open-set method of the logits beside others; it reads the distance to the class means in
    logits alone, and negative logits reverse the effect of its weights. One forward pass; `fit` reads a large training
    set twice and needs labels. Distributions are fitted as by the libMR of the published code, and ranks weighted as
    there; a class without a correctly classified image counts as infinitely far. https://arxiv.org/abs/1511.06233

    Args:
        net: Any classifier, unanchored or anchored.
        tail: How many of the largest distances of a class its distribution is fitted to; all of fewer images.
        alpha: How many of the largest logits are revised; all of fewer classes.

    Attributes:
        means: The mean logits of each class, (C, C), once fitted.
        weibull: Smallest distance of the tail, shape and scale of each class, (C, 3), once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> labelled = [(torch.rand(3, 2, 2), i % 2) for i in range(50)]
        >>> OpenMax(net).fit(labelled).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "openmax"
    options = ("tail", "alpha")
    learned = ("means", "weibull")
    grid: Mapping[str, Sequence[Any]] = {"tail": (10, 20, 50), "alpha": (1, 3, 10, 20)}
    learns_logits = True
    needs_labels = True
    reads_twice = True

    def __init__(self, net: nn.Module, *, tail: int = 20, alpha: int = 10) -> None:
        super().__init__(net)
        self.tail, self.alpha = at_least("tail", tail, 1), at_least("alpha", alpha, 1)
        self.means: Any = None
        self.weibull: Any = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Learn the mean logits of each class, then the distribution of the largest distances to them."""
        sums = counts = torch.zeros(())
        for logits, _, labels in batches:
            z, y = correctly_classified(logits, labels)
            sums = sums.to(z.device) + z.new_zeros(z.shape[1], z.shape[1]).index_add_(0, y, z)
            counts = counts.to(z.device) + y.bincount(minlength=z.shape[1])
        if not bool(counts.any()):
            raise InputError(
                "train_set must have images that the network classifies correctly, since OpenMax learns from those; "
                "none is: check that labels are numbered as the network's outputs are"
            )
        self.means = sums / counts.clamp_min(1)[:, None]
        largest = self.means.new_full((len(self.means), self.tail), -torch.inf)
        for logits, _, labels in batches:
            z, y = correctly_classified(logits, labels)
            distances = (z - self.means[y]).norm(dim=1)
            for c in y.unique().tolist():
                largest[c] = torch.cat([largest[c], distances[y == c]]).topk(self.tail).values
        rows = [weibull_tail(tail[tail.isfinite()]) for tail in largest]
        self.weibull = torch.tensor(rows, dtype=torch.float64, device=largest.device)

    def of_logits(self, logits: Tensor) -> Outputs:
        """The logits (B, C) as they are, and the log-odds of the unknown class."""
        means, weibull = self.means.to(logits.device), self.weibull.to(logits.device)
        alpha = min(self.alpha, logits.shape[1])
        z, chosen = logits.double(), logits.topk(alpha).indices  # (B, alpha), the largest first
        top = z.gather(1, chosen)
        distances = (z[:, None] - means[chosen]).norm(dim=2)  # (B, alpha)
        smallest, shape, scale = weibull[chosen].unbind(dim=2)
        share = -torch.expm1(-((distances - smallest + TRANSLATION).clamp_min(0) / scale).pow(shape))
        rank = torch.arange(alpha, 0, -1, device=z.device) / alpha
        given = rank * share * top  # (B, alpha)
        known = z.scatter(1, chosen, top - given).logsumexp(dim=1)
        return Outputs(logits, (given.sum(dim=1) - known).to(logits.dtype))


def correctly_classified(logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of the images that are classified correctly, in float64, and their labels."""
    assert labels is not None
    right = logits.argmax(dim=1) == labels
    return logits[right].double(), labels[right]


def weibull_tail(distances: Tensor) -> tuple[float, float, float]:
    """The smallest distance (n,), and shape and scale of the Weibull distribution that is most likely for them.

    The distribution is that of the distances moved so that the smallest is `TRANSLATION`. A tail without distances has
    an infinite probability everywhere; one of equal distances is a step.
    """
    if len(distances) == 0:
        return 0.0, 1.0, 1e-300
    smallest, largest = distances.aminmax()
    top = float(largest - smallest) + TRANSLATION
    log_x = torch.log1p((distances - largest) / top)  # of x over the largest x, at most 0
    shape = weibull_shape(log_x)
    scale = top * float((shape * log_x).exp().mean()) ** (1 / shape)
    return float(smallest), shape, scale


def weibull_shape(log_x: Tensor) -> float:
    """The most likely shape k for logarithms (n,) of which the largest is 0.

    It is where ``sum x^k log x / sum x^k - mean log x = 1 / k``. The difference of the sides rises with k.
    """
    spread = max(-float(log_x.mean()), 1e-12)  # a bound on 1 / k
    low = high = 1 / spread

    def slope(k: float) -> float:
        return float((k * log_x).softmax(dim=0) @ log_x - log_x.mean()) - 1 / k

    while slope(high) < 0 and high < 1e15:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return (low + high) / 2
