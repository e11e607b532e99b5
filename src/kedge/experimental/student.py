"""Student: AMP in one forward pass, learned from an AMP detector."""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring import Anchored
from kedge.anchoring.mean_anchor import Shifted, under_mean_anchor
from kedge.checks import at_least
from kedge.detectors.base import Outputs
from kedge.detectors.registry import register
from kedge.detectors.rescoring import RescoringDetector
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.conversion import conversion, convert
from kedge.models.head import HeadOutput, head_name
from kedge.seeds import seeded

HIDDEN = 64


class TemperatureHead(nn.Module):
    """A network's head, and beside it two small layers that tell how far the anchors' logits would spread.

    Where logits spread by s, their sigmoids spread by about sigmoid'(logit) s. So the logarithm of the temperature is
    log sum sigmoid'(logits), over classes, plus what the layers make of the features: log s.

    Args:
        head: Gives the logits; stays as it is.
        hidden: Width of the layer between features and spread.
        seed: Of its weights; the spread is the same for every image until it is learned.

    Example:
        >>> import torch
        >>> output = TemperatureHead(nn.Linear(8, 3), hidden=4, seed=0)(torch.rand(2, 8))
        >>> output.logits.shape, output.extra[0].shape
        (torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(self, head: nn.Linear, hidden: int, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.log_spread = nn.Sequential(nn.Linear(head.in_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.log_spread.to(head.weight)
        self.start_at(0.0)
        self.classes = head  # after the temperature, since the last linear layer of a network is its head

    def start_at(self, log_spread: float) -> None:
        """Forget what was learned: give the same spread to every image."""
        last = cast(nn.Linear, self.log_spread[-1])
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, log_spread)

    def forward(self, features: Tensor) -> HeadOutput:
        """Features (B, d) to logits (B, C), and the logarithm of the temperature (B,)."""
        logits = self.classes(features)
        kept = logits.detach()  # so that learning the temperature does not move the logits
        slopes = F.logsigmoid(kept) + F.logsigmoid(-kept)  # log of sigmoid' = sigmoid (1 - sigmoid)
        return HeadOutput(logits, (slopes.logsumexp(dim=-1) + self.log_spread(features).squeeze(-1),))


@conversion("student")
def with_temperature(network: nn.Module, *, head: str, hidden: int, seed: int) -> nn.Module:
    """Put a temperature beside a network's head.

    Example:
        >>> net = with_temperature(nn.Sequential(nn.Linear(4, 3)), head="0", hidden=2, seed=0)
        >>> net[0].classes.out_features
        3
    """
    network.set_submodule(head, TemperatureHead(cast(nn.Linear, network.get_submodule(head)), hidden, seed))
    return network


@register
class Student(RescoringDetector):
    """AMP in one pass: logits and temperature of the anchors together, as a plain network has learned to give them.

    An AMP detector is the teacher: `kedge.distill` trains the student on the training images, and on mixes of them,
    towards the mean over anchors of the teacher's logits and the logarithm of its temperature. The score is the
    teacher's, of the logits divided by the temperature. Far from the training images nothing ties the student to its
    teacher, so measure both on images that neither has seen (`benchmarks/distill.py`). Costs one forward
    pass, where the teacher takes one for each anchor, and a training with K more of them for each image.

    Args:
        net: A network from ``Student.prepare``, trained; `kedge.distill` does both.
        score: ``"kl_uniform"``, ``"msp"``, ``"max_logit"``, ``"entropy"``, ``"energy"`` or a function of your own on the
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
        """A plain copy of a network with a temperature beside its last linear layer, or beside ``head``.

        Args:
            net: A plain network; or an anchored one with its anchors, whose mean then becomes part of the first layer,
                so that the student begins as the network under that mean (`under_mean_anchor`).
            hidden: Width of the layer between the features and the spread of the anchors' logits.
            head: The name of the layer that gives the logits.
            seed: Of the new weights.
        """
        plain = under_mean_anchor(net) if isinstance(net, Anchored) else net
        network = plain.network if isinstance(plain, Classifier) else plain
        if any(isinstance(module, TemperatureHead) for module in network.modules()):
            raise InputError("net must not have a temperature beside its head yet; it has one: train it as it is")
        name = head_name(network, head)
        if any(isinstance(module, Shifted) and name.startswith(f"{at}.") for at, module in network.named_modules()):
            raise ArchitectureError("net must have a head behind its first layer; its first linear layer is its last")
        return convert(plain, "student", head=name, hidden=at_least("hidden", hidden, 1), seed=seed)

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and temperature, and the score of the rescaled logits."""
        return self.of_output(self.net(x, raw=True))

    def of_output(self, output: Any) -> Outputs:
        """What the method makes of the network's own output: pure tensor operations."""
        tau = output.extra[0].exp()
        return Outputs(output.logits, self.rescored(output.logits, tau), tau)


def temperature_head(net: Classifier) -> TemperatureHead:
    """The head with a temperature, or an error that says how to get one."""
    found = next((module for module in net.network.modules() if isinstance(module, TemperatureHead)), None)
    if found is None or isinstance(net, Anchored):
        raise InputError(
            "net must be a plain network with a temperature beside its head; make and train one with "
            "kedge.distill(detector, train_set), or make one with kedge.Student.prepare(net)"
        )
    return found
