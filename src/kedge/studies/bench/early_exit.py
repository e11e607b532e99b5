"""Early exit in the benchmarks: the only module here that depends on how it works."""

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kedge.checks import between
from kedge.detectors import AMP, Detector
from kedge.experimental import EarlyExit
from kedge.export import OnnxDetector
from kedge.export.file import EXIT_THRESHOLD, read_model, set_tensors, write_model

MIN_ANCHORS = 2  # for every image, with early exit


def with_early_exit(detector: Detector, held_out: Any) -> Detector:
    """A copy with early exit, recalibrated."""
    assert isinstance(detector, AMP)
    return _calibrated_like(detector, EarlyExit(detector), held_out)


def without_early_exit(detector: Detector, held_out: Any) -> Detector:
    """The detector, or if it has early exit a recalibrated copy that uses all anchors for every image."""
    if isinstance(detector, EarlyExit):
        return _calibrated_like(detector, detector.without_early_exit(), held_out)
    return detector


def _calibrated_like(original: Detector, copied: Detector, held_out: Any) -> Detector:
    assert original.calibration is not None
    return copied.calibrate(held_out, alpha=original.calibration.alpha, delta=original.calibration.delta)


def why_no_naive(detector: Detector) -> str | None:
    """Why AMP cannot be computed by passes of pairs, or None if it can."""
    shared = detector.reads == "per_anchor_logits" and getattr(detector.net, "per_image", None) is None
    return None if shared else "it is for AMP with anchors that all images share"


def why_no_early_exit(detector: Detector) -> str | None:
    """Why a detector cannot have early exit, or None if it can."""
    if reason := why_no_naive(detector):
        return reason
    return None if detector.cost.forward > MIN_ANCHORS else f"it is for AMP with more than {MIN_ANCHORS} anchors"


def full_share(passes: float, all_passes: int) -> float:
    """The share of images that take all anchors, from the mean number of passes."""
    return round((passes - MIN_ANCHORS) / (all_passes - MIN_ANCHORS), 6) if all_passes > MIN_ANCHORS else 0.0


class EarlyExitEngine:
    """AMP with early exit; its threshold can be set so that a given share of images takes all anchors."""

    def __init__(self, detector: Any) -> None:
        self.detector = detector

    def __call__(self, images: Tensor) -> Any:
        """Label, score and decision of a batch of images."""
        return self.detector(images, batch_size=len(images))

    def set_exit_threshold(self, threshold: float) -> None:
        """Set the score with few anchors up to which images exit early."""
        self.detector.exit_threshold = threshold

    def scores(self, images: Tensor) -> Any:
        """The scores of images."""
        return self(images).score

    def mean_passes(self, images: Tensor) -> float:
        """The mean number of passes for images."""
        return float(self.detector.mean_passes(images))

    def set_full_share(self, images: Tensor, share: float) -> None:
        """Set the exit threshold by these images: for timing alone, since the decision threshold does not follow."""
        between("share", share, 0, 1)
        self.set_exit_threshold(math.inf)
        edges, early = [-math.inf, *sorted(self.scores(images).tolist()), math.inf], round((1 - share) * len(images))
        self.set_exit_threshold((edges[early] + edges[early + 1]) / 2)  # between two, so that rounding moves none


class OnnxEarlyExit(EarlyExitEngine):
    """The same by an exported file."""

    def __init__(self, path: Path, runtime: str, threads: int | None) -> None:
        self.path, self.start = path, partial(OnnxDetector, engine=runtime, threads=threads)
        super().__init__(self.start(path))

    def set_exit_threshold(self, threshold: float) -> None:
        """Start a copy of the file with another threshold."""
        model = read_model(self.path)
        set_tensors(model, {EXIT_THRESHOLD: np.float32(threshold)})
        with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
            write_model(model, Path(folder) / "threshold.onnx")
            self.detector = self.start(Path(folder) / "threshold.onnx")

    def scores(self, images: Tensor) -> Any:
        """The scores of images."""
        return self(images)["score"]

    def mean_passes(self, images: Tensor) -> float:
        """The mean number of passes for images."""
        return float(self.detector(images)["passes"].mean())
