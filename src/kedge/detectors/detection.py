"""Detection: the result of a detector on N images, as tensors and as rows."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, overload

from torch import Tensor

from kedge.checks import needs
from kedge.display import ROWS, counted, html_table
from kedge.errors import InputError

# The keys of a row, in order.
ROW = ("name", "label", "class", "probability", "tau", "score", "p_value", "is_ood", "reason")


@dataclass(frozen=True, repr=False)
class Detection:
    """The result of a detector on N images, on the CPU.

    ``detection[3]`` is one image as a row, ``detection[:3]`` a shorter detection, and a loop goes over the rows.

    Attributes:
        label: The predicted class, (N,); -1 for an image with NaN or infinite pixels.
        logits: (N, C), before any temperature.
        probability: softmax(logits / T) with the one T that calibration fitted, (N, C).
        tau: The disagreement between the anchors, (N,); None for methods without anchors.
        score: Larger means further out of distribution, (N,).
        p_value: The share of in-distribution images that would score at least this high, (N,).
        is_ood: Whether the image is flagged, (N,).
        classes: Names of the classes, if the detector has them.
        names: Names of the images, if they came from files.
        reasons: Why each image is flagged, in plain words: ``"unlike anything seen"``, ``"between classes"`` or what
            else the method's alarm means; None for images that are not flagged.

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
    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    reasons: tuple[str | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.label)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Detection": ...

    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Detection":
        if not isinstance(index, slice):
            try:
                place = range(len(self))[operator.index(index)]
            except TypeError as error:
                raise InputError(f"a Detection takes a number or a slice, as d[2] or d[2:3]; got {index!r}") from error
            return self[place : place + 1].to_rows()[0]
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "classes"}
        return replace(self, **{name: value[index] for name, value in parts.items() if value is not None})

    def __repr__(self) -> str:
        if len(self) == 1:
            row = self[0]
            words = _class(row), f"{row['probability'] or 0:.0%}", verdict(row), f"p {row['p_value']:.2g}"
            return f"Detection({', '.join(words)})"
        return f"Detection({counted(len(self), 'image')}, {int(self.is_ood.sum()):,} flagged)"

    def _repr_html_(self) -> str:
        rows = self[:ROWS].to_rows()
        shown = [key for key in ROW if any(row[key] is not None for row in rows)]
        return html_table(shown, [[_shown(row[key]) for key in shown] for row in rows], caption=repr(self))

    def __dir__(self) -> list[str]:
        return [*(field.name for field in fields(self)), "to_rows", "to_pandas"]

    def to_pandas(self) -> Any:
        """The rows as a DataFrame."""
        return needs("pandas", "pandas", "to_pandas").DataFrame(self.to_rows(), columns=list(ROW))

    def to_rows(self, classes: Sequence[str] | None = None, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One dictionary per image, with the keys `ROW` that files, the HTTP service and pipelines use too.

        ``class`` is the name of the predicted class, ``probability`` that class's. A value that does not exist is None.

        Args:
            classes: Names of the classes; by default those of the detector.
            names: Names of the images; by default those of their files.
        """
        classes = self.classes if classes is None else classes
        names = names if names is not None else self.names or None
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
            missing if self.reasons is None else self.reasons,
        )
        return [dict(zip(ROW, values, strict=True)) for values in zip(*columns, strict=True)]


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _class(row: dict[str, Any]) -> str:
    return row["class"] or ("no class" if row["label"] is None else f"class {row['label']}")


def verdict(row: Mapping[str, Any]) -> str:
    """The verdict of a row in words, with the reason if there is one."""
    if not row["is_ood"]:
        return "in distribution"
    return "OUT OF DISTRIBUTION" + (f" ({row['reason']})" if row["reason"] else "")
