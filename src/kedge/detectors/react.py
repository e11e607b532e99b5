"""ReAct."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import between, finite, one_of
from kedge.data import Preprocess
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.quantile import StreamingQuantile
from kedge.detectors.registry import register
from kedge.errors import InputError
from kedge.models.classifier import evaluating
from kedge.models.head import check_head, head_name


@register
class ReAct(Detector):
    """Rectified activations (Sun, Guo and Li, NeurIPS 2021): the energy after cutting off large activations.

    The vector before the last layer is clipped at a percentile of the activations of all training images, and the score
    is that of the logits which the last layer makes of it; labels come from the logits as they are. Unknown images tend
    to make a few units far more active than any training image does, and clipping takes away the confidence that comes
    from those. Use it on large networks, where energy is fooled by such units; on small ones it may cost more than it
    gives. Costs one forward pass; `fit` reads the training set once.

    Args:
        net: A classifier, plain or anchored, that ends in a linear layer. With anchors the mean vector is clipped.
        percentile: The share of the training activations to leave as they are, in (0, 1].
        score: ``"energy"``, as in the paper, ``"msp"``, ``"max_logit"``, ``"entropy"`` or ``"kl_uniform"``.
        head: The name of the last linear layer, where it is not the one registered last.

    Attributes:
        clip: The value that activations are clipped at, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> ReAct(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "react"
    reads = "features"

    def __init__(
        self, net: nn.Module, *, percentile: float = 0.9, score: str = "energy", head: str | None = None
    ) -> None:
        super().__init__(net)
        if percentile == 0:
            raise InputError("percentile must lie in (0, 1], as a share of the activations; got 0")
        self.percentile = between("percentile", percentile, 0, 1)
        self.score_by = one_of("score", score, tuple(scores.SCORES))
        self.head = head_name(self.net.network, head)
        self.clip: float | None = None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Find the percentile of all activations of the training images."""
        super().fit_method(train_set, preprocess)
        seen = StreamingQuantile()
        with evaluating(self.net), torch.no_grad():
            for x, _ in self.inputs(train_set, preprocess):
                logits, z = self._read(x)
                finite("features", z, "check the network's weights")
                if seen.count == 0:
                    check_head(self.net.network, self.head, logits, z)
                seen.add(z)
        clip = seen.quantile(self.percentile)
        if self.percentile < 1 and clip - seen.smallest <= 1e-5 * (seen.largest - seen.smallest):
            raise InputError(
                f"percentile must be higher for this network: a share of {self.percentile} of its activations have the "
                f"smallest value, {seen.smallest:.3g}, so that clipping there leaves nothing of the others; try 0.99"
            )
        self.clip = clip

    def outputs(self, x: Tensor) -> Outputs:
        """The logits as they are, and the score of those of the clipped activations."""
        assert self.clip is not None
        logits, z = self._read(x)
        clipped = self.net.network.get_submodule(self.head)(z.clamp(max=self.clip))  # (B, C)
        return Outputs(logits, scores.SCORES[self.score_by](clipped))

    def config(self) -> dict[str, Any]:
        """The arguments, with the head by its name."""
        return {"percentile": self.percentile, "score": self.score_by, "head": self.head}

    def state(self) -> dict[str, Tensor]:
        """The value to clip at."""
        return {} if self.clip is None else {"clip": torch.tensor(self.clip, dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the value back."""
        self.clip = float(state["clip"])

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and the head's input (B, d)."""
        layer = f"{self.head}:in"
        logits, features = self.net.features(x, [layer])
        return logits, features[layer]
