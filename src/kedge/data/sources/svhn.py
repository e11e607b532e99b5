"""SVHN: MATLAB 5 files.

Read here because `scipy.io.loadmat` can crash the process on a damaged file, and is not limited in memory.
"""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.errors import FileFormatError
from kedge.files import regular_file

_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_NUMERIC = range(6, 16)  # array classes from double to uint64; not cells, structures, objects, text or sparse ones
_LARGEST = 2**31  # bytes; SVHN's extra split has 1.6e9


def read_svhn(path: Path, split: str, name: str) -> ImageSet:
    """Read ``{split}_32x32.mat``: X (32, 32, 3, N) and y (N, 1), where 10 is the digit 0."""
    arrays = read_mat(path)
    x, y = arrays.get("X"), arrays.get("y")
    if x is None or y is None or x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        content = ", ".join(f"{key} {value.dtype} {value.shape}" for key, value in arrays.items()) or "nothing"
        raise FileFormatError(f"{path} must hold X (32, 32, 3, N) of uint8 and y (N, 1); it holds {content}")
    if y.size != x.shape[3]:
        raise FileFormatError(f"{path} must hold a label per image; it holds {x.shape[3]} images and {y.size} labels")
    digits = y.reshape(-1)
    if digits.size and (digits.min() < 1 or digits.max() > 10 or bool((digits % 1 != 0).any())):
        raise FileFormatError(f"{path} must hold labels 1 to 10; it holds {digits.min()} to {digits.max()}")
    images = x.transpose(3, 0, 1, 2)  # (N, H, W, D)
    return ImageSet.from_arrays(images, digits.astype(np.int64) % 10, name=name, classes=tuple("0123456789"))


def read_mat(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the numeric arrays of a MATLAB 5 file, compressed or not; other kinds of values are left out."""
    size, arrays = regular_file(path).stat().st_size, {}
    try:
        with path.open("rb") as file:
            head = file.read(128)
            if head[126:] not in (b"IM", b"MI"):
                hint = "; it is of version 7.3" if head.startswith(b"MATLAB 7.3") else ""
                raise FileFormatError(f"{path} is not a MATLAB 5 file{hint}")
            order = "<" if head[126:] == b"IM" else ">"
            while file.tell() < size:
                kind, length = struct.unpack(f"{order}II", file.read(8))
                if length > min(size - file.tell(), _LARGEST):
                    raise ValueError("it ends early, or has an array that is too large")
                element = memoryview(file.read(length))
                if kind == _COMPRESSED:
                    kind, element = _inflate(element, order)
                if kind == _MATRIX and (variable := _matrix(element, order)) is not None:
                    arrays[variable[0]] = variable[1]
    except FileFormatError:
        raise
    except (OSError, ValueError, IndexError, struct.error, zlib.error) as error:
        raise FileFormatError(f"{path} is damaged: {error}; delete it and fetch it again") from error
    return arrays


def _inflate(element: memoryview, order: str) -> tuple[int, memoryview]:
    """Decompress an element, up to the size that it states."""
    decompressor = zlib.decompressobj()
    kind, size = struct.unpack(f"{order}II", decompressor.decompress(element, 8))
    if size > _LARGEST:
        raise ValueError(f"an array of {size} bytes")
    body = decompressor.decompress(decompressor.unconsumed_tail, size)
    if len(body) < size:
        raise ValueError("a compressed array ends early")
    return kind, memoryview(body)


def _matrix(data: memoryview, order: str) -> tuple[str, np.ndarray[Any, Any]] | None:
    """The name and values of a matrix; None if it is not numeric."""
    flags, at = _part(data, 0, order)
    dims, at = _part(data, at, order)
    title, at = _part(data, at, order)
    if int(flags[0]) & 0xFF not in _NUMERIC:
        return None
    values, _ = _part(data, at, order)
    shape = tuple(int(n) for n in dims)
    if values.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"an array {shape} with {values.size} values")
    return title.tobytes().decode("latin-1"), values.reshape(shape, order="F")


def _part(data: memoryview, at: int, order: str) -> tuple[np.ndarray[Any, Any], int]:
    """One element of a matrix, and the start of the next one (at a multiple of 8 bytes)."""
    (kind,) = struct.unpack_from(f"{order}I", data, at)
    if kind >> 16:  # the short form: size, type and up to four bytes in one word
        size, kind, start, after = kind >> 16, kind & 0xFFFF, at + 4, at + 8
    else:
        (size,) = struct.unpack_from(f"{order}I", data, at + 4)
        start, after = at + 8, at + 8 + (size + 7) // 8 * 8
    if kind not in _TYPES:
        raise ValueError(f"values of the unknown type {kind}")
    if start + size > len(data):
        raise ValueError("an array ends early")
    return np.frombuffer(data[start : start + size], np.dtype(order + _TYPES[kind])), after
