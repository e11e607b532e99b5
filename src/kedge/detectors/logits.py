"""Scores of the logits alone, on plain networks or on the mean over anchors: MSP, MaxLogit, Entropy, Energy."""

from typing import Any, ClassVar

from torch import Tensor

from kedge import scores
from kedge.detectors.base import Detector, Outputs


class LogitDetector(Detector):
    """A score that is a pure function of the logits; costs one forward pass and learns nothing."""

    score_function: ClassVar[str]

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and their score."""
        return self.of_logits(self.net(x))

    def of_logits(self, logits: Tensor) -> Outputs:
        """What the method makes of the logits (B, C)."""
        return Outputs(logits, scores.SCORES[self.score_function](logits))

    def config(self) -> dict[str, Any]:
        """There is nothing to configure."""
        return {}
