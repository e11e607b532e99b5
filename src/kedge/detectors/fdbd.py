"""fDBD."""

from typing import Any

import torch
from torch import Tensor, nn

from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures, mean_features
from kedge.detectors.registry import register


@register
class FDBD(FeatureDetector):
    """Fast decision boundary distance (fDBD; Liu and Qin, ICML 2024): how far the features are from other classes.

    The features h before the last layer lie ``|z_y - z_c| / ||w_y - w_c||`` from the boundary between the predicted
    class y and class c, where z are the logits and w the rows of the last layer's weight. The score is the mean of
    these distances over the other classes, divided by ``||h - m||``, the distance to the mean m of the training
    features, and negated: unknown images lie close to boundaries for how far out they are. Nothing to choose. Use it
    for new classes that resemble the known ones, without labels; alone it can miss images of another kind. One forward
    pass and a C x C table; `fit` reads the training set once. https://arxiv.org/abs/2312.11536

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors, features and logits are
            means.
        head: See `FeatureDetector`.

    Attributes:
        mean: The mean features (d,), once fitted.
        gaps: The distance between the weights of each pair of classes, (C, C).

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> FDBD(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "fdbd"
    reason = "between classes"
    learned = ("mean", "gaps")

    def __init__(self, net: nn.Module, *, head: str | None = None) -> None:
        super().__init__(net, head=head)
        self.mean: Any = None
        self.gaps: Any = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Learn the mean features, and measure how far the weights of classes are apart."""
        self.mean = mean_features(batches)
        weight = self.last_layer.weight.detach().double()
        # without |a|^2 + |b|^2 - 2 a.b, which cancels for classes with similar weights
        self.gaps = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits, and the negated mean distance to the boundaries, relative to that from the mean."""
        top, label = logits.double().max(dim=1)
        gaps = self.gaps.to(label.device)[label]  # (B, C)
        # Classes with the same weights have no boundary, nor has a class with itself.
        distances = torch.where(gaps > 0, (top[:, None] - logits) / gaps, 0).sum(dim=1)
        centred = features.double() - self.mean.to(features.device)
        out = centred.norm(dim=1).clamp_min(torch.finfo(features.dtype).tiny)
        return Outputs(logits, (-distances / (max(1, logits.shape[1] - 1) * out)).to(logits.dtype))
