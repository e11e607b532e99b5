"""What the page shows besides a result: classes, reason, nearest training images, anchors; samples and thresholds."""

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kedge import calibration
from kedge.data import ImageSet, StreamedSet
from kedge.detectors import AMP, Detector
from kedge.detectors.neighbours import Neighbours
from kedge.errors import InputError, KedgeWarning
from kedge.evaluation.report.figures import edges
from kedge.evaluation.report.gallery import SIDE, data_address, label_of, per_anchor_probabilities, pixels

SHOWN = 12  # anchors at most
EXAMPLES = 3  # anchors among the examples
LIKELY = 5  # classes with a bar
NEAREST = 4  # training images beside an image
SAMPLES = 24  # images to try
SAMPLE_SIDE = 512  # pixels of the longer side of one
ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # to choose from, besides the detector's own


@dataclass(frozen=True)
class Gallery:
    """Images that the page may show to everyone who opens it.

    Args:
        train_set: Of which the nearest stand beside each image; a random sample of 2,000 is searched.
        samples: Sets of images to try, of which so many are taken evenly that there are 24 in all.
    """

    train_set: ImageSet | StreamedSet | None = None
    samples: Sequence[ImageSet | StreamedSet] = ()


class Explainer:
    """Explains one image after another; the training images pass through the network once, when it is made."""

    def __init__(self, detector: Detector, gallery: Gallery | None = None) -> None:
        assert detector.calibration is not None
        self.detector, self.gallery = detector, gallery or Gallery()
        # A copy that flags every image, since reasons are given for what is flagged: the page moves the threshold.
        self._flagging = copy.copy(detector)
        self._flagging.calibration = replace(detector.calibration, threshold=-math.inf)
        self._neighbours = None
        if self.gallery.train_set is not None:
            self._neighbours = Neighbours(detector.net, self.gallery.train_set, preprocess=detector.preprocess)

    def background(self) -> dict[str, Any]:
        """What is the same for every image."""
        detector = self.detector
        assert detector.calibration is not None
        assert detector.preprocess is not None
        scores = detector.calibration.scores.double().numpy()
        bins = edges([scores])
        counts, _ = np.histogram(np.clip(scores, bins[0], bins[-1]), bins)
        net = cast(AMP, detector).net if detector.reads == "per_anchor_logits" else None
        shared = net.anchors if net is not None and net.per_image is None else None
        anchors = [] if shared is None else [data_url(image) for image in shared[:SHOWN]]
        examples = _samples(self.gallery.samples)
        examples += [{"name": f"anchor {k}", "image": image} for k, image in enumerate(anchors[:EXAMPLES], start=1)]
        if detector.preprocess.is_image:
            patterns = _patterns(detector.preprocess.shape)
            examples += [{"name": name, "image": data_url(image)} for name, image in patterns]
        return {
            "edges": bins.tolist(),
            "shares": (counts / len(scores)).tolist(),
            "threshold": finite_or_none(detector.calibration.threshold),
            "thresholds": thresholds(detector),
            "anchors": anchors,
            "examples": examples,
        }

    def __call__(self, image: Tensor) -> dict[str, Any]:
        """The most probable classes of an image (D, H, W), the reason if it were flagged, and what it is near to."""
        detection = self._flagging(image[None])
        return {
            "classes": likely_classes(self.detector, detection.probability[0]),
            "reason": None if detection.reasons is None else detection.reasons[0],
            "anchors": predictions_by_anchor(self.detector, image),
            "nearest": self._nearest(image),
        }

    def _nearest(self, image: Tensor) -> list[dict[str, str]]:
        if self._neighbours is None:
            return []
        images = self._neighbours.images
        (places,) = self._neighbours.nearest(image[None], min(NEAREST, len(images))).tolist()
        return [{"name": label_of(images, i), "image": data_address(pixels(images, i), 2 * SIDE)} for i in places]


def thresholds(detector: Detector) -> list[dict[str, float | None]]:
    """The threshold for each of several alphas, the detector's own among them; None where nothing can be flagged."""
    calibrated = detector.calibration
    assert calibrated is not None
    rows = []
    for alpha in sorted({*ALPHAS, calibrated.alpha}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KedgeWarning)
            threshold = calibration.threshold(calibrated.scores, alpha, calibrated.delta)
        rows.append({"alpha": alpha, "threshold": finite_or_none(threshold)})
    return rows


def finite_or_none(threshold: float) -> float | None:
    """The threshold for JSON: None if it is infinite, for want of calibration images."""
    return threshold if math.isfinite(threshold) else None


def predictions_by_anchor(detector: Detector, image: Tensor) -> list[dict[str, Any]]:
    """The predicted class of an image (D, H, W) under each anchor; empty for methods without anchors."""
    if detector.reads != "per_anchor_logits" or image.dtype != torch.uint8:
        return []
    probability, label = per_anchor_probabilities(cast(AMP, detector), ImageSet(image[None])).max(dim=1)
    return _classes(detector, label, probability)


def likely_classes(detector: Detector, probability: Tensor) -> list[dict[str, Any]]:
    """The most probable classes (C,) of an image, the first one first; empty for one with NaN pixels."""
    if bool(probability.isnan().any()):
        return []
    best = probability.topk(min(LIKELY, len(probability)))
    return _classes(detector, best.indices, best.values)


def _classes(detector: Detector, label: Tensor, probability: Tensor) -> list[dict[str, Any]]:
    names = detector.classes
    return [
        {"label": k, "class": names[k] if k < len(names) else None, "probability": p}
        for k, p in zip(label.tolist(), probability.tolist(), strict=True)
    ]


def data_url(image: Tensor) -> str:
    """An image (D, H, W), uint8 or in [0, 1], as a data: address in its own size."""
    return data_address(image, side=max(image.shape))


def _samples(sets: Sequence[ImageSet | StreamedSet]) -> list[dict[str, str]]:
    """Images to try, as many of each set; those that cannot be read are left out."""
    found = []
    for images in sets:
        count = min(len(images), max(1, SAMPLES // len(sets)))
        for i in sorted({round(k * (len(images) - 1) / max(1, count - 1)) for k in range(count)}):
            try:
                image = data_address(pixels(images, i), SAMPLE_SIDE)
            except InputError:
                continue
            name = f"{images.name}: {label_of(images, i)}"
            if isinstance(images, StreamedSet):
                name = PurePath(images.store.names[i]).name
            found.append({"name": name, "image": image})
    return found


def _patterns(shape: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    """Images without content."""
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    width = shape[2]
    stripes = (torch.arange(width) // max(1, width // 8) % 2 * 255).to(torch.uint8).expand(shape)
    return [("noise", noise), ("stripes", stripes)]
