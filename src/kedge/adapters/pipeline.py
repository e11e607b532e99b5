"""A detector as a call that returns plain data, in the format of transformers' image-classification pipeline."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import nn

from kedge.checks import at_least
from kedge.detectors import Detector
from kedge.errors import NotReadyError
from kedge.hub import from_pretrained

Prediction = list[dict[str, Any]]


@dataclass(frozen=True)
class Pipeline:
    """Predicts the likeliest classes of each image and whether it is out of distribution; made by `pipeline`."""

    detector: Detector
    top_k: int = 5
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least("top_k", self.top_k, 1)
        at_least("batch_size", self.batch_size, 1)
        if self.detector.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) before it is a pipeline")

    def __call__(self, images: Any) -> Prediction | list[Prediction] | Iterator[Prediction]:
        """Predictions of images.

        Args:
            images: A path or a PIL image; several, as a list or anything else that `kedge.data.batches` takes; or an
                iterator of images, which is read as its results are.

        Returns:
            For one image a row, with the keys of `Detection.to_rows`, for each of the ``top_k`` likeliest classes:
            ``label``, ``class`` and ``probability`` are that class's, the other values are the same in all of them. For
            several images a list of such lists; for an iterator, an iterator of them.
        """
        if isinstance(images, (str, os.PathLike, Image.Image)):
            return self._predict([images])[0]
        return self._stream(images) if isinstance(images, Iterator) else self._predict(images)

    def _stream(self, images: Iterator[Any]) -> Iterator[Prediction]:
        while chunk := list(itertools.islice(images, self.batch_size)):
            yield from self._predict(chunk)

    def _predict(self, images: Any) -> list[Prediction]:
        detection = self.detector(images, batch_size=self.batch_size)
        likely = detection.probability.topk(min(self.top_k, detection.probability.shape[1]), dim=1)
        labels, probabilities, classes = likely.indices.tolist(), likely.values.tolist(), self.detector.classes
        return [
            [
                row | {"label": k, "class": classes[k] if k < len(classes) else None, "probability": p}
                for k, p in zip(*candidates, strict=True)
            ]
            for row, *candidates in zip(detection.to_rows(classes), labels, probabilities, strict=True)
        ]


def pipeline(
    detector: str | os.PathLike[str] | Detector,
    *,
    top_k: int = 5,
    batch_size: int = 64,
    model: nn.Module | str | None = None,
) -> Pipeline:
    """A detector as a call that takes images and returns plain data, as transformers' pipelines do.

    Args:
        detector: A calibrated detector, or an argument of `kedge.from_pretrained`: the name of one that comes with
            kedge, a file, a folder, or a repository on the hub.
        top_k: Number of classes per image, the likeliest first; fewer if there are fewer.
        batch_size: Images at a time.
        model: See `kedge.load`.

    Example:
        >>> import torch
        >>> from kedge.detectors import MSP
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> detect = pipeline(MSP(net).fit(torch.rand(8, 3, 2, 2)).calibrate(torch.rand(20, 3, 2, 2)), top_k=1)
        >>> sorted(detect(Image.new("RGB", (2, 2)))[0])
        ['class', 'is_ood', 'label', 'name', 'p_value', 'probability', 'reason', 'score', 'tau']
    """
    loaded = detector if isinstance(detector, Detector) else from_pretrained(detector, model=model)
    return Pipeline(loaded, top_k, batch_size)
