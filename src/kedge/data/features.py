"""Features: what detectors read of a set of images, extracted once; in memory or memory-mapped from a folder."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from kedge.data.imageset import Splittable, check_labels
from kedge.data.preprocess import Preprocess
from kedge.errors import FileFormatError, InputError

MANIFEST = "features.json"
COLUMNS = ("logits", "features", "labels", "prints", "per_anchor")  # one .npy file each
KINDS = {
    **dict.fromkeys(("images", "done", "outputs", "width"), int),
    **dict.fromkeys(("dtype", "network", "head", "name", "checksum"), str),
    "half": bool,
    "classes": list,
    "preprocess": dict,
}


class FeatureBatch(NamedTuple):
    """A batch of extracted features, on the network's device."""

    logits: Tensor  # (B, C)
    features: Tensor  # (B, d), the input of the network's last linear layer
    labels: Tensor | None  # (B,)


@dataclass(frozen=True, eq=False)
class Features(Splittable):
    """Logits and last features of a set of images, which detectors take in place of the images; see `kedge.extract`.

    Args:
        logits: (N, C).
        features: (N, d), the inputs of the network's last linear layer; means over the anchors of an anchored network.
        labels: (N,), -1 for images without a label; or None.
        prints: Fingerprints of the images, (N, 16).
        preprocess: How the images became inputs.
        network: Checksum of the network that they were extracted from.
        head: The name of its last linear layer.
        name: Name of the set.
        classes: Names of its classes.
        checksum: Of the set.
        per_anchor: The logits under each anchor of an anchored network, (N, K, C); their mean are the logits.
    """

    logits: Tensor
    features: Tensor
    labels: Tensor | None
    prints: Tensor
    preprocess: Preprocess
    network: str
    head: str
    name: str = "images"
    classes: tuple[str, ...] = ()
    checksum: str = ""
    per_anchor: Tensor | None = None

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.logits, self.features, self.prints)}
        if self.logits.ndim != 2 or self.features.ndim != 2 or len(lengths) != 1:
            raise InputError(
                f"logits and features must be (N, C) and (N, d) with one fingerprint each; got "
                f"{tuple(self.logits.shape)}, {tuple(self.features.shape)} and {len(self.prints)}"
            )
        if self.labels is not None:
            object.__setattr__(self, "labels", check_labels(self.labels, len(self), self.classes, self.name))

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        n, (classes, width) = len(self), (self.logits.shape[1], self.features.shape[1])
        return f"Features({self.name!r}, {n:,} images, {classes:,} logits, {width:,} features)"

    def subset(self, indices: Tensor | Sequence[int], *, name: str | None = None) -> "Features":
        """The images at ``indices``, in that order, or those where a mask is true."""
        chosen = self._chosen(indices)
        columns = {key: value[chosen] for key in COLUMNS if (value := getattr(self, key)) is not None}
        return replace(self, **columns, name=name or self.name, checksum="")

    def batches(self, size: int, device: torch.device | None = None) -> Iterator[tuple[FeatureBatch, Tensor]]:
        """Batches on a device, in single precision at least, and their fingerprints."""
        for first in range(0, len(self), size):
            rows = slice(first, first + size)
            logits, features = (_on(device, value[rows]) for value in (self.logits, self.features))
            labels = None if self.labels is None else self.labels[rows].to(device)
            if labels is not None and bool((labels < 0).all()):
                labels = None
            yield FeatureBatch(logits, features, labels), self.prints[rows]

    def anchor_batches(self, size: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """Per-anchor logits (K, B, C) batch by batch, on a device, in single precision at least."""
        if self.per_anchor is None:
            raise InputError("the features must hold per-anchor logits: extract them again, of an anchored network")
        for part in self.per_anchor.split(size):
            yield _on(device, part).transpose(0, 1)

    def as_inputs(self) -> TensorDataset:
        """The features as vectors with labels, -1 if unknown, for a network that takes them as inputs."""
        labels = torch.full((len(self),), -1) if self.labels is None else self.labels
        return TensorDataset(self.features.to(torch.promote_types(self.features.dtype, torch.float32)), labels)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "Features":
        """The features in a folder that `kedge.extract` wrote, memory-mapped."""
        folder = Path(directory)
        manifest = read_manifest(folder)
        if manifest["done"] < manifest["images"]:
            raise InputError(
                f"{folder} holds {manifest['done']:,} of {manifest['images']:,} images: run the same extraction again, "
                "which goes on from there"
            )
        columns = open_columns(folder, manifest)
        labels = torch.from_numpy(columns["labels"])
        known = bool((labels >= 0).any())
        return cls(
            logits=torch.from_numpy(columns["logits"]),
            features=torch.from_numpy(columns["features"]),
            labels=labels if known else None,
            prints=torch.from_numpy(columns["prints"]),
            per_anchor=torch.from_numpy(columns["per_anchor"]) if "per_anchor" in columns else None,
            preprocess=Preprocess.from_record(manifest["preprocess"]),
            classes=tuple(manifest["classes"]),
            **{key: manifest[key] for key in ("network", "head", "name", "checksum")},
        )


def _on(device: torch.device | None, values: Tensor) -> Tensor:
    return values.to(device).to(torch.promote_types(values.dtype, torch.float32))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder of features says of itself, checked."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} must be a folder of features that kedge extract wrote; it has no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        Preprocess.from_record(manifest["preprocess"])
        wrong = [key for key, kind in KINDS.items() if not isinstance(manifest.get(key), kind)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InputError) as error:
        raise FileFormatError(f"{path} is damaged: {error}; extract the features again") from error
    if wrong:
        raise FileFormatError(f"{path} is damaged, in {', '.join(wrong)}; extract the features again")
    return manifest


def open_columns(
    folder: Path, manifest: dict[str, Any], *, mode: Literal["r+", "c"] = "c", create: bool = False
) -> dict[str, Any]:
    """The arrays of a folder, memory-mapped: written to with mode ``"r+"``, left as they are with ``"c"``."""
    n = manifest["images"]
    layout = {
        "logits": (manifest["dtype"], (n, manifest["outputs"])),
        "features": ("float16" if manifest["half"] else manifest["dtype"], (n, manifest["width"])),
        "labels": ("int64", (n,)),
        "prints": ("uint8", (n, 16)),
    }
    if anchors := manifest.get("anchors", 0):
        layout["per_anchor"] = (manifest["dtype"], (n, anchors, manifest["outputs"]))
    columns = {}
    for key, (dtype, shape) in layout.items():
        path = folder / f"{key}.npy"
        if create:
            np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape).flush()
        try:
            columns[key] = np.load(path, mmap_mode=mode, allow_pickle=False)
        except (OSError, ValueError, EOFError, SyntaxError) as error:
            raise FileFormatError(f"{path} is missing or damaged: {error}; extract the features again") from error
        if columns[key].shape != shape or columns[key].dtype != dtype:
            came = f"{columns[key].dtype} {columns[key].shape}"
            raise FileFormatError(f"{path} must hold {dtype} {shape}, not {came}; extract the features again")
    return columns
