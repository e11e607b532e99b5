"""DICE."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.checks import between
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures, mean_features
from kedge.detectors.registry import register
from kedge.errors import InputError


@register
class DICE(FeatureDetector):
    """Directed sparsification (Sun and Li, ECCV 2022): the energy of the weights that matter for the training images.

    The contribution of feature i to class c is ``w_ci`` times the mean of feature i over the training images. The share
    ``sparsity`` of weights with the smallest contributions is set to zero, and the score is ``-logsumexp`` of the
    logits that the remaining ones give; labels come from the logits of all weights. Removes the noise of many small
    contributions that adds up on unknown images. Use it where features are many and the energy alone is weak; on small
    heads there is little noise to remove, and too sparse a head loses what tells classes apart. One forward pass;
    `fit` reads the training set once and needs no labels. https://arxiv.org/abs/2111.09805

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer.
        sparsity: The share of weights to set to zero, in [0, 1); the paper's is 0.9 for CIFAR and 0.7 for ImageNet.
        head: See `FeatureDetector`.

    Attributes:
        mask: Which weights remain, (C, d), once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> DICE(net, sparsity=0.5).fit(torch.rand(8, 3, 2, 2)).mask.sum()
        tensor(12)
    """

    name = "dice"
    options = ("sparsity", "head")
    learned = ("mask",)
    grid: Mapping[str, Sequence[Any]] = {"sparsity": (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)}

    def __init__(self, net: nn.Module, *, sparsity: float = 0.9, head: str | None = None) -> None:
        super().__init__(net, head=head)
        if sparsity == 1:
            raise InputError("sparsity must lie in [0, 1), so that some weights remain; got 1")
        self.sparsity = between("sparsity", sparsity, 0, 1)
        self.mask: Any = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Keep the weights with the largest mean contributions."""
        mean = mean_features(batches)
        self.mask = largest_contributions(self.last_layer.weight.detach(), mean, self.sparsity)

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits as they are, and the energy of those of the remaining weights."""
        layer = self.last_layer
        sparse = F.linear(features, layer.weight * self.mask.to(features.device), layer.bias)  # (B, C)
        return Outputs(logits, scores.energy(sparse))


def largest_contributions(weight: Tensor, mean: Tensor, sparsity: float) -> Tensor:
    """Which weights (C, d) remain: those whose product with the mean features (d,) is above a quantile of all."""
    products = weight.double() * mean
    if sparsity == 0:
        return torch.ones_like(products, dtype=torch.bool)
    return products > float(np.quantile(products.cpu().numpy(), sparsity))  # torch's own takes 2^24 numbers at most
