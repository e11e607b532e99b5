"""Reconstruction errors of kernel principal components: CoP and CoRP."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge.checks import at_least, between
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.gaussians import ClassStatistics
from kedge.detectors.registry import register
from kedge.detectors.search import directions

VARIANCES = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)


@register
class CoP(FeatureDetector):
    """Kernel PCA with a cosine kernel (Fang et al., NeurIPS 2024): what the main directions of known images leave over.

    Features z before the last layer are mapped to ``f = z / ||z||``, and centred by their mean m over the training
    images. With U the fewest principal components of the training images that explain the share ``variance`` of their
    variance, the score is the reconstruction error ``||(I - U U^T)(f - m)||``. Use it as KNN, where a training
    set is too large to be kept: it assumes a subspace and no classes, and needs no labels. One forward pass and a
    matrix; `fit` reads the training set once. https://arxiv.org/abs/2402.02949

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer.
        variance: The share of the variance that is explained, in (0, 1); the paper's is 0.85 for CIFAR-10 and 0.99 for
            ImageNet.
        head: See `FeatureDetector`.

    Attributes:
        mean: The mean of the mapped features, (M,), once fitted.
        components: The principal components U, (M, q), once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> CoP(net).fit(torch.rand(50, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "cop"
    options: ClassVar[tuple[str, ...]] = ("variance", "head")
    learned: tuple[str, ...] = ("mean", "components")
    grid: Mapping[str, Sequence[Any]] = {"variance": VARIANCES}

    def __init__(self, net: nn.Module, *, variance: float = 0.85, head: str | None = None) -> None:
        super().__init__(net, head=head)
        self.variance = between("variance", variance, 0, 1, open_ends=True)
        self.mean: Any = None
        self.components: Any = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Find the principal components of the mapped features."""
        statistics: ClassStatistics | None = None
        for batch in batches:
            if statistics is None:
                self.prepare_map(batch.features.shape[1])
            mapped = self.mapped(batch.features)
            statistics = statistics or ClassStatistics(1, mapped.shape[1], mapped.device)
            statistics.add(mapped, torch.zeros(len(mapped), dtype=torch.int64, device=mapped.device))
        assert statistics is not None
        self.mean = statistics.means[0]
        self.components = main_directions(statistics.scatter, self.variance)

    def prepare_map(self, width: int) -> None:
        """Draw what is random in the map of features of a width."""

    def mapped(self, features: Tensor) -> Tensor:
        """Features (B, d) in the space whose inner product is the kernel, (B, M), in float64."""
        return directions(features).double()

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits as they are, and the reconstruction error."""
        components = self.components.to(features.device)
        centred = self.mapped(features) - self.mean.to(features.device)
        return Outputs(logits, (centred - centred @ components @ components.T).norm(dim=1).to(features.dtype))


@register
class CoRP(CoP):
    """Kernel PCA with a Gaussian kernel of directions (Fang et al., NeurIPS 2024), by random Fourier features.

    As `CoP`, with ``f = sqrt(2 / M) cos(W z / ||z|| + u)``: M random Fourier features of the Gaussian kernel
    ``exp(-gamma ||a - b||^2)``, with W normal of variance 2 gamma and u uniform in [0, 2 pi). In that space the main
    directions follow curved clouds of features too. Use it where CoP is weak. One forward pass and two matrices;
    `fit` reads the training set once and needs no labels; the saved file holds M (d + q) numbers for q components.
    https://arxiv.org/abs/2402.02949

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer.
        variance: The share of the variance that is explained; the paper's is 0.8 for CIFAR-10 and 0.5 for ImageNet.
        gamma: Of the kernel; the paper's is 2 for CIFAR-10 and 3 for ImageNet.
        m: Number of random features; by default, as in the paper, 2048 for 512 features and 4096 for 2048: between 2
            and 4 times as many as features.
        seed: Random seed of the map.
        head: See `FeatureDetector`.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> CoRP(net).fit(torch.rand(50, 3, 2, 2)).components.shape[0]
        32
    """

    name = "corp"
    options = ("variance", "gamma", "m:given", "seed", "head")
    learned = ("mean", "components", "frequencies", "phases")
    grid: Mapping[str, Sequence[Any]] = {"variance": VARIANCES, "gamma": (0.5, 1.0, 2.0, 3.0)}

    def __init__(
        self,
        net: nn.Module,
        *,
        variance: float = 0.8,
        gamma: float = 2.0,
        m: int | None = None,
        seed: int = 0,
        head: str | None = None,
    ) -> None:
        super().__init__(net, variance=variance, head=head)
        self.gamma = between("gamma", gamma, 0, math.inf, open_ends=True)
        self.given = m if m is None else at_least("m", m, 1)
        self.seed = at_least("seed", seed, 0)
        self.frequencies: Any = None  # (M, d)
        self.phases: Any = None  # (M,)

    def prepare_map(self, width: int) -> None:
        """Draw the frequencies and phases of the random features."""
        generator, m = torch.Generator().manual_seed(self.seed), self.given or default_m(width)
        self.frequencies = math.sqrt(2 * self.gamma) * torch.randn(m, width, generator=generator)
        self.phases = 2 * math.pi * torch.rand(m, generator=generator)

    def mapped(self, features: Tensor) -> Tensor:
        """The random Fourier features (B, M) of features (B, d), in float64."""
        frequencies, phases = (value.to(features.device).double() for value in (self.frequencies, self.phases))
        waves: Tensor = torch.cos(super().mapped(features) @ frequencies.T + phases)
        return waves.mul(math.sqrt(2 / len(phases)))


def default_m(width: int) -> int:
    """The number of random features for a width: the paper's 2048 for 512 and 4096 for 2048."""
    return min(4 * width, max(2048, 2 * width))


def main_directions(scatter: Tensor, share: float) -> Tensor:
    """The fewest eigenvectors, as columns (M, q), whose eigenvalues sum to a share of the trace of a scatter (M, M)."""
    values, vectors = torch.linalg.eigh(scatter)  # ascending
    explained = values.clamp(min=0).flip(0).cumsum(0)
    count = int((explained < share * explained[-1]).sum()) + 1 if explained[-1] > 0 else 0
    kept: Tensor = vectors[:, len(values) - count :].contiguous()
    return kept
