"""A Gaussian process in place of a network's last layer, as a reference for uncertainty."""

import itertools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS = (0.25, 0.5, 1.0)  # of the kernel, relative to the median distance of training features, to choose from
NOISES = (0.01, 0.1, 1.0)
FACTORS = tuple(2.0**power for power in range(1, 9))  # of the logits
MOST = 2_000  # training features


@dataclass(frozen=True)
class GaussianProcess:
    """Exact Gaussian-process regression of one-hot labels on features of unit length, squared exponential kernel.

    It is what the last layer of SNGP (Liu et al. 2020) approximates by random features and Laplace's method. With
    ``A = (K + noise I)^-1``, the mean is ``m = k(x, X) A (Y - mean Y) + mean Y``, the variance
    ``v = 1 - k(x, X) A k(X, x)``, and as in SNGP the logits ``factor m`` are divided by
    ``sqrt(1 + pi / 8 factor^2 v)``. https://arxiv.org/abs/2006.10108

    Args:
        x: Training features of unit length, (N, d).
        cholesky: The factor of K + noise I, (N, N).
        weights: (K + noise I)^-1 (Y - mean Y), (N, C).
        prior: mean Y, (C,).
        length: Of the kernel.
        factor: Of the logits.
    """

    x: Tensor
    cholesky: Tensor
    weights: Tensor
    prior: Tensor
    length: float
    factor: float = 1.0

    @classmethod
    def fit(cls, h: Tensor, labels: Tensor, *, length: float, noise: float) -> "GaussianProcess":
        """The process for training features (N, d) and labels (N,)."""
        x, y = F.normalize(h.double(), dim=1), F.one_hot(labels).double()
        kernel = torch.exp(-(torch.cdist(x, x) ** 2) / (2 * length**2))
        cholesky = torch.linalg.cholesky(kernel + noise * torch.eye(len(x), dtype=x.dtype))
        prior = y.mean(dim=0)
        return cls(x, cholesky, torch.cholesky_solve(y - prior, cholesky), prior, length)

    @classmethod
    def chosen(cls, h: Tensor, labels: Tensor, held_out: tuple[Tensor, Tensor]) -> "GaussianProcess":
        """The process with the smallest cross entropy on held-out features and labels."""
        median = float(torch.pdist(F.normalize(h[:500].double(), dim=1)).median())
        tried: list[tuple[float, GaussianProcess]] = []
        for length, noise in itertools.product(LENGTHS, NOISES):
            fitted = cls.fit(h, labels, length=length * median, noise=noise)
            mean, variance = fitted.predict(held_out[0])
            for factor in FACTORS:
                loss = float(F.cross_entropy(_less_certain(mean, variance, factor), held_out[1]))
                tried.append((loss, replace(fitted, factor=factor)))
        return min(tried, key=lambda each: each[0])[1]

    def predict(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Means (B, C) and variances (B,) at features (B, d)."""
        cross = torch.exp(-(torch.cdist(F.normalize(h.double(), dim=1), self.x) ** 2) / (2 * self.length**2))  # (B, N)
        explained = torch.linalg.solve_triangular(self.cholesky, cross.T, upper=False).square().sum(dim=0)
        return cross @ self.weights + self.prior, (1 - explained).clamp_min(0)

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) less certain by their variance, and the variance (B,)."""
        mean, variance = self.predict(h)
        return _less_certain(mean, variance, self.factor).to(h.dtype), variance.to(h.dtype)


def _less_certain(mean: Tensor, variance: Tensor, factor: float) -> Tensor:
    return factor * mean / (1 + math.pi / 8 * factor**2 * variance[:, None]).sqrt()
