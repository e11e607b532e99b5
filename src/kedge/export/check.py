"""Whether an exported file gives the results of its detector."""

import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.checks import at_least
from kedge.detectors import Detector
from kedge.errors import NotReadyError
from kedge.experimental.early_exit import EarlyExit
from kedge.export.runtime import OnnxDetector

CLOSE = 1e-4  # of the largest score or logit, as far as float32 carries through a network


@dataclass(frozen=True)
class Difference:
    """The difference between the results of a file and of its detector.

    Attributes:
        largest: The largest difference of two scores.
        scale: The largest absolute score.
        verdicts: Images with another label or decision that rounding does not explain.
    """

    largest: float
    scale: float
    verdicts: int

    @property
    def is_close(self) -> bool:
        """Whether the difference is only rounding."""
        return self.largest <= CLOSE * self.scale and not self.verdicts  # NaN is not close


def compare(detector: Detector, path: str | os.PathLike[str], *, images: int = 8, seed: int = 0) -> Difference:
    """Compare a calibrated detector with the file it was exported to, on random images, at once and one by one."""
    if detector.preprocess is None or detector.calibration is None:
        raise NotReadyError("the detector must be fitted and calibrated before it is compared: call fit and calibrate")
    shape = (at_least("images", images, 1), *detector.preprocess.shape)
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    expected, exported = detector(pixels), OnnxDetector(path)
    both = [exported(pixels, batch_size=size) for size in (images, 1)]
    scores, logits = expected.score.double().numpy(), expected.logits.double().sort(dim=1).values.numpy()
    scale = float(np.abs(scores).max())
    sure_label = logits[:, -1] - logits[:, -2:][:, 0] > CLOSE * np.abs(logits).max()
    sure_decision = np.abs(scores - detector.calibration.threshold) > CLOSE * scale
    sure_exit = _sure_exit(detector, pixels)
    largest, others = 0.0, np.zeros(images, np.bool_)
    for outputs in both:
        others |= sure_label & (outputs["label"] != expected.label.numpy())
        others |= sure_decision & (outputs["is_ood"] != expected.is_ood.numpy())
        largest = float(np.max(np.abs(outputs["score"] - scores)[sure_exit], initial=largest))
    if not all(np.isfinite(outputs["score"]).all() for outputs in both):
        largest = math.nan
    return Difference(largest, scale, int((others & sure_exit).sum()))


def _sure_exit(detector: Detector, pixels: torch.Tensor) -> NDArray[np.bool_]:
    """Mask of the images for which rounding cannot change whether they exit early."""
    if not isinstance(detector, EarlyExit) or detector.exit_threshold is None:
        return np.ones(len(pixels), np.bool_)
    with torch.no_grad():
        few = detector.per_anchor_logits(detector.as_input(pixels), range(detector.min_anchors))
        score = detector.of_per_anchor_logits(few).score.double().numpy()
    sure: NDArray[np.bool_] = np.abs(score - detector.exit_threshold) > CLOSE * np.abs(score).max()
    return sure
