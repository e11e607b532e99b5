"""CIFAR-10 and CIFAR-100: the official pickles and binaries, out of their archives or unpacked."""

import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.data.sources.archive import drain
from kedge.data.sources.entry import check_labels
from kedge.data.sources.unpickle import unpickle
from kedge.errors import FileFormatError

_PIXELS = 3 * 32 * 32
_LARGEST = 2**28  # bytes of one batch; CIFAR-100's training batch has 155 million
_DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Kind:
    """What the files of one CIFAR are called, and what they hold."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    meta: str
    meta_key: str
    names: str
    count: int
    label_bytes: int

    def batches(self, split: str) -> tuple[str, ...]:
        """The batch files of a split, without an ending."""
        return self.train if split == "train" else self.test


CIFAR10 = Kind(
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    labels="labels",
    meta="batches.meta",
    meta_key="label_names",
    names="batches.meta.txt",
    count=10,
    label_bytes=1,
)
CIFAR100 = Kind(
    train=("train",),
    test=("test",),
    labels="fine_labels",
    meta="meta",
    meta_key="fine_label_names",
    names="fine_label_names.txt",
    count=100,
    label_bytes=2,
)


def read_pickles(path: Path, split: str, name: str, *, kind: Kind) -> ImageSet:
    """Read the Python version, a folder or a tar.gz of pickles, without trusting the pickles.

    Example:
        >>> read_pickles(Path("nowhere"), "test", "cifar10", kind=CIFAR10)
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere holds no test_batch, batches.meta
    """
    found = _contents(path, (*kind.batches(split), kind.meta))
    images, labels = [], []
    for batch in kind.batches(split):
        where = f"{batch} in {path}"
        entry = unpickle(found[batch], where)
        data, numbers = entry.get("data"), entry.get(kind.labels)
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
            raise FileFormatError(f"{where} must hold data (N, {_PIXELS}) of uint8; it does not")
        if not isinstance(numbers, list) or len(numbers) != len(data) or not all(type(n) is int for n in numbers):
            raise FileFormatError(f"{where} must hold {kind.labels}, one whole number per image; it does not")
        images.append(data)
        labels.append(check_labels(np.array(numbers, np.int64), kind.count, where))
    names = unpickle(found[kind.meta], f"{kind.meta} in {path}").get(kind.meta_key)
    if not isinstance(names, list) or len(names) != kind.count:
        raise FileFormatError(f"{kind.meta} in {path} must list {kind.count} {kind.meta_key}; it does not")
    return _made(np.concatenate(images), np.concatenate(labels), name, [_text(n) for n in names])


def read_binary(path: Path, split: str, name: str, *, kind: Kind) -> ImageSet:
    """Read the binary version, a folder or a tar.gz: a row is the label's bytes and the pixels.

    Example:
        >>> read_binary(Path("nowhere"), "test", "cifar10", kind=CIFAR10)
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere holds no test_batch.bin, batches.meta.txt
    """
    files = [f"{batch}.bin" for batch in kind.batches(split)]
    found = _contents(path, (*files, kind.names))
    images, labels = [], []
    for file in files:
        where = f"{file} in {path}"
        row = kind.label_bytes + _PIXELS
        if not found[file] or len(found[file]) % row:
            raise FileFormatError(f"{where} must hold rows of {row} bytes; it has {len(found[file])} bytes")
        rows = np.frombuffer(found[file], np.uint8).reshape(-1, row)
        images.append(rows[:, kind.label_bytes :])
        labels.append(check_labels(rows[:, kind.label_bytes - 1], kind.count, where))  # the fine label comes last
    names = found[kind.names].decode("utf-8", errors="replace").split()
    if len(names) != kind.count:
        raise FileFormatError(f"{kind.names} in {path} must list {kind.count} classes; it lists {len(names)}")
    return _made(np.concatenate(images), np.concatenate(labels), name, names)


def _made(rows: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], name: str, classes: list[str]) -> ImageSet:
    images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (N, H, W, D): the files hold planes
    return ImageSet.from_arrays(images, labels, name=name, classes=classes)


def _contents(path: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """The wanted files of a folder or an archive, by their base names; an archive is read, not unpacked."""
    found: dict[str, bytes] = {}
    if path.is_dir():
        found = {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
    elif path.is_file():
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    base = re.split(r"[\\/]", member.name)[-1]
                    if base in wanted and base not in found and member.isfile():
                        if member.size > _LARGEST:
                            raise FileFormatError(f"{member.name} in {path} is too large to be a CIFAR batch")
                        stream = archive.extractfile(member)
                        found[base] = stream.read() if stream is not None else b""
                drain(archive)
        except _DAMAGE as error:
            raise FileFormatError(f"{path} is damaged: {error}; delete it and fetch it again") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise FileFormatError(f"{path} holds no {', '.join(missing)}")
    return found


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
