"""Which images a student learns from, and which it is calibrated on: never the same."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kedge.checks import shape_of
from kedge.data import ImageSet, Preprocess, StreamedSet, batches
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import Detector
from kedge.errors import InputError


def set_apart(detector: Detector, train_set: Any, held_out: Any = None) -> tuple[Any, Any]:
    """The images of a set to train on, and those to calibrate on: ``held_out``, or the detector's own among the set.

    Images that the detector was calibrated on, or that are in ``held_out``, are not trained on. Only kedge's own sets
    are searched for them; other data sets and loaders are taken as they are, and need ``held_out``.

    Args:
        detector: Fitted.
        train_set: The images.
        held_out: Other images, or None.
    """
    preprocess = detector.preprocess
    assert preprocess is not None
    if isinstance(train_set, ImageSet) and tuple(train_set.images.shape[1:]) != preprocess.shape:
        came = shape_of(train_set.images[0])
        raise InputError(f"train_set must have images {preprocess.shape}, which the detector takes; got {came}")
    if not isinstance(train_set, ImageSet | StreamedSet):
        return train_set, _given(held_out)
    prints = _prints(train_set, preprocess)
    taken = torch.zeros(len(train_set), dtype=torch.bool)
    if detector.calibration is not None:
        taken[shared(detector.calibration.fingerprints, prints)] = True
    if held_out is None:
        held_out = train_set.subset(taken) if bool(taken.any()) else None
    elif not isinstance(held_out, DataLoader):  # a loader is read but once, by calibrate
        taken[shared(_prints(held_out, preprocess), prints)] = True
    if bool(taken.all()):
        raise InputError("train_set must have images beside those that the detector was, or is to be, calibrated on")
    return (train_set.subset(~taken) if bool(taken.any()) else train_set), _given(held_out)


def _given(held_out: Any) -> Any:
    if held_out is None:
        raise InputError(
            "held_out must be in-distribution images that neither was trained on, to calibrate the student on; by "
            "default they are the detector's calibration images in train_set, which holds none of them"
        )
    return held_out


def _prints(images: Any, preprocess: Preprocess) -> Tensor:
    return torch.cat([fingerprints(x) for x, _ in batches(images, preprocess)])
