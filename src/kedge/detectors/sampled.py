"""Scores of several hypotheses of each image: dropout masks, members of an ensemble, draws of the weights."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, one_of
from kedge.detectors.base import Cost, Detector, Outputs, passes
from kedge.errors import InputError
from kedge.models.classifier import evaluating
from kedge.models.ensemble import log_mean_softmax

# Of the hypotheses (M, B, C) and the logarithm of their mean softmax (B, C).
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "msp": lambda hypotheses, logits: scores.msp(logits),
    "entropy": lambda hypotheses, logits: scores.entropy(logits),
    "mutual_information": lambda hypotheses, logits: scores.mutual_information(hypotheses),
}


class SampledDetector(Detector):
    """A detector that asks several networks, or one network several times, and takes the mean of their softmax.

    Args:
        net: See `Detector`.
        samples: How many hypotheses there are.
        score: ``"msp"`` or ``"entropy"`` of the mean softmax, or the ``"mutual_information"`` of label and hypothesis,
            which is large where hypotheses that are sure contradict each other.
    """

    def __init__(self, net: nn.Module, *, samples: int, score: str) -> None:
        super().__init__(net)
        self.samples = at_least("samples", samples, 1)
        self.score_by = one_of("score", score, tuple(SCORES))
        if score == "mutual_information" and samples < 2:
            raise InputError("the score 'mutual_information' needs at least two hypotheses, got 1; use 'entropy'")

    @abstractmethod
    def sampled_logits(self, x: Tensor) -> Tensor:
        """The logits of a batch under each hypothesis, (M, B, C)."""

    def outputs(self, x: Tensor) -> Outputs:
        """The logarithm of the mean softmax, and the score."""
        hypotheses = self.sampled_logits(x)  # (M, B, C)
        logits = log_mean_softmax(hypotheses)  # (B, C)
        return Outputs(logits, SCORES[self.score_by](hypotheses, logits))


class DrawnDetector(SampledDetector):
    """A detector that draws something at random in a network, such as dropout masks, and asks it once for each draw.

    Args:
        net: See `Detector`.
        samples: Draws.
        score: See `SampledDetector`.
        seed: Of the draws.
    """

    def __init__(self, net: nn.Module, *, samples: int = 10, score: str = "msp", seed: int = 0) -> None:
        super().__init__(net, samples=samples, score=score)
        self.seed = seed

    @abstractmethod
    def drawn(self, number: int) -> AbstractContextManager[None]:
        """Put a draw into the network inside the block: the same for all images, and at every call."""

    def sampled_logits(self, x: Tensor) -> Tensor:
        """The logits of a batch under each draw, (M, B, C); for an anchored network, the means over its anchors."""
        logits = []
        with evaluating(self.net):
            for number in range(self.samples):
                with self.drawn(number):
                    logits.append(self.net(x))
        return torch.stack(logits)

    @property
    def cost(self) -> Cost:
        """A pass for each draw, and for each anchor."""
        return Cost(forward=self.samples * passes(self.net))

    def config(self) -> dict[str, Any]:
        """The samples, the score and the seed."""
        return {"samples": self.samples, "score": self.score_by, "seed": self.seed}
