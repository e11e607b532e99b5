"""Deep ensembles."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from kedge.detectors.registry import register
from kedge.detectors.sampled import SampledDetector
from kedge.models.classifier import evaluating
from kedge.models.ensemble import Ensemble


@register
class DeepEnsemble(SampledDetector):
    """Deep ensembles (Lakshminarayanan, Pritzel and Blundell, NeurIPS 2017): the mean softmax of several networks.

    Networks trained from different seeds agree on images like those they were trained on and often differ elsewhere, so
    their mean is less sure of what none of them has seen. It is usually more accurate and better calibrated than any
    one of its members, and hard to beat where the members can be paid for: M networks take M times the training, the
    memory and the forward passes of one. An ensemble of one with the score ``"msp"`` is MSP. Members may be anchored;
    each then answers with the mean over its own anchors.

    Args:
        members: A list of networks, plain or anchored, or an `Ensemble` of them.
        score: ``"msp"`` or ``"entropy"`` of the mean softmax, or the ``"mutual_information"`` of label and member,
            which needs at least two of them.

    Example:
        >>> import torch
        >>> members = [nn.Sequential(nn.Flatten(), nn.Linear(12, 2)) for _ in range(3)]
        >>> detector = DeepEnsemble(members).fit(torch.rand(8, 3, 2, 2))
        >>> detector.score(torch.rand(4, 3, 2, 2)).shape, detector.cost.forward
        (torch.Size([4]), 3)
    """

    name = "ensemble"
    net: Ensemble

    def __init__(self, members: Sequence[nn.Module] | Ensemble, *, score: str = "msp") -> None:
        net = members if isinstance(members, Ensemble) else Ensemble(members)
        super().__init__(net, samples=len(net.members), score=score)

    def sampled_logits(self, x: Tensor) -> Tensor:
        """The logits of each member, (M, B, C)."""
        with evaluating(self.net):
            return self.net.members_logits(x)

    def config(self) -> dict[str, Any]:
        """The score."""
        return {"score": self.score_by}
