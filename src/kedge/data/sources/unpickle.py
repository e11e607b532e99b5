"""A restricted unpickler for plain values and uint8 arrays: nothing that a pickle names is run."""

import io
import pickle
from typing import Any

import numpy as np

from kedge.errors import FileFormatError


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
        >>> unpickle(pickle.dumps({"labels": [3, 1], "data": np.ones((2, 2), np.uint8)}), "batch")["data"]
        array([[1, 1],
               [1, 1]], dtype=uint8)
        >>> unpickle(pickle.dumps({"labels": io.BytesIO}), "batch")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: batch is not a CIFAR pickle: it names _io.BytesIO, which no data file ...
    """
    try:
        loaded = _Unpickler(io.BytesIO(data), encoding="latin-1").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise FileFormatError(f"{where} is not a CIFAR pickle: {error}") from error
    if not isinstance(loaded, dict):
        raise FileFormatError(f"{where} is not a CIFAR pickle: it must hold a dictionary, got {type(loaded).__name__}")
    keys = (key.decode("latin-1") if isinstance(key, bytes) else key for key in loaded)
    return {
        str(key): value.values if isinstance(value, _Array) and hasattr(value, "values") else value
        for key, value in zip(keys, loaded.values(), strict=True)
    }
