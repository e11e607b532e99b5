"""ReAct."""

from torch import Tensor, nn

from kedge import scores
from kedge.checks import one_of
from kedge.detectors.base import Outputs
from kedge.detectors.logits import LogitDetector
from kedge.detectors.registry import register


@register
class ReAct(LogitDetector):
    """Rectified activations (Sun, Guo and Li, NeurIPS 2021): the energy after clipping large activations.

    The vector z before the last layer is clipped at a percentile c of the activations of all training images, and the
    score is that of the logits ``W min(z, c) + b``; labels come from the unclipped logits. Unknown images tend to make
    a few units far more active than any training image does, and clipping removes the confidence that comes from them.
    Use it on large networks, where such units mislead the energy; on small ones it may lose more than it gains. One
    forward pass; `fit` reads the training set once. The same as ``shape="react"`` of a logit method.
    https://arxiv.org/abs/2111.12797

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors the mean vector is clipped.
        percentile: The share of the training activations to leave as they are, in (0, 1].
        score: ``"energy"``, as in the paper, ``"msp"``, ``"max_logit"``, ``"entropy"`` or ``"kl_uniform"``.
        head: See `FeatureDetector`.

    Attributes:
        clip: The value that activations are clipped at, once fitted.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> ReAct(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "react"
    reads = "features"
    options = ("percentile", "score:score_by", "head")

    def __init__(
        self, net: nn.Module, *, percentile: float = 0.9, score: str = "energy", head: str | None = None
    ) -> None:
        super().__init__(net, shape="react", percentile=percentile, head=head)
        self.score_by = one_of("score", score, tuple(scores.SCORES))

    def of_logits(self, logits: Tensor) -> Outputs:
        """The chosen score of logits (B, C)."""
        return Outputs(logits, scores.SCORES[self.score_by](logits))
