"""MNIST and Fashion-MNIST: the idx files, compressed or not."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.data.sources.entry import check_labels
from kedge.errors import FileFormatError

STEMS = {"train": "train", "test": "t10k"}


def read_pair(path: Path, split: str, name: str, *, classes: tuple[str, ...]) -> ImageSet:
    """Read an images file and the labels file that lies beside it.

    Example:
        >>> read_pair(Path("t10k-images-idx3-ubyte"), "test", "mnist", classes=())
        Traceback (most recent call last):
        kedge.errors.FileFormatError: t10k-images-idx3-ubyte cannot be read: No such file or directory
    """
    images = read_idx(path)
    stem = path.name.removesuffix(".gz").replace("images-idx3", "labels-idx1")
    beside = [path.with_name(stem + ending) for ending in (".gz", "")]
    labels_path = next((found for found in beside if found.is_file()), beside[0])
    labels = read_idx(labels_path)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise FileFormatError(
            f"{path} and {labels_path.name} must hold images (N, H, W) and labels (N,); they hold {images.shape} and "
            f"{labels.shape}"
        )
    checked = check_labels(labels, len(classes), str(labels_path))
    return ImageSet.from_arrays(images, checked, name=name, classes=classes)


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Read a file of bytes in the idx format.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
        >>> read_idx(path)
        array([7, 9], dtype=uint8)
    """
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return parse_idx(gzip.GzipFile(fileobj=raw) if compressed else raw, str(path))  # type: ignore[arg-type]
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_idx(stream: BinaryIO, where: str) -> np.ndarray[Any, Any]:
    """Read bytes in the idx format out of an open file; exactly as many as its head announces.

    Example:
        >>> import io
        >>> parse_idx(io.BytesIO(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7])), "labels")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: labels must hold 2 values; it holds another number of them
    """
    head = stream.read(4)
    if len(head) < 4 or head[:3] != b"\x00\x00\x08" or not 1 <= head[3] <= 3:
        raise FileFormatError(f"{where} is no idx file of bytes")
    sizes = stream.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise FileFormatError(f"{where} is no idx file of bytes")
    shape = struct.unpack(f">{head[3]}I", sizes)
    expected = int(np.prod(shape, dtype=np.uint64))
    body = stream.read(expected) if expected <= 2**31 else b""
    if len(body) != expected or stream.read(1):
        raise FileFormatError(f"{where} must hold {expected} values; it holds another number of them")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()  # torch wants memory of its own
