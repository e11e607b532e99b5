"""Detection: the result of a detector on N images, as tensors and as rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kedge.errors import InputError

ROW = ("name", "label", "class", "probability", "tau", "score", "p_value", "is_ood")  # the keys of a row, in order


@dataclass(frozen=True)
class Detection:
    """The result of a detector on N images, on the CPU.

    Attributes:
        label: The predicted class, (N,); -1 for an image with NaN or infinite pixels.
        logits: (N, C), before any temperature.
        probability: softmax(logits / T) with the one T that calibration fitted, (N, C).
        tau: The disagreement between the anchors, (N,); None for methods without anchors.
        score: Larger means further out of distribution, (N,).
        p_value: The share of in-distribution images that would score at least this high, (N,).
        is_ood: Whether the image is flagged, (N,).

    Example:
        >>> import torch
        >>> one = torch.tensor([0.5])
        >>> d = Detection(torch.tensor([1]), torch.zeros(1, 2), torch.full((1, 2), 0.5), None, one, one, one > 1)
        >>> d.to_rows(("cat", "dog"), ["a.png"])[0]["class"]
        'dog'
    """

    label: Tensor
    logits: Tensor
    probability: Tensor
    tau: Tensor | None
    score: Tensor
    p_value: Tensor
    is_ood: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: slice) -> "Detection":
        if not isinstance(index, slice):
            raise InputError(f"a Detection takes slices, as d[2:3]; got {index!r}")
        return replace(self, **{name: value[index] for name, value in vars(self).items() if value is not None})

    def to_rows(self, classes: Sequence[str] = (), names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One dictionary per image, with the keys `ROW` that files, the HTTP service and pipelines use too.

        ``class`` is the name of the predicted class, ``probability`` that class's. A value that does not exist is None.

        Args:
            classes: Names of the classes, as in ``detector.classes``; may be empty.
            names: Names of the images.
        """
        if names is not None and len(names) != len(self):
            raise InputError(f"names must be one per image; got {len(names)} for {len(self)} images")
        missing = [None] * len(self)
        labels = [None if label < 0 else label for label in self.label.tolist()]
        columns = (
            missing if names is None else names,
            labels,
            [None if label is None or label >= len(classes) else classes[label] for label in labels],
            _numbers(self.probability.amax(dim=1)),
            missing if self.tau is None else _numbers(self.tau),
            _numbers(self.score),
            self.p_value.tolist(),
            self.is_ood.tolist(),
        )
        return [dict(zip(ROW, values, strict=True)) for values in zip(*columns, strict=True)]


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
