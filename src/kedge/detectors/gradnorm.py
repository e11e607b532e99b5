"""GradNorm."""

from torch import Tensor

from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector
from kedge.detectors.registry import register


def gradnorm(logits: Tensor, features: Tensor) -> Tensor:
    """The L1 norm of the gradient, with respect to the last layer's weights, of KL(uniform, softmax), negated: (B,).

    The gradient is the outer product of ``softmax(z) - 1 / C`` and h, so that its norm is the product of their norms.

    Args:
        logits: z, (B, C).
        features: The input h of the last layer, (B, d).
    """
    off_uniform = (logits.softmax(dim=1) - 1 / logits.shape[1]).abs().sum(dim=1)  # (B,)
    return -off_uniform * features.abs().sum(dim=1)


@register
class GradNorm(FeatureDetector):
    """GradNorm (Huang, Geng and Li, NeurIPS 2021): how strongly the uniform distribution would move the last layer.

    The score is ``-||p - 1/C||_1 ||h||_1`` of the softmax p and the features h before the last layer: the L1 norm of
    the gradient, with respect to that layer's weights, of the cross entropy from uniform to p, in closed form, so that
    no gradient is taken. The published code sums over classes, a factor of C that changes no order. Use it on large
    CNNs with many classes, where known images have larger features; on small sets such as CIFAR-10, and where features
    are normalised as in transformers, it is often worse than MSP. One forward pass, nothing to fit.
    https://arxiv.org/abs/2110.00218

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors, features and logits are
            means.
        head: See `FeatureDetector`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> GradNorm(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "gradnorm"

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits, and the norm of the gradient, negated."""
        return Outputs(logits, gradnorm(logits, features))
