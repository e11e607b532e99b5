"""Folders and lists of image files: the user's own, and those of public data sets."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import torch
from PIL import Image

from kedge.checks import one_of
from kedge.data.decoding import PROGRAMS
from kedge.data.streamed import Files, StreamedSet
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.files import read_limited

BENCHMARKS = ("cifar10", "cifar100")  # of SCOOD
SCOOD_NAMES = ("cifar10", "cifar100", "svhn", "texture", "tin", "lsun", "places365")
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
    if any("/" not in file for file in files):
        return StreamedSet(Files(root, files), name=title)  # without classes
    if set(top_folders(files)) <= set(_PARTS):
        raise InputError(
            f"split must be given for {root}, which holds {', '.join(parts)} and no classes: add --split {parts[-1]} "
            f"if the command has it, or name the folder {root / parts[-1]}"
        )
    return by_class(root, files, top_folders(files), title)


def image_list(
    path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, *, name: str | None = None
) -> StreamedSet:
    """The images of a list in OpenOOD's format: a path and a label per line, a negative label for none.

    Args:
        path: The list.
        root: The folder that its paths are relative to; by default the list's own.
        name: Name of the set; by default the list's.
    """
    listed = Path(path)
    rows = _rows(listed)
    if not rows:
        raise InputError(f"{listed} must list at least one image; it is empty")
    return _listed_set(listed, Path(root) if root is not None else listed.parent, rows, name or listed.stem)


def scood_parts(
    benchmark: str, name: str, split: str = "test", *, data_dir: str | os.PathLike[str]
) -> tuple[StreamedSet, StreamedSet]:
    """The in-distribution and the out-of-distribution images of one list of SCOOD.

    An image with ``sc_label >= 0`` shows one of the benchmark's classes and is in-distribution, even if it comes from
    LSUN or Tiny-ImageNet. Its label is ``sc_label``.

    Args:
        benchmark: ``"cifar10"`` or ``"cifar100"``.
        name: The list: cifar10, cifar100, svhn, texture, tin, lsun or places365.
        split: ``"test"`` or ``"train"``.
        data_dir: The folder that holds ``data/images`` and ``data/imglist``.
    """
    one_of("benchmark", benchmark, BENCHMARKS)
    home = next((at for at in (Path(data_dir) / "data", Path(data_dir)) if (at / "imglist").is_dir()), None)
    if home is None:
        raise NotReadyError(f"SCOOD's imglist and images are not in {data_dir}; unpack its data folder there")
    parts = [
        read_scood(home / "imglist", f"{benchmark}/{split}_{name}/{part}", f"scood {benchmark} {name} ({part})")
        for part in ("id", "ood")
    ]
    return parts[0], parts[1]


def read_scood(path: Path, split: str, name: str) -> StreamedSet:
    """One list of SCOOD by ``{benchmark}/{train|test}_{name}``; followed by ``/id`` or ``/ood``, that part of it."""
    benchmark, stem, part = f"{split}/".split("/")[:3]
    lists = path / f"benchmark_{benchmark}"
    listed = lists / f"{stem}.txt"
    if not listed.is_file():
        present = ", ".join(sorted(file.stem for file in lists.glob("*.txt"))) or "none"
        raise InputError(f"split of scood must name a list of {lists} ({present}); got {split!r}")
    whole = _listed_set(listed, path.parent / "images", _rows(listed, "sc_label"), name)
    assert whole.labels is not None
    return whole.subset((whole.labels >= 0) == (part == "id")) if part else whole


def read_unlabelled(path: Path, split: str, name: str) -> StreamedSet:
    """ODIN's sets: every image in a folder, without labels."""
    return StreamedSet(Files(path, images_in(path)), name=name)


def read_classes(path: Path, split: str, name: str) -> StreamedSet:
    """A folder for each class; ImageNet's are named by their WordNet numbers."""
    return by_top_folder(path, images_in(path), name)


def read_textures(path: Path, split: str, name: str) -> StreamedSet:
    """DTD: ``images/{class}/*.jpg`` and the lists ``labels/{train,val,test}{1..10}.txt``; "all" reads no list."""
    files = images_in(path / "images")
    classes = sorted(set(top_folders(files)))
    if split != "all":
        numbered = split if split[-1].isdigit() else f"{split}1"  # the first of ten partitions, as is usual
        listed = path / "labels" / f"{numbered}.txt"
        files = tuple(line.strip() for line in text_lines(listed))
        check_listed(listed, files, path / "images")
    return by_class(path / "images", files, top_folders(files), name, classes)


def read_places365(path: Path, split: str, name: str) -> StreamedSet:
    """Places365: ``val_256/*.jpg`` with the lists ``places365_val.txt`` and ``categories_places365.txt``."""
    categories = path.parent / "categories_places365.txt"
    titles = {number: title for title, number in _rows(categories)}
    if sorted(titles) != list(range(len(titles))):
        raise FileFormatError(f"{categories} must number its classes from 0 on; it does not")
    listed = path.parent / f"places365_{split}.txt"
    rows = [(file.lstrip("/"), number) for file, number in _rows(listed)]
    return _listed_set(listed, path, rows, name, tuple(titles[i] for i in range(len(titles))))


def read_tiny_imagenet(path: Path, split: str, name: str) -> StreamedSet:
    """Tiny-ImageNet-200: ``wnids.txt``, ``train/{wnid}/images`` and ``val/images`` with ``val_annotations.txt``.

    The classes are numbered in the sorted order of their WordNet numbers, as torchvision's ImageFolder does.
    """
    classes = sorted(text_lines(path / "wnids.txt"))
    if split == "train":
        files = images_in(path / "train")
        return by_class(path / "train", files, top_folders(files), name, classes)
    listed, root = path / "val" / "val_annotations.txt", path / "val" / "images"
    rows = [line.split()[:2] for line in text_lines(listed)]
    wrong = next((row for row in rows if len(row) < 2), None)
    if wrong is not None:
        raise FileFormatError(f"{listed} must name an image and a class per line; got {' '.join(wrong)!r}")
    files = tuple(row[0] for row in rows)
    check_listed(listed, files, root)
    return by_class(root, files, [row[1] for row in rows], name, classes)


def endings() -> frozenset[str]:
    """The suffixes of image files that Pillow decodes, in lower case."""
    registered = Image.registered_extensions().items()
    return frozenset(ending for ending, kind in registered if kind in Image.OPEN and kind not in _UNREAD)


def image_names(root: Path) -> tuple[str, ...]:
    """The image files in a folder and its subfolders, relative to it and sorted; hidden ones are left out."""
    suffixes, names = endings(), []
    for at, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        inside = Path(at).relative_to(root)
        for file in files:
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in suffixes:
                names.append((inside / file).as_posix())
    return tuple(sorted(names))


def by_class(
    root: Path, files: Iterable[str], tops: list[str], name: str, classes: Sequence[str] | None = None
) -> StreamedSet:
    """A set of files with the name of the class of each."""
    titles = tuple(sorted(set(tops)) if classes is None else classes)
    numbers = {title: number for number, title in enumerate(titles)}
    foreign = next((top for top in tops if top not in numbers), None)
    if foreign is not None:
        raise FileFormatError(f"{root} holds the class {foreign!r}, none of the {len(titles)} classes of {name}")
    labels = torch.tensor([numbers[top] for top in tops], dtype=torch.long)
    return StreamedSet(Files(root, tuple(files)), labels, name, titles)


def by_top_folder(root: Path, files: Sequence[str], name: str, every: Iterable[str] = ()) -> StreamedSet:
    """Files whose first folder is their class; the classes are those of all files, or of ``every``."""
    loose = next((file for file in files if "/" not in file), None)
    if loose is not None:
        raise FileFormatError(f"{root} must hold a folder for each class; {loose} is in none: sort the images first")
    tops = top_folders(files)
    return by_class(root, files, tops, name, sorted({*tops, *every}))


def _listed_set(
    listed: Path, root: Path, rows: list[tuple[str, int]], name: str, classes: tuple[str, ...] = ()
) -> StreamedSet:
    files = tuple(file for file, _ in rows)
    check_listed(listed, files, root)
    return StreamedSet(Files(root, files), torch.tensor([label for _, label in rows]), name, classes)


def check_listed(listed: Path, files: Sequence[str], root: Path) -> None:
    """All files must exist, inside the root."""
    for number, file in enumerate(files, start=1):
        inside = PurePosixPath(file)
        if inside.is_absolute() or ".." in inside.parts:
            raise FileFormatError(
                f"{listed} names {file} in line {number}, which is outside {root}: pass the root that all paths share"
            )
    missing = [file for file in files if not os.path.isfile(root / file)]  # also False for a name that is too long
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{listed} names {missing[0]}{more}, which {root} does not hold; is the root right?")


def _rows(path: Path, key: str | None = None) -> list[tuple[str, int]]:
    """The lines of a list: a path and a whole number, or JSON with the number under ``key``; negative ones are -1."""
    rows = []
    for number, line in enumerate(text_lines(path), start=1):
        text, _, value = line.strip().partition(" ") if key else line.strip().rpartition(" ")
        try:
            label = json.loads(value)[key] if key else int(value)
        except (ValueError, KeyError, TypeError, RecursionError):
            label = None
        if not text or type(label) is not int or label >= 2**63:
            expected = f'{{"{key}": ...}}' if key else "a whole number"
            raise FileFormatError(f"{path} must hold a path and {expected} per line; line {number} is {line!r}")
        rows.append((text.strip(), max(label, -1)))
    return rows


def text_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = read_limited(path, _LARGEST_LIST).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} must be text in UTF-8: {error}") from error
    return [line for line in lines if line.strip()]


def images_in(path: Path) -> tuple[str, ...]:
    """The image files in a folder that must have some, see `image_names`."""
    files = image_names(path)
    if not files:
        raise FileFormatError(f"{path} holds no images")
    return files


def top_folders(files: Iterable[str]) -> list[str]:
    """The first folder of each file."""
    return [file.partition("/")[0] for file in files]
