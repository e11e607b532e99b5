"""Unpacking archives: nothing lands outside its folder, and nothing half unpacked is taken for whole."""

import contextlib
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from kedge.data.sources.entry import Progress
from kedge.errors import FileFormatError, InputError, NotReadyError

_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError)
_TEMPORARY = ".unpacking-"


def unpack(path: Path, folder: Path, holds: Sequence[str], progress: Progress | None = None) -> None:
    """Unpack a tar or zip into a folder: first aside, then each of ``holds`` is moved to its place.

    Members with absolute paths, with ``..``, links that leave the folder, and devices are refused.

    Args:
        path: The archive.
        folder: Where its content goes; on the same disk, so that the move is one step.
        holds: What the archive must hold at its top.
        progress: Told the members so far.

    Example:
        >>> unpack(Path("nowhere.tar"), Path("."), ["data"])
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere.tar cannot be unpacked: No such file or directory
    """
    if not path.is_file():
        raise FileFormatError(f"{path} cannot be unpacked: No such file or directory")
    with _aside(folder) as aside:
        try:
            if zipfile.is_zipfile(path):
                _unzip(path, aside, progress)
            else:
                _untar(path, aside, progress)
        except _DAMAGE as error:
            raise FileFormatError(f"{path} cannot be unpacked: {error}; delete it and fetch it again") from error
        except OSError as error:
            if error.errno is None:  # the decompressors' own, such as gzip's BadGzipFile
                raise FileFormatError(f"{path} cannot be unpacked: {error}; delete it and fetch it again") from error
            raise InputError(f"{path} cannot be unpacked into {folder}: {error.strerror}") from error
        missing = [name for name in holds if not (aside / name).exists()]
        if missing:
            raise FileFormatError(f"{path} must hold {', '.join(missing)} at its top; it does not")
        for name in holds:
            if not (folder / name).exists():
                os.replace(aside / name, folder / name)


def leftovers(folder: Path) -> list[Path]:
    """What killed runs left aside, where none is at work; not the parts of downloads, with which the next one goes on.

    Example:
        >>> leftovers(Path("nowhere"))
        []
    """
    notes = [note for note in folder.glob(".*.part.json") if not note.with_suffix("").exists()]
    written = [*folder.glob(".*.npz.*.part"), *folder.glob(".*.json.*.part")]  # by `kedge.files.atomic`
    return [*folder.glob(f"{_TEMPORARY}*"), *notes, *written]


def sweep(folder: Path) -> None:
    """Remove the `leftovers`; only the holder of the folder's lock may do so.

    Example:
        >>> sweep(Path("nowhere"))
    """
    for left in leftovers(folder):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def drain(archive: tarfile.TarFile) -> None:
    """Read an archive to its very end, where the decompressor compares its own checksum.

    Example:
        >>> import io
        >>> packed = io.BytesIO()
        >>> tarfile.open(fileobj=packed, mode="w:gz").close()
        >>> with tarfile.open(fileobj=io.BytesIO(packed.getvalue()[:-8] + bytes(8))) as archive:
        ...     drain(archive)
        Traceback (most recent call last):
        gzip.BadGzipFile: CRC check failed ...
    """
    while archive.fileobj is not None and archive.fileobj.read(2**20):
        pass


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder, prefix=_TEMPORARY))
    except OSError as error:
        raise InputError(f"data_dir must be writable; {folder} is not: {error.strerror or error}") from error
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _untar(path: Path, aside: Path, progress: Progress | None) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise NotReadyError("unpacking an archive safely needs Python 3.11.4 or later")
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            archive.extract(member, aside, filter="data")
            if progress is not None and number % 64 == 0:
                progress(f"unpacking {path.name}", number, None)
        drain(archive)


def _unzip(path: Path, aside: Path, progress: Progress | None) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        needed, free = sum(member.file_size for member in members), shutil.disk_usage(aside).free
        if needed > free:
            raise InputError(f"{path} needs {needed:,} bytes unpacked, and {aside.parent} has {free:,} free")
        for number, member in enumerate(members):
            inside = PurePosixPath(member.filename.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts or ":" in member.filename:
                raise FileFormatError(f"{path} must hold paths inside itself; it names {member.filename!r}: refused")
            archive.extract(member, aside)
            if progress is not None and number % 64 == 0:
                progress(f"unpacking {path.name}", number, len(members))
