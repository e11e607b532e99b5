"""Which images a student learns from, is judged on and is calibrated on: no image serves twice."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.checks import shape_of
from kedge.data import ImageSet, Preprocess, StreamedSet, batches
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import Detector
from kedge.errors import InputError

JUDGED = 5  # of so many calibration images of the teacher, one is to judge the student on


@dataclass(frozen=True)
class Parts:
    """Images to train on, to judge on while settings are chosen (or None), and to calibrate on."""

    train: Any
    validation: Any
    held_out: Any


def set_apart(detector: Detector, train_set: Any, *, held_out: Any = None, validation: Any = None) -> Parts:
    """Part a set so that a student is neither judged nor calibrated on what it learned from, nor the one on the other.

    Images that the detector was calibrated on are not trained on. A fifth of them, the same at every call since their
    pixels decide, are to judge on, and the others to calibrate on; where ``held_out`` is given, all are to judge on.
    Only kedge's own sets are searched; other data sets and loaders are taken as they are, and need ``held_out``.

    Args:
        detector: Fitted.
        train_set: The images.
        held_out: Other images to calibrate on; they, too, are not trained on.
        validation: Other images to judge on, likewise.

    Example:
        >>> import kedge
        >>> images = kedge.ImageSet(torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8), torch.arange(60) % 2)
        >>> teacher = kedge.MSP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))).fit(images)
        >>> parts = set_apart(teacher.calibrate(images.subset(range(40))), images)
        >>> len(parts.train), len(parts.validation) + len(parts.held_out)
        (20, 40)
    """
    preprocess = detector.preprocess
    assert preprocess is not None
    if isinstance(train_set, ImageSet) and tuple(train_set.images.shape[1:]) != preprocess.shape:
        came = shape_of(train_set.images[0])
        raise InputError(f"train_set must have images {preprocess.shape}, which the detector takes; got {came}")
    given = [_prints(images, preprocess) for images in (held_out, validation) if images is not None]
    if len(given) == 2 and (both := len(shared(*given))):
        raise InputError(
            f"validation must have no image of held_out, on which nothing may be chosen; {both} are in both"
        )
    if isinstance(train_set, ImageSet | StreamedSet):
        prints = _prints(train_set, preprocess)
        known = [] if detector.calibration is None else [detector.calibration.fingerprints]
        own, named = _among(known, prints), _among(given, prints)
        free = own & ~named
        judge = free if held_out is not None else free & (prints[:, 0] % JUDGED == 0)
        if validation is None:
            validation = _subset(train_set, judge)
            free = free & ~judge
        if held_out is None:
            held_out = _subset(train_set, free)
        train_set = _subset(train_set, ~(own | named))
        if train_set is None:
            raise InputError(
                "train_set must have images beside those that are to judge and to calibrate on; it has none"
            )
    if held_out is None:
        raise InputError(
            "held_out must be in-distribution images that neither was trained on, to calibrate the student on; by "
            "default they are the detector's calibration images in train_set, which holds none of them"
        )
    return Parts(train_set, validation, held_out)


def _prints(images: Any, preprocess: Preprocess) -> Tensor:
    return torch.cat([fingerprints(x) for x, _ in batches(images, preprocess)])


def _among(ours: list[Tensor], prints: Tensor) -> Tensor:
    """Which of the prints are among ours, as a mask."""
    mask = torch.zeros(len(prints), dtype=torch.bool)
    for marks in ours:
        mask[shared(marks, prints)] = True
    return mask


def _subset(images: ImageSet | StreamedSet, mask: Tensor) -> ImageSet | StreamedSet | None:
    if bool(mask.all()):
        return images
    return images.subset(mask) if bool(mask.any()) else None
