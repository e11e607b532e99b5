"""No image that a detector was made with may be among those that it is measured on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kedge.data import ImageSet, Preprocess
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import Detector
from kedge.errors import InputError, NotReadyError
from kedge.models.classifier import Classifier


def refuse_leaks(detectors: Mapping[str, Detector], sets: Mapping[str, ImageSet]) -> None:
    """Raise if a set holds images that a detector was made with: its score there would say nothing about new images."""
    seen: dict[tuple[Preprocess | None, str], Tensor] = {}  # fingerprints of what a detector sees of a set
    for name, detector in detectors.items():
        if detector.preprocess is None:
            raise NotReadyError(f"{name!r} is not fitted: call fit(train_set) and calibrate(held_out) first")
        ours = {}
        if detector.calibration is not None:
            ours["calibration image"] = detector.calibration.fingerprints
        anchors = [net.anchors for net in detector.anchored if net.anchors is not None]
        if anchors:
            ours["anchor"] = torch.cat([fingerprints(images) for images in anchors])
        if detector.outliers is not None:
            ours["training outlier"] = detector.outliers
        records = [module.record for module in detector.net.modules() if isinstance(module, Classifier)]
        records += [record.get("teacher", {}) for record in records]  # what a student's teacher was trained on
        learned = [record.get("data", {}) for record in records]
        learned += [data for record in records for data in record.get("before", ())]
        trained_on = {data.get("sha256") for data in learned} - {None}
        for set_name, images in sets.items():
            if images.checksum in trained_on:
                raise InputError(
                    f"the set {set_name!r} is what the network of {name!r} was trained and its statistics taken on; "
                    "evaluate on other images"
                )
            for what, prints in ours.items():
                key = (detector.preprocess, set_name)
                if key not in seen:
                    seen[key] = fingerprints(detector.preprocess.batch(images.images))
                found = shared(prints, seen[key])
                if len(found):
                    raise InputError(
                        f"{len(found)} of the images in {set_name!r} are among the {what}s of {name!r} (the first is "
                        f"number {int(found[0])}); leave them out of one or the other: set.subset(...)"
                    )
