"""Folders of image files: any folder, ODIN's, Textures, Places365, Tiny-ImageNet-200, ImageNet and ImageNet-C."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image

from kedge.data.decoding import PROGRAMS
from kedge.data.streamed import Files, StreamedSet
from kedge.errors import FileFormatError, InputError

_UNREAD = ("BUFR", "GRIB", "HDF5", "MPEG", "PDF", "WMF", *PROGRAMS)  # Pillow knows these, and decodes none itself
_PARTS = ("train", "val", "valid", "validation", "test")


def folder(path: str | os.PathLike[str], split: str | None = None, *, name: str | None = None) -> StreamedSet:
    """The images of a folder, and of its subfolders; if there are subfolders only, these are the classes, sorted.

    Args:
        path: The folder. If it has one of the name of the split, that one is taken.
        split: Such as ``"train"``; for a folder without any of train, val and test it is the whole folder.
        name: Of the set; the folder's by default.

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
        raise InputError(f"folder must be a folder of images; {root} is not there")
    if split is not None and (root / split).is_dir():
        return folder(root / split, name=name or f"{root.resolve().name} {split}")
    parts = [part for part in _PARTS if (root / part).is_dir()]
    if split is not None and parts:
        raise InputError(f"split of {root} must be one of {', '.join(parts)}; got {split!r}")
    title = name or root.resolve().name
    found = image_names(root)
    if not found:
        raise InputError(f"folder must hold images; there is none in {root} (of {', '.join(sorted(endings()))})")
    tops = [top for top, slash, _ in (file.partition("/") for file in found) if slash]
    if len(tops) == len(found) and set(tops) <= set(_PARTS):
        raise InputError(
            f"split must be said for {root}, which holds {', '.join(parts)} and no classes: add --split {parts[-1]} "
            f"where the command has it, or name the folder {root / parts[-1]}"
        )
    if len(tops) < len(found):
        return StreamedSet(Files(root, found), name=title)  # images of no class
    return by_class(root, found, tops, title)


def flat(path: Path, split: str, name: str) -> StreamedSet:
    """Every image below a folder, without labels: ODIN's sets.

    Example:
        >>> flat(Path("nowhere"), "test", "isun")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere holds no images
    """
    return StreamedSet(Files(path, _some(path)), name=name)


def wnids(path: Path, split: str, name: str) -> StreamedSet:
    """ImageNet, ImageNet-C: a folder for each class, named by its WordNet number.

    Example:
        >>> wnids(Path("nowhere"), "val", "imagenet")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere holds no images
    """
    found = _some(path)
    loose = next((file for file in found if "/" not in file), None)
    if loose is not None:
        raise FileFormatError(f"{path} must hold a folder for each class; {loose} lies in none: sort the images first")
    return by_class(path, found, [file.partition("/")[0] for file in found], name)


def textures(path: Path, split: str, name: str) -> StreamedSet:
    """DTD: ``images/{class}/*.jpg`` and the lists ``labels/{train,val,test}{1..10}.txt``; "all" reads no list.

    Example:
        >>> textures(Path("nowhere"), "all", "textures")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere/images holds no images
    """
    every = _some(path / "images")
    classes = sorted({file.partition("/")[0] for file in every})
    if split != "all":
        numbered = split if split[-1].isdigit() else f"{split}1"  # the first of ten partitions, as is usual
        listed = path / "labels" / f"{numbered}.txt"
        known = set(every)
        every = tuple(line.strip() for line in read_lines(listed))
        missing = next((file for file in every if file not in known), None)
        if missing is not None:
            raise FileFormatError(f"{listed} names {missing}, which is not in {path / 'images'}")
    return by_class(path / "images", every, [file.partition("/")[0] for file in every], name, classes)


def places365(path: Path, split: str, name: str) -> StreamedSet:
    """Places365: ``val_256/*.jpg`` beside the lists ``places365_val.txt`` and ``categories_places365.txt``.

    Example:
        >>> places365(Path("nowhere/val_256"), "val", "places365")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere/categories_places365.txt cannot be read: No such file or directory
    """
    categories = path.parent / "categories_places365.txt"
    listed = path.parent / f"places365_{split}.txt"
    numbers = {int(number): title for title, number in _pairs(categories)}
    if sorted(numbers) != list(range(len(numbers))):
        raise FileFormatError(f"{categories} must number its classes from 0 on; it does not")
    rows = [(file.lstrip("/"), int(number)) for file, number in _pairs(listed)]
    known = set(_some(path))
    missing = next((file for file, _ in rows if file not in known), None)
    if missing is not None:
        raise FileFormatError(f"{listed} names {missing}, which is not in {path}")
    labels = torch.tensor([number for _, number in rows])
    classes = tuple(numbers[i] for i in range(len(numbers)))
    return StreamedSet(Files(path, tuple(file for file, _ in rows)), labels, name, classes)


def tiny_imagenet(path: Path, split: str, name: str) -> StreamedSet:
    """Tiny-ImageNet-200: ``wnids.txt``, ``train/{wnid}/images`` and ``val/images`` with ``val_annotations.txt``.

    The classes are numbered in the sorted order of their WordNet numbers, as an image folder has them.

    Example:
        >>> tiny_imagenet(Path("nowhere"), "val", "tiny-imagenet-200")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere/wnids.txt cannot be read: No such file or directory
    """
    classes = sorted(read_lines(path / "wnids.txt"))
    if split == "val":
        listed = path / "val" / "val_annotations.txt"
        rows = [line.split()[:2] for line in read_lines(listed)]
        wrong = next((row for row in rows if len(row) < 2 or row[1] not in classes), None)
        if wrong is not None:
            raise FileFormatError(
                f"{listed} must name an image and a class of wnids.txt in a line; got {' '.join(wrong)!r}"
            )
        root, files, tops = path / "val" / "images", [row[0] for row in rows], [row[1] for row in rows]
        known = set(_some(root))
        missing = next((file for file in files if file not in known), None)
        if missing is not None:
            raise FileFormatError(f"{listed} names {missing}, which is not in {root}")
    else:
        root = path / "train"
        files = list(_some(root))
        tops = [file.partition("/")[0] for file in files]
    return by_class(root, files, tops, name, classes)


def by_class(
    root: Path, files: Iterable[str], tops: list[str], name: str, classes: Iterable[str] | None = None
) -> StreamedSet:
    """A set of files with the class of each by name.

    Example:
        >>> by_class(Path("."), ["b/1.png", "a/1.png"], ["b", "a"], "letters").labels
        tensor([1, 0])
    """
    known = sorted(set(tops)) if classes is None else list(classes)
    numbers = {title: number for number, title in enumerate(known)}
    foreign = next((top for top in tops if top not in numbers), None)
    if foreign is not None:
        raise FileFormatError(
            f"{root} holds the class {foreign!r}, which is none of the {len(known)} classes of {name}"
        )
    labels = torch.tensor([numbers[top] for top in tops], dtype=torch.long)
    return StreamedSet(Files(root, tuple(files)), labels, name, tuple(known))


def endings() -> frozenset[str]:
    """The endings of image files that Pillow decodes, in small letters.

    Example:
        >>> ".jpeg" in endings()
        True
    """
    known = Image.registered_extensions().items()
    return frozenset(ending for ending, kind in known if kind in Image.OPEN and kind not in _UNREAD)


def image_names(root: Path) -> tuple[str, ...]:
    """The image files below a folder, sorted, relative to it; hidden ones and links out of it are left out.

    Example:
        >>> image_names(Path("nowhere"))
        ()
    """
    known = endings()
    found = []
    for at, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        inside = Path(at).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        for file in files:
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in known:
                found.append(prefix + file)
    return tuple(sorted(found))


def read_lines(path: Path) -> list[str]:
    """The lines of a list file that hold anything.

    Example:
        >>> read_lines(Path("nowhere.txt"))
        Traceback (most recent call last):
        kedge.errors.FileFormatError: nowhere.txt cannot be read: No such file or directory
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return [line for line in lines if line.strip()]


def _some(path: Path) -> tuple[str, ...]:
    found = image_names(path)
    if not found:
        raise FileFormatError(f"{path} holds no images")
    return found


def _pairs(path: Path) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        text, _, last = line.strip().rpartition(" ")
        if not text or not last.isdigit():
            raise FileFormatError(f"{path} must hold a name and a number in a line; line {number} is {line!r}")
        rows.append((text.strip(), last))
    return rows
