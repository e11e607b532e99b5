"""Class Gaussians with one covariance, learned in one pass over features."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 10.0  # how many units in the last place the rounding of a whole network amounts to, generously


@dataclass(frozen=True)
class Gaussians:
    """Class Gaussians with one covariance, as whitened class means: distances between whitened vectors are Euclidean.

    Attributes:
        centre: The mean of all training features, (D,).
        whitening: W with W W^T the precision, one column for each direction in which features vary, (D, R).
        means: (mean of the class - centre) W, for each class that has images, (C, R).
    """

    centre: Tensor
    whitening: Tensor
    means: Tensor


class ClassStatistics:
    """Counts and means of classes and the scatter around them, of features that come in batches, in float64.

    Batches are merged by Chan's formula: what is added up are products of differences, never of the features
    themselves, so a large mean costs no digits.

    Example:
        >>> seen = ClassStatistics(classes=2, width=1)
        >>> seen.add(torch.tensor([[1.0], [3.0], [8.0]]), torch.tensor([0, 0, 1]))
        >>> seen.means.tolist(), seen.scatter.tolist()
        ([[2.0], [8.0]], [[2.0]])
    """

    def __init__(self, classes: int, width: int, device: torch.device | None = None) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.means = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Take in a batch of features (B, D) and their classes (B,)."""
        present, index = labels.unique(return_inverse=True)  # (P,), (B,)
        features = features.double()
        new = index.bincount(minlength=len(present)).double()  # (P,)
        sums = features.new_zeros(len(present), features.shape[1]).index_add_(0, index, features)  # (P, D)
        means = sums / new[:, None]
        centred = features - means[index]  # (B, D)
        old = self.counts[present]
        moved = means - self.means[present]  # (P, D)
        self.scatter += centred.T @ centred + moved.T @ ((old * new / (old + new))[:, None] * moved)
        self.means[present] += moved * (new / (old + new))[:, None]
        self.counts[present] += new

    def gaussians(self, rounding: float) -> Gaussians:
        """The Gaussians of the classes that have images.

        The precision is the pseudo-inverse of the covariance, without the directions that vary less than features are
        exact: dividing by that variance would make a score of the noise.

        Args:
            rounding: The relative error of a feature.
        """
        seen = self.counts > 0
        share = self.counts[seen] / self.counts.sum()  # (C,)
        centre = share @ self.means[seen]  # (D,)
        covariance = self.scatter / self.counts.sum()
        variances, directions = torch.linalg.eigh(covariance)  # (D,), (D, D)
        squares = covariance.diagonal() + share @ self.means[seen] ** 2  # the mean square of each feature, (D,)
        noise = rounding**2 * squares @ directions**2  # (D,)
        floor = len(variances) * torch.finfo(torch.float64).eps * variances[-1]  # as scipy.linalg.pinvh
        kept = variances > noise.clamp(min=floor)
        whitening = directions[:, kept] / variances[kept].sqrt()  # (D, R)
        return Gaussians(centre, whitening, (self.means[seen] - centre) @ whitening)


def squared_distances(features: Tensor, gaussians: Gaussians) -> Tensor:
    """The squared Mahalanobis distance to the closest class mean, (B, D) -> (B,), in float64.

    Example:
        >>> unit = Gaussians(torch.zeros(2), torch.eye(2), torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
        >>> squared_distances(torch.tensor([[3.0, 2.0]]), unit)
        tensor([5.], dtype=torch.float64)
    """
    centre, whitening, means = (
        value.to(features.device, torch.float64) for value in (gaussians.centre, gaussians.whitening, gaussians.means)
    )
    white = (features.double() - centre) @ whitening  # (B, R)
    # |w - m|^2 without a (B, C, R) tensor; in float64, and centred, the difference of squares loses nothing that counts
    squared = white.square().sum(dim=1, keepdim=True) - 2 * white @ means.T + means.square().sum(dim=1)  # (B, C)
    return squared.clamp(min=0).amin(dim=1)
