"""CIFAR-10 and CIFAR-100: the official pickles and binaries, in their archives or unpacked.

Pickles are read by a restricted unpickler for plain values and uint8 arrays: nothing that a pickle names is run.
"""

import io
import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.data.sources.archive import read_members
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
    """Read the Python version, a folder or a tar.gz of pickles."""
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
        labels.append(numbers)
    names = unpickle(contents[kind.meta], f"{kind.meta} in {path}").get(kind.meta_key)
    if not isinstance(names, list) or len(names) != kind.count:
        raise FileFormatError(f"{kind.meta} in {path} must list {kind.count} {kind.meta_key}; it does not")
    return _image_set(images, labels, name, [n.decode("latin-1") if isinstance(n, bytes) else str(n) for n in names])


def read_binary(path: Path, split: str, name: str, *, kind: Cifar) -> ImageSet:
    """Read the binary version, a folder or a tar.gz: each row holds the bytes of the label and the pixels."""
    files = [f"{batch}.bin" for batch in kind.batches(split)]
    contents = read_members(path, (*files, kind.names), _LARGEST)
    images, labels = [], []
    for file in files:
        row = kind.label_bytes + _PIXELS
        if not contents[file] or len(contents[file]) % row:
            size = len(contents[file])
            raise FileFormatError(f"{file} in {path} must hold rows of {row} bytes; it has {size} bytes")
        rows = np.frombuffer(contents[file], np.uint8).reshape(-1, row)
        images.append(rows[:, kind.label_bytes :])
        labels.append(rows[:, kind.label_bytes - 1])  # the fine label comes last
    names = contents[kind.names].decode("utf-8", errors="replace").split()
    if len(names) != kind.count:
        raise FileFormatError(f"{kind.names} in {path} must list {kind.count} classes; it lists {len(names)}")
    return _image_set(images, labels, name, names)


def _image_set(images: list[Any], labels: list[Any], name: str, classes: list[str]) -> ImageSet:
    rows = np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (N, H, W, D): the files hold planes
    return ImageSet.from_arrays(rows, np.concatenate(labels).astype(np.int64), name=name, classes=classes)


class _Dtype:
    """A stand-in for numpy.dtype that keeps its code only."""

    def __init__(self, code: str, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """A stand-in for numpy.ndarray, whose own unpickling trusts the file; uint8 only."""

    values: np.ndarray[Any, Any]

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes | str]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1") or not isinstance(data, (bytes, str)):
            raise pickle.UnpicklingError("arrays must be uint8")
        raw = data.encode("latin-1") if isinstance(data, str) else data  # Python 2 wrote bytes as text
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text in the encoding {encoding!r}")
    return text.encode("latin-1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes for Python 2 to read
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data file needs; nothing of it was run")
        return _ALLOWED[module, name]


def unpickle(data: bytes, where: str) -> dict[str, Any]:
    """Read a pickled dictionary of numbers, text, lists and uint8 arrays; anything else is refused and not run.

    Example:
        >>> unpickle(pickle.dumps({"labels": io.BytesIO}), "batch")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: batch is not a CIFAR pickle: it names _io.BytesIO, which no data file ...
    """
    try:
        for code, argument, _ in pickletools.genops(data):  # Python makes room for all places before the named one
            if code.name.endswith("PUT") and int(argument or 0) > len(data):
                raise pickle.UnpicklingError(f"it stores a value in place {argument}")
        loaded = _Unpickler(io.BytesIO(data), encoding="latin-1").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise FileFormatError(f"{where} is not a CIFAR pickle: {error}") from error
    if not isinstance(loaded, dict):
        raise FileFormatError(f"{where} is not a CIFAR pickle: it must hold a dictionary, got {type(loaded).__name__}")
    keys = (key.decode("latin-1") if isinstance(key, bytes) else str(key) for key in loaded)
    values = (getattr(v, "values", v) if isinstance(v, _Array) else v for v in loaded.values())
    return dict(zip(keys, values, strict=True))
