"""Energy."""

from typing import Any

from torch import Tensor, nn

from kedge import scores
from kedge.detectors.base import Outputs
from kedge.detectors.logits import LogitDetector


class Energy(LogitDetector):
    """Free energy of the logits (Liu et al., NeurIPS 2020): minus their logsumexp.

    Keeps the size of the logits, which the softmax discards. With ``centred`` it is taken of the logits less their mean
    over classes: AMP's score, without anchors. One forward pass, nothing to fit.

    Args:
        net: See `Detector`.
        centred: Whether to take it of logits less their mean. A softmax does not change when all logits of an image
            move together, so training leaves that free, and nothing says that it tells known from unknown.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> Energy(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "energy"
    score_function = "energy"

    def __init__(self, net: nn.Module, *, centred: bool = False) -> None:
        super().__init__(net)
        self.centred = centred

    def of_logits(self, logits: Tensor) -> Outputs:
        """The logits (B, C) and their score."""
        return Outputs(logits, scores.amp(logits) if self.centred else scores.energy(logits))

    def config(self) -> dict[str, Any]:
        """Whether the logits are centred."""
        return {"centred": self.centred}
