"""CIFAR-10 and CIFAR-100: the official pickles and binaries, in their archives or unpacked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.data.sources.archive import read_members
from kedge.data.sources.unpickle import unpickle
from kedge.errors import FileFormatError

_PIXELS = 3 * 32 * 32
_LARGEST = 2**28  # bytes of one batch; CIFAR-100's training batch has 155 million


@dataclass(frozen=True)
class Cifar:
    """The names and contents of the files of one CIFAR."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str  # key of the labels in a pickled batch
    meta: str  # the pickle with the names of the classes ...
    meta_key: str  # ... and its key
    names: str  # the names of the classes in the binary version
    count: int
    label_bytes: int

    def batches(self, split: str) -> tuple[str, ...]:
        """The batch files of a split, without their suffix."""
        return self.train if split == "train" else self.test


_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10 = Cifar(_TRAIN, ("test_batch",), "labels", "batches.meta", "label_names", "batches.meta.txt", 10, 1)
CIFAR100 = Cifar(("train",), ("test",), "fine_labels", "meta", "fine_label_names", "fine_label_names.txt", 100, 2)


def read_pickles(path: Path, split: str, name: str, *, kind: Cifar) -> ImageSet:
    """Read the Python version, a folder or a tar.gz of pickles, with the restricted unpickler."""
    contents = read_members(path, (*kind.batches(split), kind.meta), _LARGEST)
    images, labels = [], []
    for batch in kind.batches(split):
        where = f"{batch} in {path}"
        entry = unpickle(contents[batch], where)
        data, numbers = entry.get("data"), entry.get(kind.labels)
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
            raise FileFormatError(f"{where} must hold data (N, {_PIXELS}) of uint8; it does not")
        if not isinstance(numbers, list) or len(numbers) != len(data) or not all(type(n) is int for n in numbers):
            raise FileFormatError(f"{where} must hold {kind.labels}, one whole number per image; it does not")
        images.append(data)
        labels.append(np.array(numbers, np.int64))
    names = unpickle(contents[kind.meta], f"{kind.meta} in {path}").get(kind.meta_key)
    if not isinstance(names, list) or len(names) != kind.count:
        raise FileFormatError(f"{kind.meta} in {path} must list {kind.count} {kind.meta_key}; it does not")
    classes = [n.decode("latin-1") if isinstance(n, bytes) else str(n) for n in names]
    return _image_set(np.concatenate(images), np.concatenate(labels), name, classes)


def read_binary(path: Path, split: str, name: str, *, kind: Cifar) -> ImageSet:
    """Read the binary version, a folder or a tar.gz: each row holds the bytes of the label and the pixels."""
    files = [f"{batch}.bin" for batch in kind.batches(split)]
    contents = read_members(path, (*files, kind.names), _LARGEST)
    images, labels = [], []
    for file in files:
        where, row = f"{file} in {path}", kind.label_bytes + _PIXELS
        if not contents[file] or len(contents[file]) % row:
            raise FileFormatError(f"{where} must hold rows of {row} bytes; it has {len(contents[file])} bytes")
        rows = np.frombuffer(contents[file], np.uint8).reshape(-1, row)
        images.append(rows[:, kind.label_bytes :])
        labels.append(rows[:, kind.label_bytes - 1])  # the fine label comes last
    names = contents[kind.names].decode("utf-8", errors="replace").split()
    if len(names) != kind.count:
        raise FileFormatError(f"{kind.names} in {path} must list {kind.count} classes; it lists {len(names)}")
    return _image_set(np.concatenate(images), np.concatenate(labels), name, names)


def _image_set(rows: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], name: str, classes: list[str]) -> ImageSet:
    images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (N, H, W, D): the files hold planes
    return ImageSet.from_arrays(images, labels, name=name, classes=classes)
