"""LSUN: encoded images in an LMDB database, read with the lmdb package."""

import functools
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from kedge.checks import needs
from kedge.data.streamed import StreamedSet
from kedge.errors import FileFormatError


@dataclass(frozen=True)
class Lmdb:
    """Images in an LMDB database, by their keys; every worker process opens its own environment."""

    path: Path
    names: tuple[str, ...]

    def stream(self, index: int) -> BinaryIO:
        """The encoded image as an open file."""
        return io.BytesIO(self._value(index))

    def size(self, index: int) -> int:
        """The number of bytes of the encoded image."""
        return len(self._value(index))

    def pick(self, indices: Sequence[int]) -> "Lmdb":
        """Only these images."""
        return replace(self, names=tuple(self.names[i] for i in indices))

    def _value(self, index: int) -> bytes:
        with _environment(str(self.path)).begin(write=False) as transaction:
            value: bytes | None = transaction.get(self.names[index].encode("latin-1"))
        if value is None:
            raise FileFormatError(f"{self.path} no longer holds the image {self.names[index]!r}")
        return value


def read_lmdb(path: Path, split: str, name: str) -> StreamedSet:
    """Every image of a database, without labels."""
    with _environment(str(path)).begin(write=False) as transaction:
        keys = tuple(bytes(key).decode("latin-1") for key in transaction.cursor().iternext(keys=True, values=False))
    if not keys:
        raise FileFormatError(f"{path} holds no images")
    return StreamedSet(Lmdb(path, keys), name=name)


@functools.lru_cache(maxsize=8)
def _environment(path: str) -> Any:
    """One environment per database and process: LMDB forbids two in one process, and one in two processes."""
    if not (Path(path) / "data.mdb").is_file():
        raise FileFormatError(f"{path} is not an LMDB database; it must hold data.mdb")
    lmdb = needs("lmdb", "lsun", "LSUN's database")
    try:
        return lmdb.open(path, readonly=True, lock=False, readahead=False, meminit=False, max_readers=1)
    except lmdb.Error as error:
        raise FileFormatError(f"{path} is not an LMDB database: {error}") from error


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_environment.cache_clear)
