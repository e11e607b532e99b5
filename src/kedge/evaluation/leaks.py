"""Images that a detector was built with must not be among those that it is measured on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kedge.data import Features, ImageSet, Preprocess
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import Detector
from kedge.errors import InputError, NotReadyError


def refuse_leaks(detectors: Mapping[str, Detector], sets: Mapping[str, ImageSet | Features]) -> None:
    """Raise if a set holds anchors, calibration images, outliers or the training set of a detector."""
    prints: dict[tuple[Preprocess, str], Tensor] = {}  # of the images of a set as a detector takes them
    for name, detector in detectors.items():
        if detector.preprocess is None:
            raise NotReadyError(f"{name!r} is not fitted: call fit(train_set) and calibrate(held_out) first")
        used = {}
        if detector.calibration is not None:
            used["calibration image"] = detector.calibration.fingerprints
        anchors = [net.anchors for net in detector.anchored if net.anchors is not None]
        if anchors:
            used["anchor"] = torch.cat([fingerprints(images) for images in anchors])
        if detector.outliers is not None:
            used["training outlier"] = detector.outliers
        if detector.tuned is not None:
            used["tuning image"] = detector.tuned.held_out
        for set_name, images in sets.items():
            if images.checksum in detector.trained_on:
                raise InputError(
                    f"the set {set_name!r} is the training set of the network of {name!r}; evaluate on other images"
                )
            for what, own in used.items():
                key = (detector.preprocess, set_name)
                if key not in prints:
                    prints[key] = _prints(images, detector.preprocess)
                places = shared(own, prints[key])
                if len(places):
                    raise InputError(
                        f"{len(places)} of the images in {set_name!r} are among the {what}s of {name!r} (the first is "
                        f"number {int(places[0])}); leave them out of one or the other: set.subset(...)"
                    )


def _prints(images: ImageSet | Features, preprocess: Preprocess) -> Tensor:
    return images.prints if isinstance(images, Features) else fingerprints(preprocess.batch(images.images))
