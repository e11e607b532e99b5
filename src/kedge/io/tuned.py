"""How the options of a detector were chosen, as its file records it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

import torch
from torch import Tensor

from kedge.errors import FileFormatError
from kedge.io.schema import check

WAYS = {"classes": "held-out classes", "synthetic": "synthetic outliers"}  # without OOD images, in words


class TunedPart(TypedDict):
    """What the header of a file says of the choice."""

    options: dict[str, Any]
    by: str
    auroc: float
    default_auroc: float | None
    tried: int
    seed: int


@dataclass(frozen=True)
class Tuned:
    """Options that `kedge.tune` chose, and how.

    Attributes:
        options: Those that differ from the defaults.
        by: ``"classes"``, ``"synthetic"``, or the name of the OOD set that was given.
        auroc: Of these options, against what stood for unknown images, in [0, 1].
        default_auroc: Of the default options; None if they do not suit the network or the training set.
        tried: How many combinations of options were compared.
        seed: Random seed of the samples and of the classes that were held out.
        held_out: Fingerprints of the in-distribution images, (N, 16).
        outliers: Those of the OOD images, if some were given, or (0, 16).
    """

    options: dict[str, Any]
    by: str
    auroc: float
    default_auroc: float | None
    tried: int
    seed: int
    held_out: Tensor
    outliers: Tensor

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in self.options.items()) or "defaults"
        default = "" if self.default_auroc is None else f", by default {self.default_auroc:.1%}"
        return f"{chosen} by {WAYS.get(self.by, self.by)} (AUROC {self.auroc:.1%}{default})"

    def header(self) -> dict[str, Any]:
        """What is no tensor."""
        return {name: getattr(self, name) for name in TunedPart.__annotations__}

    def tensors(self) -> dict[str, Tensor]:
        """The fingerprints."""
        return {"held_out": self.held_out, "outliers": self.outliers}

    @classmethod
    def read(cls, header: Any, tensors: Mapping[str, Tensor]) -> Self | None:
        """From the parts of a file, checked; None without a header, as of options that were not tuned."""
        if header is None:
            return None
        check(header, TunedPart, "tuned")
        for name in ("held_out", "outliers"):
            prints = tensors[name]
            if prints.ndim != 2 or prints.shape[1] != 16 or prints.dtype != torch.uint8:
                raise FileFormatError(f"tuned.{name} must be (N, 16) bytes, got {tuple(prints.shape)}")
        known = {name: header[name] for name in TunedPart.__annotations__}
        return cls(**known, held_out=tensors["held_out"], outliers=tensors["outliers"])
