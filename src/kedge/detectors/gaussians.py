"""Class Gaussians of features with one covariance, and the distances to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 10.0  # a generous bound on the rounding error of a whole network, in units in the last place


@dataclass(frozen=True)
class Gaussians:
    """Class Gaussians with one covariance, whitened, so that distances between whitened vectors are Euclidean."""

    centre: Tensor  # the mean of all training features, (D,)
    whitening: Tensor  # W with W W^T the precision, R the number of directions in which features vary, (D, R)
    means: Tensor  # (mean of the class - centre) W, for each class that has images, (C, R)


class ClassStatistics:
    """Counts and means of classes and the scatter around them, of features that come in batches, in float64.

    Batches are merged by Chan's formula: the sums are of products of differences, never of the features themselves, so
    a large mean costs no digits.
    """

    def __init__(self, classes: int, width: int, device: torch.device | None = None) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.means = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch of features (B, D) and their classes (B,)."""
        present, index = labels.unique(return_inverse=True)  # (P,), (B,)
        features = features.double()
        new = index.bincount(minlength=len(present)).double()  # (P,)
        sums = features.new_zeros(len(present), features.shape[1]).index_add_(0, index, features)  # (P, D)
        means = sums / new[:, None]
        centred = features - means[index]  # (B, D)
        old = self.counts[present]
        moved = means - self.means[present]  # (P, D)
        rows = torch.cat([centred, (old * new / (old + new)).sqrt()[:, None] * moved])  # (B + P, D)
        self.scatter.addmm_(rows.T, rows)
        self.means[present] += moved * (new / (old + new))[:, None]
        self.counts[present] += new

    def merged(self) -> "ClassStatistics":
        """The statistics of all features as one class."""
        one = ClassStatistics(1, self.means.shape[1], self.means.device)
        one.counts += self.counts.sum()
        one.means += self.counts @ self.means / self.counts.sum()
        moved = self.means - one.means  # (C, D)
        one.scatter = self.scatter + moved.T @ (self.counts[:, None] * moved)
        return one

    def shrinkage(self, share: float | str) -> tuple[float, float]:
        """The share s and the variance t of the shrunk covariance ``(1 - s) S + s t I``: t is the mean variance.

        The share is given, or ``"oas"``, see `oas`.
        """
        covariance = self.scatter / self.counts.sum()
        s = oas(covariance, float(self.counts.sum())) if isinstance(share, str) else share
        return s, float(covariance.diagonal().mean())

    def gaussians(self, rounding: float, shrinkage: tuple[float, float] = (0.0, 0.0)) -> Gaussians:
        """The Gaussians of the classes that have images; ``rounding`` is the relative error of a feature.

        The precision is the pseudo-inverse of the covariance, without the directions that vary less than features are
        exact: dividing by that variance would make a score of the noise. With ``shrinkage`` (s, t) the covariance S is
        first replaced by ``(1 - s) S + s t I``, in which all directions vary.
        """
        seen = self.counts > 0
        share = self.counts[seen] / self.counts.sum()  # (C,)
        centre = share @ self.means[seen]  # (D,)
        covariance = self.scatter / self.counts.sum()
        squares = covariance.diagonal() + share @ self.means[seen] ** 2  # the mean square of each feature, (D,)
        whitening = _whitening(covariance, shrinkage, rounding**2 * squares)
        return Gaussians(centre, whitening, (self.means[seen] - centre) @ whitening)


def _whitening(covariance: Tensor, shrinkage: tuple[float, float], noise: Tensor) -> Tensor:
    """W (D, R) with W W^T the precision; see `ClassStatistics.gaussians`. ``noise`` (D,) is the variance of rounding.

    Columns are the directions of the covariance, scaled; or, where shrinkage leaves no direction out, those of the
    inverse Cholesky factor, which takes a quarter of the time.
    """
    (s, t), precision = shrinkage, len(covariance) * torch.finfo(torch.float64).eps  # as scipy.linalg.pinvh
    identity = torch.eye(len(covariance), dtype=torch.float64, device=covariance.device)
    largest = (1 - s) * float(covariance.trace()) + s * t  # at least the largest variance; the smallest is at least s t
    if s * t > max(float(noise.max()), precision * largest):
        factor = torch.linalg.cholesky((1 - s) * covariance + s * t * identity)
        inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
        return inverse.T
    variances, directions = torch.linalg.eigh(covariance)  # (D,), (D, D)
    if s > 0:
        variances = (1 - s) * variances.clamp(min=0) + s * t
    kept: Tensor = variances > (noise @ directions**2).clamp(min=precision * variances[-1])
    whitening: Tensor = directions[:, kept] / variances[kept].sqrt()
    return whitening


def oas(covariance: Tensor, n: float) -> float:
    """The shrinkage of the oracle approximating estimator (Chen et al., 2010), for a covariance (D, D) of n samples.

    It is the share s for which ``(1 - s) S + s trace(S)/D I`` is closest to the true covariance of Gaussian samples in
    expectation, near 0 for n >> D and near 1 for few samples of many features. https://arxiv.org/abs/0907.4698
    """
    square, total = float(covariance.square().sum()), float(covariance.trace())  # trace(S^2), trace(S)
    distance = (n + 1) * (square - total**2 / len(covariance))
    return min(1.0, (square + total**2) / distance) if distance > 0 else 1.0


def squared_distances(features: Tensor, gaussians: Gaussians) -> Tensor:
    """The squared Mahalanobis distance to the closest class mean, (B, D) -> (B,), in float64."""
    kept = (gaussians.centre, gaussians.whitening, gaussians.means)
    centre, whitening, means = (value.to(features.device, torch.float64) for value in kept)
    white = (features.double() - centre) @ whitening  # (B, R)
    # |w - m|^2 without a (B, C, R) tensor; in float64, and centred, the difference of squares loses nothing that counts
    squared = white.square().sum(dim=1, keepdim=True) - 2 * white @ means.T + means.square().sum(dim=1)  # (B, C)
    return squared.clamp(min=0).amin(dim=1)
