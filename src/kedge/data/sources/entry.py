"""What kedge knows about a public data set: where it comes from, under what terms, and in which forms it is read."""

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
    from kedge.data.sources.hub import Hub
    from kedge.data.sources.npm import Npm

Images = ImageSet | StreamedSet
Reader = Callable[[Path, str, str], Images]  # (what lies on disk, split, name of the set)
Arrays = dict[str, np.ndarray[Any, Any]]  # train_x, train_y, test_x, test_y
Progress = Callable[[str, int, int | None], None]  # (what, done so far, in all where known)


@dataclass(frozen=True)
class Checksum:
    """A digest, and who published it."""

    algorithm: str
    digest: str
    origin: str

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ("md5", "sha256"))


@dataclass(frozen=True)
class File:
    """One file of the official distribution.

    Args:
        name: Under which it lies in the set's folder.
        urls: Where it is to be had, tried in this order; none for a file that no program can fetch.
        checksum: As published; None is "recorded on first use".
        holds: What unpacking the archive gives; nothing for a file that is read as it is.
        splits: That need this file; nothing for all of them.
    """

    name: str
    urls: tuple[str, ...] = ()
    checksum: Checksum | None = None
    holds: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.checksum is None and any(not url.startswith("https://") for url in self.urls):
            raise InputError(f"{self.name} must come over https, for it has no published checksum; got {self.urls}")

    def serves(self, split: str) -> bool:
        """Whether this split needs the file.

        Example:
            >>> File("test_32x32.mat", splits=("test",)).serves("train")
            False
        """
        return not self.splits or split in self.splits


@dataclass(frozen=True)
class Form:
    """One form in which a set may lie on disk.

    Args:
        paths: In the set's folder, per split if they differ: all must be there, and the first one is what is read.
        read: Its reader.
    """

    paths: tuple[str, ...] | Mapping[str, tuple[str, ...]]
    read: Reader

    def find(self, folder: Path, split: str) -> tuple[Path, ...]:
        """The files or folders of a split, if all of them are there.

        Example:
            >>> Form(("batches",), lambda path, split, name: ...).find(Path("nowhere"), "test")
            ()
        """
        paths = self.paths if isinstance(self.paths, tuple) else self.paths.get(split, ())
        found = tuple(folder / path.format(split=split) for path in paths)
        return found if all(path.exists() for path in found) else ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public data set by name.

    Args:
        name: As one writes it.
        title: As people call it.
        homepage: Of its authors.
        licence: One line; "not stated by its authors" where that is so.
        splits: Its parts, by the names that `load` takes.
        forms: In which it may lie in its folder; the first one found is read.
        files: Of the official distribution.
        classes: Where they are known beforehand; otherwise they are read with the images.
        default: The split that `load` takes by itself.
        on_request: Splits that `get` fetches only by name, because they are large.
        split_help: The splits in words, where they are too many to list.
        by_hand: What one has to do oneself, where no program may fetch the files.
        npm: A package mirror.
        hub: A copy on the Hugging Face hub.
        verify: Checks converted arrays for what is known about the set.
    """

    name: str
    title: str
    homepage: str
    licence: str
    splits: tuple[str, ...]
    forms: tuple[Form, ...]
    files: tuple[File, ...] = ()
    classes: tuple[str, ...] = ()
    default: str = "test"
    on_request: tuple[str, ...] = ()
    split_help: str = ""
    by_hand: str = ""
    npm: "Npm | None" = None
    hub: "Hub | None" = None
    verify: Callable[[Arrays], None] | None = None

    @property
    def shown_splits(self) -> str:
        """The splits as people read them."""
        return self.split_help or ", ".join(self.splits)

    def check_split(self, split: str | None) -> str:
        """The split asked for, or the set's own default.

        Example:
            >>> Source(name="a", title="A", homepage="", licence="", splits=("test",), forms=()).check_split(None)
            'test'
        """
        split = self.default if split is None else split
        if split not in self.splits:
            raise InputError(f"split of {self.name} must be one of {self.shown_splits}; got {split!r}")
        return split

    def find(self, folder: Path, split: str) -> tuple[Form, tuple[Path, ...]] | None:
        """The first form of this split that lies in the folder, or None."""
        for form in self.forms:
            found = form.find(folder, split)
            if found:
                return form, found
        return None

    def needed(self, splits: tuple[str, ...]) -> tuple[File, ...]:
        """The official files that some splits need."""
        return tuple(file for file in self.files if any(file.serves(split) for split in splits))

    def what_to_put(self, folder: Path, splits: tuple[str, ...]) -> str:
        """Say which file to put where, for whoever has no network."""
        if self.by_hand:
            return self.by_hand.format(folder=folder)
        wanted = self.needed(splits)
        listed = "; ".join(f"{file.name} ({', '.join(file.urls)})" for file in wanted)
        return f"put into {folder}: {listed}"


def check_labels(labels: np.ndarray[Any, Any], classes: int, where: str) -> np.ndarray[Any, Any]:
    """Return int64 labels if they are all class numbers.

    Example:
        >>> check_labels(np.array([0, 2], np.uint8), 3, "labels.bin")
        array([0, 2])
    """
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise InputError(
            f"labels must lie in 0 to {classes - 1}; {where} has labels from {labels.min()} to {labels.max()}"
        )
    return labels.astype(np.int64)
