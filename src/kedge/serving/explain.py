"""What the page shows beside an answer: the calibration scores, the anchors, and what each of them predicts."""

import base64
import io
import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.data import ImageSet
from kedge.detectors import AMP, Detector
from kedge.evaluation.report.figures import edges
from kedge.evaluation.report.gallery import per_anchor_probabilities

SHOWN = 12  # anchors at most
EXAMPLES = 3  # anchors that can be tried


def background(detector: Detector) -> dict[str, Any]:
    """What is the same for every image."""
    assert detector.calibration is not None
    assert detector.preprocess is not None
    scores = detector.calibration.scores.double().numpy()
    bins = edges([scores])
    counts, _ = np.histogram(np.clip(scores, bins[0], bins[-1]), bins)
    kept = detector.net.anchors if isinstance(detector, AMP) and detector.net.per_image is None else None
    anchors = [] if kept is None else [address(image) for image in kept[:SHOWN]]
    examples = [{"name": f"anchor {k}", "image": a} for k, a in enumerate(anchors[:EXAMPLES], start=1)]
    if detector.preprocess.is_image:
        examples += [{"name": name, "image": address(made)} for name, made in _made(detector.preprocess.shape).items()]
    return {
        "edges": bins.tolist(),
        "shares": (counts / len(scores)).tolist(),
        "threshold": finite_or_none(detector.calibration.threshold),
        "anchors": anchors,
        "examples": examples,
    }


def finite_or_none(threshold: float) -> float | None:
    """The threshold as JSON can have it: None where it is infinite, for want of calibration images."""
    return threshold if math.isfinite(threshold) else None


def by_anchor(detector: Detector, image: Tensor) -> list[dict[str, Any]]:
    """The class that each anchor predicts for an image (D, H, W), and its probability; empty without anchors."""
    if not isinstance(detector, AMP) or image.dtype != torch.uint8:
        return []
    probability, label = per_anchor_probabilities(detector, ImageSet(image[None])).max(dim=1)
    names = detector.classes
    return [
        {"label": k, "name": names[k] if k < len(names) else None, "probability": p}
        for k, p in zip(label.tolist(), probability.tolist(), strict=True)
    ]


def address(image: Tensor) -> str:
    """An image (D, H, W) as a data: address.

    Example:
        >>> address(torch.zeros(3, 4, 4, dtype=torch.uint8))[:22]
        'data:image/png;base64,'
    """
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = (255 * pixels.double().clamp(0, 1)).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    target = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(target, format="png")
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()


def _made(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Images of nothing."""
    channels, height, width = shape
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    stripes = (torch.arange(width) // max(1, width // 8) % 2 * 255).to(torch.uint8).expand(channels, height, width)
    return {"noise": noise, "stripes": stripes}
