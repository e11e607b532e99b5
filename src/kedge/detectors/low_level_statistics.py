"""Low-level statistics: a baseline."""

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.data import Preprocess
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.registry import register


@register
class LowLevelStatistics(Detector):
    """Distance of an image's brightness, contrast and compressed size from those of the training images.

    A baseline, not a method of the field. Use it to find the sets that are easy for reasons that have nothing to do
    with classes (another camera, another resizing), where a method's success means little. The score is the squared
    Mahalanobis distance of three numbers: mean and standard deviation of all pixels, and the size of the losslessly
    compressed image. No pass through the network for the score; labels come from one pass.

    Args:
        net: The classifier that gives the labels.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
        >>> LowLevelStatistics(net).fit(torch.rand(8, 3, 8, 8)).score(torch.rand(4, 3, 8, 8)).shape
        torch.Size([4])
    """

    name = "low_level_statistics"
    reads = "images"
    learned = ("mean", "precision")

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.mean: Any = None  # (3,)
        self.precision: Any = None  # (3, 3)

    @property
    def cost(self) -> Cost:
        """None for the score."""
        return Cost(forward=0)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """The mean and covariance of the statistics over the training images."""
        super().fit_method(train_set, preprocess)
        rows = torch.cat([low_level_statistics(x) for x, _ in self.inputs(train_set, preprocess)])  # (N, 3)
        self.mean = rows.mean(dim=0)
        self.precision = torch.linalg.pinv((rows - self.mean).T @ (rows - self.mean) / len(rows), hermitian=True)

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and the distance of the image's statistics."""
        apart = low_level_statistics(x) - self.mean  # (B, 3)
        return Outputs(self.net(x), ((apart @ self.precision) * apart).sum(dim=1).to(x))


def low_level_statistics(x: Tensor) -> Tensor:
    """Mean, standard deviation and compressed size of images in [0, 1]: (B, D, ...) -> (B, 3), float64 on the CPU."""
    pixels = x.detach().cpu().double().flatten(1)  # (B, D * H * W)
    shape = x.shape[1:] if x.ndim == 4 else (1, 1, pixels.shape[1])
    as_bytes = (pixels * 255).round().clamp(0, 255).to(torch.uint8).reshape(-1, *shape).numpy()
    # PNG's filter "sub", the difference to the pixel on the left, and its compression, without the file around it.
    filtered = np.diff(as_bytes, axis=-1, prepend=np.uint8(0))
    sizes = torch.tensor([len(zlib.compress(image.tobytes(), 6)) for image in filtered], dtype=torch.float64)
    return torch.stack([pixels.mean(dim=1), pixels.std(dim=1, correction=0), sizes], dim=1)
