"""Detectors that score logits divided by a temperature of each image: AMP, and students of it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from kedge import scores
from kedge.checks import one_of, resolve, shape_of
from kedge.detectors.base import Detector
from kedge.detectors.detection import Detection
from kedge.errors import InputError, NotReadyError

PLAIN_ABOVE = 200  # classes from which on the paper divides by tau itself
RULES = (*scores.RULES, "none")


class RescoringDetector(Detector):
    """Logits, a temperature for each image, and a score of the logits that it divides.

    Args:
        net: See `Detector`.
        score: A name of `kedge.scores.SCORES`, or a function on the rescaled logits (B, C).
        rescale: ``"exp"``, ``"plain"`` or ``"none"``; None: ``"exp"`` up to 200 classes and ``"plain"`` above.
        others: Further scores by name, which are taken of something else than the rescaled logits.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        score: str | scores.Score,
        rescale: str | None,
        others: Mapping[str, Callable[..., Tensor]] | None = None,
    ) -> None:
        super().__init__(net)
        others = dict(others or {})
        self.rescale = rescale if rescale is None else one_of("rescale", rescale, RULES)
        self.score_by = score
        self._score = None if score in others else resolve("score", score, scores.SCORES | others)

    @property
    def rescores(self) -> bool:
        """Whether the score is taken of logits that each image's own temperature divides."""
        return self._score is not None and self.rescale != "none"

    def rescored(self, logits: Tensor, tau: Tensor) -> Tensor:
        """The score (B,) of logits (B, C) that temperatures (B,) divide."""
        if self._score is None:
            raise InputError(f"score={self.score_by!r} is taken of the hypotheses, not of logits and a temperature")
        rule = self.rescale or ("plain" if logits.shape[1] > PLAIN_ABOVE else "exp")
        score = self._score(logits if rule == "none" else scores.rescale(logits, self._divisor_of(tau), rule))
        if not isinstance(score, Tensor) or score.shape != tau.shape:
            raise InputError(f"score must map logits (B, C) to (B,), {tuple(tau.shape)} here; got {shape_of(score)}")
        return score

    def with_tau(self, said: Detection, tau: Tensor) -> Detection:
        """What the detector would have said if images (N,) had other temperatures, with the threshold as it is.

        For controls: see ``controls`` of `kedge.evaluate`.
        """
        if self.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) first")
        if tau.shape != said.score.shape:
            raise InputError(f"tau must be {tuple(said.score.shape)}, got {shape_of(tau)}")
        return self._decided(said.logits, self.rescored(said.logits, tau), tau, self.calibration)

    def config(self) -> dict[str, Any]:
        """The score, where it has a name, and the rule."""
        return {"score": self.score_by if isinstance(self.score_by, str) else None, "rescale": self.rescale}

    def _divisor_of(self, tau: Tensor) -> Tensor:
        """The temperatures to divide by, of the images' own."""
        return tau
