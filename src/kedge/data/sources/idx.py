"""MNIST and Fashion-MNIST: the idx files, compressed or not."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.errors import FileFormatError
from kedge.files import regular_file

STEMS = {"train": "train", "test": "t10k"}
_LARGEST = 2**28  # bytes; MNIST's training images have 47 million


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
    """Read a file of bytes in the idx format."""
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
    expected = int(np.prod(shape, dtype=np.uint64))
    body = stream.read(expected) if expected <= _LARGEST else b""
    if len(body) != expected or stream.read(1):
        raise FileFormatError(f"{where} must hold {expected} values; it holds another number of them")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()  # writable, for torch
