"""Base classes of methods with a loss of their own."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor, nn

from kedge import scores
from kedge.checks import one_of
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.logits import LogitDetector
from kedge.training.losses import Loss


class TrainedDetector(Detector):
    """A detector whose network is prepared and trained in its own way.

    ::

        net = kedge.train(Method.prepare(net), train_set, loss=Method.loss())
        detector = Method(net).fit(train_set)

    Attributes:
        loss: The class of the loss to pass to `kedge.train`; its arguments are the options of the training.
    """

    loss: ClassVar[Callable[..., Loss]]

    @classmethod
    def prepare(cls, net: nn.Module) -> Any:
        """A copy of a network as the method needs it; by default the network itself."""
        return net


class LogitTrainedDetector(LogitDetector, TrainedDetector):
    """A trained method whose score is one of `kedge.scores` of the logits."""

    def __init__(self, net: nn.Module, *, score: str = "msp") -> None:
        super().__init__(net)
        self.score_by = one_of("score", score, tuple(scores.SCORES))

    def of_logits(self, logits: Tensor) -> Outputs:
        """The score of logits (B, C)."""
        return Outputs(logits, scores.SCORES[self.score_by](logits))

    def config(self) -> dict[str, Any]:
        """The score."""
        return {"score": self.score_by}


class MethodLoss(Loss):
    """A loss that is a dataclass of its arguments."""

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
