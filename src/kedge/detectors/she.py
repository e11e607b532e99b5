"""SHE and HE."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge.checks import at_least, between, one_of
from kedge.detectors.bank import sample_rows
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.detectors.search import ROWS
from kedge.errors import InputError

PATTERNS = ("mean", "all")


@register
class SHE(FeatureDetector):
    """Simplified Hopfield energy (Zhang et al., ICLR 2023): how the features resemble those of the predicted class.

    The pattern of a class is the mean feature of its training images that the network classifies correctly; the score
    is the negated inner product of an image's features with the pattern of its predicted class. Like the energy it
    grows with the length of the features, but it also sees their direction. Use it where training images of a class
    are alike; it fails where features are long for unknown images. One forward pass and one product; `fit` reads the
    labelled training set once. A class without a correctly classified image gets the patterns of all classes.

    With ``patterns="all"``, by the name ``"he"``, it is the Hopfield energy that SHE simplifies: every correctly
    classified training image x of the predicted class is a pattern, and the score of features h is
    ``-1/beta log sum exp(beta x . h)``. https://openreview.net/forum?id=KkazG4lgKL

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors, features and logits are
            means.
        patterns: ``"mean"``, one pattern for each class, or ``"all"``.
        beta: The inverse temperature of the Hopfield energy; the published code takes 0.01 for ResNets and 0.2 for
            wide ResNets.
        limit: Training images to keep at most for ``patterns="all"``, a random sample.
        seed: Random seed of the sample.
        head: See `FeatureDetector`.

    Attributes:
        bank: The patterns, one class after the other, (N, d), once fitted.
        counts: How many patterns each class has, (C,).

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> labelled = [(torch.rand(3, 2, 2), i % 3) for i in range(60)]
        >>> SHE(net).fit(labelled).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "she"
    options = ("patterns", "beta", "limit", "seed", "head")
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"he": {"patterns": "all"}}
    learned = ("bank", "counts")
    needs_labels = True

    def __init__(
        self,
        net: nn.Module,
        *,
        patterns: str = "mean",
        beta: float = 0.01,
        limit: int = 50_000,
        seed: int = 0,
        head: str | None = None,
    ) -> None:
        super().__init__(net, head=head)
        self.patterns = one_of("patterns", patterns, PATTERNS)
        self.grid = {"beta": (0.001, 0.01, 0.1, 0.2, 1.0)} if patterns == "all" else {}
        self.beta = between("beta", beta, 0, float("inf"), open_ends=True)
        self.limit, self.seed = at_least("limit", limit, 1), at_least("seed", seed, 0)
        self.bank: Any = None  # (N, d)
        self.counts: Any = None  # (C,)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Keep the features of the correctly classified training images, or their mean for each class."""
        correct = self._correct(batches)
        classes = self.last_layer.out_features
        if self.patterns == "all":
            joined = (torch.cat([z, y[:, None].to(z)], dim=1) for z, y in correct)
            rows = sample_rows(joined, self.limit, self.seed)
            y = rows[:, -1].long()
            bank, counts = rows[y.argsort(stable=True), :-1], y.bincount(minlength=classes)
        else:
            bank, counts = class_means(correct, classes)
        if len(bank) == 0 or not bool(counts.any()):
            raise InputError(
                "train_set must have images that the network classifies correctly, which SHE compares with; got none: "
                "check that labels are numbered as the network's outputs are"
            )
        self.bank, self.counts = bank.contiguous(), counts

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits, and the negated energy of the features with the patterns of the predicted class."""
        bank, counts = self.bank.to(features.device), self.counts.to(features.device)
        z, label = features.to(bank.dtype), logits.argmax(dim=1)
        if self.patterns == "mean":
            return Outputs(logits, -(z * bank[label]).sum(dim=1).to(logits.dtype))
        energy = z.new_empty(len(z))
        ends = counts.cumsum(dim=0)
        for c in label.unique().tolist():
            rows = bank[int(ends[c] - counts[c]) : int(ends[c])] if counts[c] > 0 else bank
            parts = [(self.beta * z[label == c] @ part.T).logsumexp(dim=1) for part in rows.split(ROWS)]
            energy[label == c] = -torch.stack(parts).logsumexp(dim=0) / self.beta
        return Outputs(logits, energy.to(logits.dtype))

    def _correct(self, batches: TrainingFeatures) -> Iterator[tuple[Tensor, Tensor]]:
        """The features (B, d), in single precision at least, and labels (B,) of correctly classified images."""
        for logits, z, y in batches:
            assert y is not None
            right = logits.argmax(dim=1) == y
            yield z[right].to(torch.promote_types(z.dtype, torch.float32)), y[right]


def class_means(batches: Iterator[tuple[Tensor, Tensor]], classes: int) -> tuple[Tensor, Tensor]:
    """The mean features of each class (C, d), that of all for a class without images, and the counts (C,)."""
    total: Any = 0.0
    counts: Any = 0
    for z, y in batches:
        sums = z.new_zeros(classes, z.shape[1], dtype=torch.float64).index_add_(0, y, z.double())  # (C, d)
        total, counts, dtype = total + sums, counts + y.bincount(minlength=classes), z.dtype
    means = torch.where(counts[:, None] > 0, total / counts.clamp_min(1)[:, None], total.sum(dim=0) / counts.sum())
    return means.to(dtype), counts
