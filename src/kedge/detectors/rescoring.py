"""Detectors that score logits divided by each image's tau: AMP, and students of it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
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
    """Scores logits divided by each image's tau; ``score`` and ``rescale`` are those of `kedge.AMP`.

    ``others`` are further scores by name, of something else than the rescaled logits.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        score: str | scores.Score,
        rescale: str | None,
        others: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
    ) -> None:
        super().__init__(net)
        self.rescale = rescale if rescale is None else one_of("rescale", rescale, RULES)
        self.score_by = score
        self._score = None if score in others else resolve("score", score, {**scores.SCORES, **others})

    @property
    def rescores(self) -> bool:
        """Whether the score is taken of logits divided by each image's own tau."""
        return self._score is not None and self.rescale != "none"

    def rescored(self, logits: Tensor, tau: Tensor) -> Tensor:
        """The score (B,) of logits (B, C) divided as tau (B,) has it."""
        if self._score is None:
            raise InputError(f"score={self.score_by!r} is taken of the hypotheses, not of logits and tau")
        rule = self.rescale or ("plain" if logits.shape[1] > PLAIN_ABOVE else "exp")
        score = self._score(logits if rule == "none" else scores.rescale(logits, self._divisor_of(tau), rule))
        if not isinstance(score, Tensor) or score.shape != tau.shape:
            raise InputError(f"score must map logits (B, C) to (B,), {tuple(tau.shape)} here; got {shape_of(score)}")
        return score

    def with_tau(self, detection: Detection, tau: Tensor) -> Detection:
        """The detection if images (N,) had another tau, at the same threshold: a control of `kedge.evaluate`."""
        if self.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) first")
        if tau.shape != detection.score.shape:
            raise InputError(f"tau must be {tuple(detection.score.shape)}, got {shape_of(tau)}")
        return self._decided(detection.logits, self.rescored(detection.logits, tau), tau, self.calibration)

    def config(self) -> dict[str, Any]:
        """The score, where it has a name, and the rule."""
        return {"score": self.score_by if isinstance(self.score_by, str) else None, "rescale": self.rescale}

    def _divisor_of(self, tau: Tensor) -> Tensor:
        """The tau to divide by: each image's own, unless a method shares one."""
        return tau
