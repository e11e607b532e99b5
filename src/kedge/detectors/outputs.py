"""What a method computes for images, what that costs, and the threshold that is set on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge import calibration
from kedge.display import counted


@dataclass(frozen=True)
class Cost:
    """Passes for one image, through all but the first layer; a fraction where part of a network runs per anchor."""

    forward: float
    backward: float = 0


@dataclass(frozen=True)
class Outputs:
    """What a method computes for a batch; larger scores are further out of distribution."""

    logits: Tensor  # (B, C)
    score: Tensor  # (B,)
    tau: Tensor | None = None  # (B,)
    parts: Tensor | None = None  # what each part of a combination adds, (B, d)

    @classmethod
    def joined(cls, outs: Sequence["Outputs"]) -> "Outputs":
        """The outputs of several batches as one."""
        columns = zip(*(vars(out).values() for out in outs), strict=True)
        whole: list[Any] = [None if values[0] is None else torch.cat(values) for values in columns]
        return cls(*whole)

    def of_rows(self, rows: Tensor) -> "Outputs":
        """The outputs of some images, by a mask (B,) or their places."""
        kept: list[Any] = [None if value is None else value[rows] for value in vars(self).values()]
        return Outputs(*kept)

    def without(self, bad: Tensor) -> "Outputs":
        """The outputs on the CPU, with NaN logits and infinite scores for bad images (B,)."""
        bad = bad.cpu()
        tau = None if self.tau is None else self.tau.cpu().masked_fill(bad, math.nan)
        logits, score = self.logits.cpu().masked_fill(bad[:, None], math.nan), self.score.cpu()
        return Outputs(logits, score.masked_fill(bad, math.inf), tau, None if self.parts is None else self.parts.cpu())


@dataclass(frozen=True, repr=False)
class Calibration:
    """A threshold, the sorted scores it was set on, and the fingerprints of all images given to `calibrate`."""

    scores: Tensor
    fingerprints: Tensor
    alpha: float
    delta: float | None
    threshold: float
    temperature: float

    def __repr__(self) -> str:
        delta = "" if self.delta is None else f", delta {self.delta:g}"
        images = counted(len(self.scores), "image")
        return f"Calibration(threshold {self.threshold:.4g}, {images}, alpha {self.alpha:g}{delta})"

    def verdicts(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """The p-value of each score (N,), and whether it is flagged, (N,)."""
        return calibration.p_values(self.scores, score), score.double() > self.threshold


class HeldOut(NamedTuple):
    """What `Detector.calibrate` sets the threshold on."""

    outputs: Outputs
    labels: Tensor
    prints: Tensor  # of all held-out images, also of those that the method learned from
    learned: Mapping[str, Any]  # how many those are, for `calibration.threshold`
