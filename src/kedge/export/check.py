"""Whether an exported file says what its detector says."""

import os
from dataclasses import dataclass

import numpy as np
import torch

from kedge.checks import at_least
from kedge.detectors import Detector
from kedge.errors import NotReadyError
from kedge.export.runtime import OnnxDetector

CLOSE = 1e-4  # of the largest score, as far as float32 carries through a network


@dataclass(frozen=True)
class Difference:
    """How far the scores of a file lie from those of its detector.

    Attributes:
        largest: The largest difference of two scores.
        scale: The largest absolute score.
    """

    largest: float
    scale: float

    @property
    def is_close(self) -> bool:
        """Whether it is rounding and no more.

        Example:
            >>> Difference(largest=1e-5, scale=2.0).is_close
            True
        """
        return self.largest <= CLOSE * self.scale


def compare(detector: Detector, path: str | os.PathLike[str], *, images: int = 8, seed: int = 0) -> Difference:
    """Score random images by a detector and by the file it was exported to, and return how far they differ.

    Args:
        detector: Fitted and calibrated.
        path: The file.
        images: How many; they are scored at once and one by one.
        seed: Of their pixels.
    """
    if detector.preprocess is None:
        raise NotReadyError("the detector is not fitted: call fit first")
    shape = (at_least("images", images, 1), *detector.preprocess.shape)
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    ours = detector.score(pixels).double().numpy()
    exported = OnnxDetector(path)
    largest = max(float(np.abs(exported(pixels, batch_size=size)["score"] - ours).max()) for size in (images, 1))
    return Difference(largest, float(np.abs(ours).max()))
