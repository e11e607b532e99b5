"""What the page shows besides a result: the calibration scores, the anchors, and the prediction under each anchor."""

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kedge.data import ImageSet
from kedge.detectors import AMP, Detector
from kedge.evaluation.report.figures import edges
from kedge.evaluation.report.gallery import data_address, per_anchor_probabilities

SHOWN = 12  # anchors at most
EXAMPLES = 3  # anchors among the examples
LIKELY = 5  # classes with a bar


def background(detector: Detector) -> dict[str, Any]:
    """What is the same for every image."""
    assert detector.calibration is not None
    assert detector.preprocess is not None
    scores = detector.calibration.scores.double().numpy()
    bins = edges([scores])
    counts, _ = np.histogram(np.clip(scores, bins[0], bins[-1]), bins)
    net = cast(AMP, detector).net if detector.reads == "per_anchor_logits" else None
    shared = net.anchors if net is not None and net.per_image is None else None
    anchors = [] if shared is None else [data_url(image) for image in shared[:SHOWN]]
    examples = [{"name": f"anchor {k}", "image": image} for k, image in enumerate(anchors[:EXAMPLES], start=1)]
    if detector.preprocess.is_image:
        examples += [{"name": name, "image": data_url(image)} for name, image in _patterns(detector.preprocess.shape)]
    return {
        "edges": bins.tolist(),
        "shares": (counts / len(scores)).tolist(),
        "threshold": finite_or_none(detector.calibration.threshold),
        "anchors": anchors,
        "examples": examples,
    }


def finite_or_none(threshold: float) -> float | None:
    """The threshold for JSON: None if it is infinite, for want of calibration images."""
    return threshold if math.isfinite(threshold) else None


def predictions_by_anchor(detector: Detector, image: Tensor) -> list[dict[str, Any]]:
    """The predicted class of an image (D, H, W) under each anchor; empty for methods without anchors."""
    if detector.reads != "per_anchor_logits" or image.dtype != torch.uint8:
        return []
    probability, label = per_anchor_probabilities(cast(AMP, detector), ImageSet(image[None])).max(dim=1)
    names = detector.classes
    return [
        {"label": k, "class": names[k] if k < len(names) else None, "probability": p}
        for k, p in zip(label.tolist(), probability.tolist(), strict=True)
    ]


def likely_classes(detector: Detector, image: Tensor, most: int = LIKELY) -> list[dict[str, Any]]:
    """The most probable classes of an image (D, H, W), the first one first; empty for one with NaN pixels."""
    (probability,) = detector(image[None]).probability
    if bool(probability.isnan().any()):
        return []
    best, names = probability.topk(min(most, len(probability))), detector.classes
    return [
        {"label": k, "class": names[k] if k < len(names) else None, "probability": p}
        for p, k in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def data_url(image: Tensor) -> str:
    """An image (D, H, W), uint8 or in [0, 1], as a data: address in its own size."""
    return data_address(image, side=max(image.shape))


def _patterns(shape: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    """Images without content."""
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    width = shape[2]
    stripes = (torch.arange(width) // max(1, width // 8) % 2 * 255).to(torch.uint8).expand(shape)
    return [("noise", noise), ("stripes", stripes)]
