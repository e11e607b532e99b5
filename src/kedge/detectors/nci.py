"""NCI."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import between
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures, mean_features
from kedge.detectors.registry import register


@register
class NCI(FeatureDetector):
    """Neural collapse (Liu and Qin, CVPR 2025): how well the features align with the weights of the predicted class.

    In a network trained to the end the features h of a class, less the mean m of all training features, point where the
    class's row w of the last layer's weight does. The score is ``-(w . (h - m) / ||h - m|| + alpha ||h||_1)`` for the
    predicted class; the second term also calls images with small features unknown. Use it on networks trained for long,
    whose features are concentrated around their class means. One forward pass; `fit` reads the training set once and
    needs no labels. https://arxiv.org/abs/2311.01479

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors, features and logits are
            means.
        alpha: The weight of the L1 norm; the published code chooses among 0.0001, 0.001, 0.01 and 0.1 by OOD
            validation images and begins with 0.0001.
        head: See `FeatureDetector`.

    Attributes:
        mean: The mean features (d,), once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> NCI(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "nci"
    options = ("alpha", "head")
    learned = ("mean",)
    grid: Mapping[str, Sequence[Any]] = {"alpha": (1e-4, 1e-3, 1e-2, 0.1)}

    def __init__(self, net: nn.Module, *, alpha: float = 1e-4, head: str | None = None) -> None:
        super().__init__(net, head=head)
        self.alpha = between("alpha", alpha, 0, float("inf"))
        self.mean: Any = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Learn the mean features."""
        self.mean = mean_features(batches)

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits, and the negated alignment and norm."""
        h = features.double()
        centred, weight = h - self.mean.to(h.device), self.last_layer.weight[logits.argmax(dim=1)]  # (B, d)
        length = centred.norm(dim=1).clamp_min(torch.finfo(features.dtype).tiny)
        alignment = (weight * centred).sum(dim=1) / length
        return Outputs(logits, -(alignment + self.alpha * h.abs().sum(dim=1)).to(logits.dtype))
