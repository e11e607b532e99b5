"""A Gaussian posterior of a head's last layer, as a reference for uncertainty: the Laplace approximation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PRECISIONS = tuple(10.0**power for power in range(-2, 5))  # of the prior, to choose from


@dataclass(frozen=True)
class LastLayerLaplace:
    """Laplace approximation with a Kronecker-factored curvature, for the last layer alone (Daxberger et al. 2021).

    The curvature of the cross entropy is ``sum_n L_n (x) h_n h_n^T`` with ``L = diag(p) - p p^T``, for features h with
    a constant 1; it is approximated by ``mean(L_n) (x) sum h_n h_n^T``. The logits then have the variance
    ``sum_ij (h . a_i)^2 g_j[c]^2 / (alpha_i gamma_j + precision)``, by the eigenvectors of both factors, and are
    divided by ``sqrt(1 + pi / 8 variance)``. https://arxiv.org/abs/2106.14806

    Args:
        basis: Eigenvectors of the factor of features, (d + 1, d + 1).
        alpha: Its eigenvalues.
        classes: Eigenvectors of the factor of classes, (C, C).
        gamma: Its eigenvalues.
        precision: Of the prior.
    """

    basis: Tensor
    alpha: Tensor
    classes: Tensor
    gamma: Tensor
    precision: float

    @classmethod
    def fit(cls, h: Tensor, logits: Tensor, held_out: tuple[Tensor, Tensor, Tensor | None]) -> "LastLayerLaplace":
        """The posterior for training features (N, d) and logits (N, C).

        The prior's precision is that of the smallest cross entropy on held-out features, logits and labels.
        """
        h, p = _with_one(h).double(), logits.double().softmax(dim=-1)
        alpha, basis = torch.linalg.eigh(h.T @ h)
        curvature = p.mean(dim=0).diag() - p.T @ p / len(p)
        gamma, classes = torch.linalg.eigh(curvature)
        fitted = [cls(basis, alpha.clamp_min(0), classes, gamma.clamp_min(0), each) for each in PRECISIONS]
        features, z, labels = held_out
        if labels is None:
            return fitted[PRECISIONS.index(1.0)]
        return min(fitted, key=lambda each: float(F.cross_entropy(each(features, z)[0], labels)))

    def __call__(self, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) less certain by their variance, and the variance's mean over classes (B,)."""
        projected = (_with_one(h).double() @ self.basis).square()  # (B, d + 1)
        shrunk = projected @ (1 / (self.alpha[:, None] * self.gamma + self.precision))  # (B, C): by eigenvector
        variance = shrunk @ self.classes.T.square()  # (B, C)
        certain = logits.double() / (1 + math.pi / 8 * variance).sqrt()
        return certain.to(logits.dtype), variance.mean(dim=1).to(logits.dtype)


def _with_one(h: Tensor) -> Tensor:
    return torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
