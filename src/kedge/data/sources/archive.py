"""Reading and unpacking of untrusted archives: nothing is written outside the folder, or left half unpacked.

Only regular files and folders are unpacked, within the free disk. `tarfile`'s own filter "data" is not used: it lets
links through, and up to Python 3.11.12 and 3.13.3 these can lead out of the folder.
"""

import contextlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from kedge.data.sources.downloads import disk_errors
from kedge.data.sources.entry import Progress
from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.files import read_limited, regular_file

DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError, ValueError,
    OverflowError, LookupError, lzma.LZMAError, FileExistsError, NotADirectoryError, IsADirectoryError,
)  # fmt: skip
MAX_MEMBERS = 5_000_000  # ImageNet-C's largest archive has a million
_BLOCK = 4096  # bytes of disk that any member takes, at least
_LARGEST_HEADER = 2**20  # bytes of a name or an extended header, which tarfile reads into memory
_PADDING = 2**20  # bytes after the last member; GNU tar pads to 10,240
_TEMPORARY = ".unpacking-"


class Member(NamedTuple):
    """One entry of a tar or zip; ``kind`` as in `stat.S_IFMT`."""

    name: str
    kind: int
    open: Callable[[], IO[bytes] | None]


def unpack(path: Path, folder: Path, holds: Sequence[str], progress: Progress | None = None) -> None:
    """Unpack a tar or zip into a temporary folder, then move each of ``holds`` to its place.

    Links, devices, pipes, paths that leave the folder and names that occur twice are refused.

    Args:
        path: The archive.
        folder: The folder for its content.
        holds: What the archive must contain at its top.
        progress: Called with the number of members so far.
    """
    members = _zip_members if zipfile.is_zipfile(regular_file(path, "unpacked")) else _tar_members
    with temporary_folder(folder) as temporary:
        free = shutil.disk_usage(temporary).free
        try:
            for number, member in enumerate(members(path, free - free // 20)):
                _extract(member, temporary.resolve())
                if progress is not None and number % 64 == 0:
                    progress(f"unpacking {path.name}", number, None)
        except KedgeError as error:
            raise type(error)(f"{path} cannot be unpacked: {error}") from error
        except (*DAMAGE, OSError) as error:
            if isinstance(error, DAMAGE) or error.errno is None:  # without one it is a decompressor's, as BadGzipFile
                raise FileFormatError(f"{path} cannot be unpacked: {error}; delete it and fetch it again") from error
            raise InputError(f"{path} cannot be unpacked into {folder}: {error.strerror}") from error
        missing = [name for name in holds if not (temporary / name).exists()]
        if missing:
            raise FileFormatError(f"{path} must hold {', '.join(missing)} at its top; it does not")
        for name in holds:
            if not (folder / name).exists():
                os.replace(temporary / name, folder / name)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder inside ``folder``, so that a move out of it is atomic; `sweep` removes what a kill leaves."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=_TEMPORARY))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def leftovers(folder: Path) -> list[Path]:
    """What killed processes left in a folder, without the parts of downloads, which the next one resumes."""
    notes = [note for note in folder.glob(".*.part.json") if not note.with_suffix("").exists()]
    written = [*folder.glob(".*.npz.*.part"), *folder.glob(".*.json.*.part")]  # by `kedge.files.atomic`
    return [*folder.glob(f"{_TEMPORARY}*"), *notes, *written]


def sweep(folder: Path) -> None:
    """Remove the `leftovers`; only the holder of the folder's lock may do so."""
    for path in leftovers(folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_members(path: Path, names: Sequence[str], largest: int) -> dict[str, bytes]:
    """The files of a folder or a tar by their base names, read into memory; an archive is not unpacked.

    Args:
        path: A folder or a tar.
        names: Base names of the files; all of them must be there.
        largest: The largest size in bytes of a file; an archive may have twice as much for each of the names.
    """
    contents: dict[str, bytes] = {}
    if path.is_dir():
        contents = {name: read_limited(path / name, largest) for name in names if (path / name).exists()}
    else:
        regular_file(path)
        try:
            for member in _tar_members(path, 2 * len(names) * largest):
                base = re.split(r"[\\/]", member.name)[-1]
                if base in names and base not in contents and member.kind == stat.S_IFREG:
                    stream = member.open()
                    assert stream is not None  # of a regular file
                    contents[base] = stream.read()
        except (*DAMAGE, OSError) as error:
            raise FileFormatError(f"{path} is damaged: {error}; delete it and fetch it again") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise FileFormatError(f"{path} holds no {', '.join(missing)}")
    return contents


class _TarHeader(tarfile.TarInfo):
    """A header whose name and extensions have a limit before they are read."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and self.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


def _tar_members(path: Path, limit: int) -> Iterator[Member]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"  # tarfile would try each decompressor, one on the whole file
    with tarfile.open(path, "r:gz" if packed else "r:", tarinfo=_TarHeader) as archive:
        total = 0
        for number, info in enumerate(archive):
            total = _within(limit, total, info.size, number)
            archive.members = []  # type: ignore[attr-defined]  # or it keeps every header in memory
            kind = stat.S_IFREG if info.isreg() else stat.S_IFDIR if info.isdir() else 0
            yield Member(info.name, kind, partial(archive.extractfile, info))
        if packed and archive.fileobj is not None and len(archive.fileobj.read(_PADDING)) == _PADDING:
            raise FileFormatError("it goes on after its end")  # at its end the decompressor compares its checksum


def _zip_members(path: Path, limit: int) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        total = 0
        for number, info in enumerate(archive.infolist()):  # all sizes first; they hold when the members are read
            total = _within(limit, total, info.file_size, number)
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16) or (stat.S_IFDIR if info.is_dir() else stat.S_IFREG)
            yield Member(info.filename, kind, partial(archive.open, info))


def _within(limit: int, total: int, size: int, number: int) -> int:
    """The bytes so far, with one more member; raises if they are too many."""
    total += _BLOCK + max(size, 0)
    if total > limit or number >= MAX_MEMBERS or size < 0:
        raise InputError(f"it holds more than {limit:,} bytes, the room for it, or {MAX_MEMBERS:,} files")
    return total


def _extract(member: Member, folder: Path) -> None:
    """Write one member below a folder; each path is checked as text, and again with all links resolved."""
    inside = PurePosixPath(member.name.replace("\\", "/"))
    if inside.is_absolute() or ".." in inside.parts or ":" in member.name:
        raise FileFormatError(f"it must hold paths inside itself; it names {member.name!r}: refused")
    if member.kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise FileFormatError(f"it must hold regular files and folders only; {member.name!r} is a link or device")
    target = folder / inside
    if not target.resolve().is_relative_to(folder):
        raise FileFormatError(f"it must hold paths inside itself; {member.name!r} is not: refused")
    if member.kind == stat.S_IFDIR:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    stream = member.open()
    assert stream is not None  # of a regular file
    with stream, target.open("xb") as file:  # x: a name that occurs twice is an error
        shutil.copyfileobj(stream, file, 2**20)
