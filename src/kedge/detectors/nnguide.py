"""NNGuide."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.detectors.bank import BankDetector, sample_rows
from kedge.detectors.base import Outputs
from kedge.detectors.features import TrainingFeatures
from kedge.detectors.registry import register
from kedge.detectors.search import directions, largest


@register
class NNGuide(BankDetector):
    """Nearest neighbour guidance (Park, Jung and Teoh, ICCV 2023): the energy, guided by similar training images.

    The guidance of an image is the mean of the k largest products ``E_i cos(h, h_i)`` over training images, where h
    are the features before the last layer and ``E = logsumexp(logits)``; the score is ``-E`` times the guidance.
    Far from all training images the energy is often too large, and the guidance small. Use it where the energy works
    on near but not on far unknown images; it assumes that energies are positive, as those of trained classifiers
    are. One forward pass and a comparison with the training images that are kept, or from 50,000 on with a
    few hundred that an index finds; needs no labels.
    https://arxiv.org/abs/2309.14888

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors, features and logits are
            means.
        k: How many neighbours; all training images if they are fewer.
        limit: Training images to keep at most, a random sample; the paper keeps 1 % of ImageNet.
        seed: Random seed of the sample and of the index.
        index: ``"exact"`` compares with every image that is kept, ``"ivf"`` with those that an inverted file finds, see
            `KNN`; ``"auto"`` is exact below 50,000 images.
        probes: Cells to search; by default as many as find 99 % of the k largest products, measured in `fit`.
        head: See `FeatureDetector`.

    Attributes:
        bank: The directions of the features that are kept, times their energies, (N, d), once fitted.
        recall: The share of the k largest products that the index finds, as of `KNN`.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> NNGuide(net, k=3).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "nnguide"
    options = ("k", "limit", "seed", "index", "probes:given_probes", "head")
    distances = False
    grid: Mapping[str, Sequence[Any]] = {"k": (1, 5, 10, 50, 100, 500)}

    def __init__(
        self,
        net: nn.Module,
        *,
        k: int = 10,
        limit: int = 50_000,
        seed: int = 0,
        index: str = "auto",
        probes: int | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(net, limit=limit, seed=seed, index=index, probes=probes, head=head)
        self.k = at_least("k", k, 1)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Keep the directions of the training images' features, or of a sample, times their energies."""
        rows = (self.rows(batch.features, batch.logits) for batch in batches)
        self.bank = sample_rows(rows, self.limit, self.seed)
        self.build_index()

    def rows(self, features: Tensor, logits: Tensor) -> Tensor:
        """The directions of features (B, d), times the energies of logits (B, C)."""
        return directions(features) * energies(logits)

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits, and the negated product of energy and guidance."""
        z = directions(features)
        products = self.compared(z, lambda q, rows: largest(q, rows, self.k, lambda q, rows: q @ rows.T)[0])  # (B, k)
        guidance = products.mean(dim=1, keepdim=True)
        return Outputs(logits, -(energies(logits) * guidance)[:, 0].to(logits.dtype))


def energies(logits: Tensor) -> Tensor:
    """The logsumexp of logits (B, C), (B, 1), in single precision at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(dim=1, keepdim=True)
