"""Folders of image files: the user's own, ODIN's, Textures, Places365, Tiny-ImageNet-200, ImageNet and ImageNet-C."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image

from kedge.data.decoding import PROGRAMS
from kedge.data.streamed import Files, StreamedSet
from kedge.errors import FileFormatError, InputError
from kedge.files import read_limited

_UNREAD = ("BUFR", "GRIB", "HDF5", "MPEG", "PDF", "WMF", *PROGRAMS)  # Pillow identifies these, but decodes none itself
_LARGEST_LIST = 2**27  # bytes; the list of ImageNet's training images has 2**26
_PARTS = ("train", "val", "valid", "validation", "test")


def folder(path: str | os.PathLike[str], split: str | None = None, *, name: str | None = None) -> StreamedSet:
    """The images of a folder and its subfolders; if all images are in subfolders, these are the classes, sorted.

    Args:
        path: The folder. If it has a subfolder with the name of the split, only that one is read.
        split: Such as ``"train"``; for a folder without train, val or test it is the whole folder.
        name: Name of the set; by default the folder's.

    Example:
        >>> import tempfile
        >>> photos = Path(tempfile.mkdtemp())
        >>> for kind in ("cat", "dog"):
        ...     (photos / kind).mkdir()
        ...     Image.new("RGB", (40, 30)).save(photos / kind / "1.png")
        >>> folder(photos).classes, folder(photos).labels
        (('cat', 'dog'), tensor([0, 1]))
    """
    root = Path(path)
    if not root.is_dir():
        raise InputError(f"folder must be a folder of images; {root} does not exist")
    if split is not None and (root / split).is_dir():
        return folder(root / split, name=name or f"{root.resolve().name} {split}")
    parts = [part for part in _PARTS if (root / part).is_dir()]
    if split is not None and parts:
        raise InputError(f"split of {root} must be one of {', '.join(parts)}; got {split!r}")
    title = name or root.resolve().name
    files = image_names(root)
    if not files:
        raise InputError(f"folder must hold images; there is none in {root} (of {', '.join(sorted(endings()))})")
    tops = [top for top, slash, _ in (file.partition("/") for file in files) if slash]
    if len(tops) == len(files) and set(tops) <= set(_PARTS):
        raise InputError(
            f"split must be given for {root}, which holds {', '.join(parts)} and no classes: add --split {parts[-1]} "
            f"if the command has it, or name the folder {root / parts[-1]}"
        )
    if len(tops) < len(files):
        return StreamedSet(Files(root, files), name=title)  # without classes
    return by_class(root, files, tops, title)


def read_unlabelled(path: Path, split: str, name: str) -> StreamedSet:
    """ODIN's sets: every image in a folder, without labels."""
    return StreamedSet(Files(path, _images_in(path)), name=name)


def read_imagenet(path: Path, split: str, name: str) -> StreamedSet:
    """ImageNet and ImageNet-C: a folder for each class, named by its WordNet number."""
    files = _images_in(path)
    loose = next((file for file in files if "/" not in file), None)
    if loose is not None:
        raise FileFormatError(f"{path} must hold a folder for each class; {loose} is in none: sort the images first")
    return by_class(path, files, _tops(files), name)


def read_textures(path: Path, split: str, name: str) -> StreamedSet:
    """DTD: ``images/{class}/*.jpg`` and the lists ``labels/{train,val,test}{1..10}.txt``; "all" reads no list."""
    files = _images_in(path / "images")
    classes = sorted(set(_tops(files)))
    if split != "all":
        numbered = split if split[-1].isdigit() else f"{split}1"  # the first of ten partitions, as is usual
        listed = path / "labels" / f"{numbered}.txt"
        files = tuple(line.strip() for line in read_lines(listed))
        _check_listed(listed, files, path / "images")
    return by_class(path / "images", files, _tops(files), name, classes)


def read_places365(path: Path, split: str, name: str) -> StreamedSet:
    """Places365: ``val_256/*.jpg`` with the lists ``places365_val.txt`` and ``categories_places365.txt``."""
    categories = path.parent / "categories_places365.txt"
    listed = path.parent / f"places365_{split}.txt"
    titles = {number: title for title, number in _pairs(categories)}
    if sorted(titles) != list(range(len(titles))):
        raise FileFormatError(f"{categories} must number its classes from 0 on; it does not")
    rows = [(file.lstrip("/"), number) for file, number in _pairs(listed)]
    files = tuple(file for file, _ in rows)
    _check_listed(listed, files, path)
    labels = torch.tensor([number for _, number in rows])
    return StreamedSet(Files(path, files), labels, name, tuple(titles[i] for i in range(len(titles))))


def read_tiny_imagenet(path: Path, split: str, name: str) -> StreamedSet:
    """Tiny-ImageNet-200: ``wnids.txt``, ``train/{wnid}/images`` and ``val/images`` with ``val_annotations.txt``.

    The classes are numbered in the sorted order of their WordNet numbers, as torchvision's ImageFolder does.
    """
    classes = sorted(read_lines(path / "wnids.txt"))
    if split == "train":
        files = _images_in(path / "train")
        return by_class(path / "train", files, _tops(files), name, classes)
    listed, root = path / "val" / "val_annotations.txt", path / "val" / "images"
    rows = [line.split()[:2] for line in read_lines(listed)]
    wrong = next((row for row in rows if len(row) < 2 or row[1] not in classes), None)
    if wrong is not None:
        raise FileFormatError(f"{listed} must name an image and a class of wnids.txt per line; got {' '.join(wrong)!r}")
    files = tuple(row[0] for row in rows)
    _check_listed(listed, files, root)
    return by_class(root, files, [row[1] for row in rows], name, classes)


def by_class(
    root: Path, files: Iterable[str], tops: list[str], name: str, classes: Sequence[str] | None = None
) -> StreamedSet:
    """A set of files with the name of the class of each."""
    titles = tuple(sorted(set(tops)) if classes is None else classes)
    numbers = {title: number for number, title in enumerate(titles)}
    foreign = next((top for top in tops if top not in numbers), None)
    if foreign is not None:
        raise FileFormatError(
            f"{root} holds the class {foreign!r}, which is none of the {len(titles)} classes of {name}"
        )
    labels = torch.tensor([numbers[top] for top in tops], dtype=torch.long)
    return StreamedSet(Files(root, tuple(files)), labels, name, titles)


def endings() -> frozenset[str]:
    """The suffixes of image files that Pillow decodes, in lower case."""
    registered = Image.registered_extensions().items()
    return frozenset(ending for ending, kind in registered if kind in Image.OPEN and kind not in _UNREAD)


def image_names(root: Path) -> tuple[str, ...]:
    """The image files in a folder and its subfolders, relative to it and sorted; hidden ones are left out."""
    suffixes, names = endings(), []
    for at, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        inside = Path(at).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        for file in files:
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in suffixes:
                names.append(prefix + file)
    return tuple(sorted(names))


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = read_limited(path, _LARGEST_LIST).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} must be text in UTF-8: {error}") from error
    return [line for line in lines if line.strip()]


def _images_in(path: Path) -> tuple[str, ...]:
    files = image_names(path)
    if not files:
        raise FileFormatError(f"{path} holds no images")
    return files


def _tops(files: Iterable[str]) -> list[str]:
    """The first folder of each file."""
    return [file.partition("/")[0] for file in files]


def _check_listed(listed: Path, files: Iterable[str], root: Path) -> None:
    present = set(_images_in(root))
    missing = next((file for file in files if file not in present), None)
    if missing is not None:
        raise FileFormatError(f"{listed} names {missing}, which is not in {root}")


def _pairs(path: Path) -> list[tuple[str, int]]:
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        text, _, last = line.strip().rpartition(" ")
        if not text or not last.isdigit():
            raise FileFormatError(f"{path} must hold a name and a number per line; line {number} is {line!r}")
        rows.append((text.strip(), int(last)))
    return rows
