"""ReAct."""

from typing import Any

from torch import Tensor, nn

from kedge import scores
from kedge.checks import between, one_of
from kedge.data import Preprocess
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector
from kedge.detectors.quantile import StreamingQuantile
from kedge.detectors.registry import register
from kedge.errors import InputError


@register
class ReAct(FeatureDetector):
    """Rectified activations (Sun, Guo and Li, NeurIPS 2021): the energy after clipping large activations.

    The vector z before the last layer is clipped at a percentile c of the activations of all training images, and the
    score is that of the logits ``W min(z, c) + b``; labels come from the unclipped logits. Unknown images tend to make
    a few units far more active than any training image does, and clipping removes the confidence that comes from them.
    Use it on large networks, where energy is fooled by such units; on small ones it may cost more than it gains. One
    forward pass; `fit` reads the training set once. https://arxiv.org/abs/2111.12797

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors the mean vector is clipped.
        percentile: The share of the training activations to leave as they are, in (0, 1].
        score: ``"energy"``, as in the paper, ``"msp"``, ``"max_logit"``, ``"entropy"`` or ``"kl_uniform"``.
        head: The name of the last linear layer, if it is not the one registered last.

    Attributes:
        clip: The value that activations are clipped at, once fitted.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> ReAct(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "react"
    learned = ("clip",)

    def __init__(
        self, net: nn.Module, *, percentile: float = 0.9, score: str = "energy", head: str | None = None
    ) -> None:
        super().__init__(net, head=head)
        if percentile == 0:
            raise InputError("percentile must lie in (0, 1], as a share of the activations; got 0")
        self.percentile = between("percentile", percentile, 0, 1)
        self.score_by = one_of("score", score, tuple(scores.SCORES))
        self.clip: float | None = None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Take the percentile of all activations of the training images."""
        super().fit_method(train_set, preprocess)
        activations = StreamingQuantile()
        for _, z in self.training_features(train_set, preprocess):
            activations.add(z)
        clip, smallest = activations.quantile(self.percentile), activations.smallest
        if self.percentile < 1 and clip - smallest <= 1e-5 * (activations.largest - smallest):
            raise InputError(
                f"percentile must be higher for this network: a share of {self.percentile} of its activations have the "
                f"smallest value, {smallest:.3g}, so that clipping there leaves nothing of the others; try 0.99"
            )
        self.clip = clip

    def outputs(self, x: Tensor) -> Outputs:
        """The unclipped logits, and the score of the logits of clipped activations."""
        logits, z = self.features(x)
        clipped = self.net.network.get_submodule(str(self.head))(z.clamp(max=self.clip))  # (B, C)
        return Outputs(logits, scores.SCORES[self.score_by](clipped))

    def config(self) -> dict[str, Any]:
        """The arguments, with the head by its name."""
        return {"percentile": self.percentile, "score": self.score_by, "head": self.head}
