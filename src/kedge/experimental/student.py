"""Student: AMP in one forward pass, learned from an AMP detector by `kedge.distill`."""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring import Anchored
from kedge.anchoring.mean_anchor import Shifted, under_mean_anchor
from kedge.checks import at_least
from kedge.detectors.base import Outputs
from kedge.detectors.logits import RescoringDetector
from kedge.detectors.registry import register
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.conversion import convert, head_conversion
from kedge.models.head import HeadOutput, head_name
from kedge.seeds import seeded

HIDDEN = 64


class TemperatureHead(nn.Module):
    """A linear head with a second output: log tau, the spread of the anchors' sigmoids.

    If logits spread by s, their sigmoids spread by about sigmoid'(logit) s. So log tau is the logsumexp over classes of
    log sigmoid'(logits), plus log s, which two small layers, ``hidden`` wide, predict from the features; log s is the
    same for every image until it is learned.
    """

    def __init__(self, head: nn.Linear, hidden: int, seed: int) -> None:
        super().__init__()
        at_least("hidden", hidden, 1)
        with seeded(seed):
            self.log_spread = nn.Sequential(nn.Linear(head.in_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.log_spread.to(head.weight)
        self.start_at(0.0)
        self.classes = head  # last, since the last linear layer of a network is taken as its head

    def start_at(self, log_spread: float) -> None:
        """Reset to the same log s for every image."""
        last = cast(nn.Linear, self.log_spread[-1])
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, log_spread)

    def forward(self, features: Tensor) -> HeadOutput:
        """Features (B, d) to logits (B, C) and log tau (B,)."""
        logits = self.classes(features)
        fixed = logits.detach()  # learning tau does not move the logits
        slopes = F.logsigmoid(fixed) + F.logsigmoid(-fixed)  # log of sigmoid' = sigmoid (1 - sigmoid)
        return HeadOutput(logits, (slopes.logsumexp(dim=-1) + self.log_spread(features).squeeze(-1),))


head_conversion("student", TemperatureHead)


@register
class Student(RescoringDetector):
    """AMP in one forward pass: an unanchored network trained to predict the mean logits and tau of an AMP detector.

    Made and trained by `kedge.distill`. The score is the teacher's, on the logits rescaled by the predicted tau. Use
    it in place of AMP where only one pass is affordable. Away from the training images nothing ties the student to its
    teacher, so measure both on images that neither was trained on (`benchmarks/distill.py`).

    Args:
        net: A trained network from ``Student.prepare``.
        score: ``"kl_uniform"``, ``"msp"``, ``"max_logit"``, ``"entropy"``, ``"energy"`` or your own function of the
            rescaled logits (B, C).
        rescale: ``"exp"``, ``"plain"`` or ``"none"``; by default ``"exp"`` up to 200 classes and ``"plain"`` above.

    Example:
        >>> import torch
        >>> from kedge import anchor
        >>> net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> net.set_anchors(torch.rand(5, 3, 2, 2))
        >>> detector = Student(Student.prepare(net)).fit(torch.rand(8, 3, 2, 2))
        >>> detector.score(torch.rand(4, 3, 2, 2)).shape, detector.cost.forward
        (torch.Size([4]), 1)
    """

    name = "student"
    reads = "output"
    has_tau = True

    def __init__(self, net: nn.Module, *, score: str | scores.Score = "kl_uniform", rescale: str | None = None) -> None:
        super().__init__(net, score=score, rescale=rescale)
        temperature_head(self.net)

    @classmethod
    def prepare(cls, net: nn.Module, *, hidden: int = HIDDEN, head: str | None = None, seed: int = 0) -> Any:
        """An unanchored copy of a network with a `TemperatureHead` in place of its last linear layer, or of ``head``.

        The mean anchor of an anchored network becomes part of its first layer (`under_mean_anchor`).
        """
        unanchored = under_mean_anchor(net) if isinstance(net, Anchored) else net
        network = unanchored.network if isinstance(unanchored, Classifier) else unanchored
        if any(isinstance(module, TemperatureHead) for module in network.modules()):
            raise InputError("net must not have a temperature head yet; it has one: train it as it is")
        name = head_name(network, head)
        if any(isinstance(module, Shifted) and name.startswith(f"{at}.") for at, module in network.named_modules()):
            raise ArchitectureError("net must have a head after its first layer; its first linear layer is its last")
        return convert(unanchored, "student", head=name, hidden=hidden, seed=seed)

    def outputs(self, x: Tensor) -> Outputs:
        """Logits, tau, and the score of the rescaled logits."""
        return self.of_output(self.net(x, raw=True))

    def of_output(self, output: Any) -> Outputs:
        """Outputs from the network's raw output: tensor operations only."""
        tau = output.extra[0].exp()
        return Outputs(output.logits, self.rescored(output.logits, tau), tau)


def temperature_head(net: Classifier) -> TemperatureHead:
    """Return the temperature head of a network, or raise an error that says how to get one."""
    head = next((module for module in net.network.modules() if isinstance(module, TemperatureHead)), None)
    if head is None or isinstance(net, Anchored):
        raise InputError(
            "net must be an unanchored network with a temperature head; make and train one with "
            "kedge.distill(detector, train_set), or make one with kedge.Student.prepare(net)"
        )
    return head
