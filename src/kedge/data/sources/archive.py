"""Reading and unpacking of untrusted archives: nothing is written outside the folder, or left half unpacked."""

import contextlib
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from kedge.data.sources.downloads import disk_errors
from kedge.data.sources.entry import Progress
from kedge.errors import FileFormatError, InputError, NotReadyError

DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError)
_TEMPORARY = ".unpacking-"


def unpack(path: Path, folder: Path, holds: Sequence[str], progress: Progress | None = None) -> None:
    """Unpack a tar or zip into a temporary folder, then move each of ``holds`` to its place.

    Members with absolute paths or ``..``, links that leave the folder, and devices are refused.

    Args:
        path: The archive.
        folder: The folder for its content.
        holds: What the archive must contain at its top.
        progress: Called with the number of members so far.

    Example:
        >>> unpack(Path("nowhere.tar"), Path("."), ["data"])
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere.tar cannot be unpacked: No such file or directory
    """
    if not path.is_file():
        raise FileFormatError(f"{path} cannot be unpacked: No such file or directory")
    with temporary_folder(folder) as temporary:
        try:
            if zipfile.is_zipfile(path):
                _unzip(path, temporary, progress)
            else:
                _untar(path, temporary, progress)
        except DAMAGE as error:
            raise FileFormatError(f"{path} cannot be unpacked: {error}; delete it and fetch it again") from error
        except OSError as error:
            if error.errno is None:  # raised by a decompressor, such as gzip's BadGzipFile
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
        largest: The largest size in bytes that a member of an archive may state.
    """
    contents: dict[str, bytes] = {}
    if path.is_dir():
        contents = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    elif path.is_file():
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    base = re.split(r"[\\/]", member.name)[-1]
                    if base in names and base not in contents and member.isfile():
                        if member.size > largest:
                            raise FileFormatError(f"{member.name} in {path} is too large: {member.size:,} bytes")
                        stream = archive.extractfile(member)
                        contents[base] = stream.read() if stream is not None else b""
                _drain(archive)
        except (*DAMAGE, OSError) as error:
            raise FileFormatError(f"{path} is damaged: {error}; delete it and fetch it again") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise FileFormatError(f"{path} holds no {', '.join(missing)}")
    return contents


def _drain(archive: tarfile.TarFile) -> None:
    """Read an archive to its end, where the decompressor compares its checksum."""
    while archive.fileobj is not None and archive.fileobj.read(2**20):
        pass


def _untar(path: Path, folder: Path, progress: Progress | None) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise NotReadyError("unpacking an archive safely needs Python 3.11.4 or later")
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            archive.extract(member, folder, filter="data")
            if progress is not None and number % 64 == 0:
                progress(f"unpacking {path.name}", number, None)
        _drain(archive)


def _unzip(path: Path, folder: Path, progress: Progress | None) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        needed, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
        if needed > free:
            raise InputError(f"{path} needs {needed:,} bytes unpacked, and {folder.parent} has {free:,} free")
        for number, member in enumerate(members):
            inside = PurePosixPath(member.filename.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts or ":" in member.filename:
                raise FileFormatError(f"{path} must hold paths inside itself; it names {member.filename!r}: refused")
            archive.extract(member, folder)
            if progress is not None and number % 64 == 0:
                progress(f"unpacking {path.name}", number, len(members))
