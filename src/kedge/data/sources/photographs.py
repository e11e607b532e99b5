"""Readers of sets of photographs in the layout of their official archives, and of OpenOOD's lists."""

from pathlib import Path

import numpy as np

from kedge.data.sources.folders import (
    by_class,
    by_top_folder,
    check_listed,
    image_list,
    images_in,
    text_lines,
    top_folders,
)
from kedge.data.sources.svhn import read_mat
from kedge.data.streamed import StreamedSet
from kedge.errors import FileFormatError

OPENOOD_LISTS, OPENOOD_CLASSIC, OPENOOD_LARGE = "benchmark_imglist", "images_classic", "images_largescale"
_FLOWERS = {"train": "trnid", "val": "valid", "test": "tstid"}  # the variables of setid.mat
_CUB = {"test": "0", "train": "1"}  # in train_test_split.txt


def read_pets(path: Path, split: str, name: str) -> StreamedSet:
    """Oxford-IIIT Pet: ``images/BREED_NUMBER.jpg`` with the lists ``annotations/{trainval,test}.txt``."""
    files: list[str] = []
    for part in ("trainval", "test") if split == "all" else (split,):
        listed = path.parent / "annotations" / f"{part}.txt"
        rows = tuple(f"{line.split()[0]}.jpg" for line in text_lines(listed))
        check_listed(listed, rows, path)
        files += rows
    return by_class(path, files, [file.rpartition("_")[0] for file in files], name)


def read_flowers(path: Path, split: str, name: str) -> StreamedSet:
    """Flowers-102: ``jpg/image_00001.jpg`` with ``imagelabels.mat`` and ``setid.mat``; classes are numbers as text."""
    labels = _numbers(path.parent / "imagelabels.mat", "labels")
    chosen = np.arange(1, len(labels) + 1) if split == "all" else _numbers(path.parent / "setid.mat", _FLOWERS[split])
    if chosen.size and not 1 <= chosen.min() <= chosen.max() <= len(labels):
        raise FileFormatError(f"{path.parent / 'setid.mat'} must number the {len(labels):,} images from 1 on")
    files = tuple(f"image_{number:05d}.jpg" for number in chosen.tolist())
    check_listed(path.parent / "setid.mat", files, path)
    classes = [str(number) for number in sorted(set(labels.tolist()))]
    return by_class(path, files, [str(label) for label in labels[chosen - 1].tolist()], name, classes)


def read_caltech101(path: Path, split: str, name: str) -> StreamedSet:
    """Caltech-101: a folder for each class, without the one of backgrounds."""
    return by_top_folder(path, [file for file in images_in(path) if not file.startswith("BACKGROUND_Google/")], name)


def read_cub(path: Path, split: str, name: str) -> StreamedSet:
    """CUB-200-2011: ``images/CLASS/*.jpg`` with the lists ``images.txt`` and ``train_test_split.txt``, by number."""
    files, parts = (_pairs(path / each) for each in ("images.txt", "train_test_split.txt"))
    kept = [file for number, file in files.items() if split == "all" or parts.get(number) == _CUB[split]]
    check_listed(path / "images.txt", kept, path / "images")
    return by_top_folder(path / "images", kept, name, top_folders(files.values()))


def read_food(path: Path, split: str, name: str) -> StreamedSet:
    """Food-101: ``images/CLASS/NUMBER.jpg`` with the lists ``meta/{train,test}.txt``, which leave out the ending."""
    listed = path / "meta" / f"{split}.txt"
    files = [f"{line.strip()}.jpg" for line in text_lines(listed)]
    check_listed(listed, files, path / "images")
    return by_top_folder(path / "images", files, name)


def read_openood(path: Path, split: str, name: str) -> StreamedSet:
    """A list of OpenOOD, ``benchmark_imglist/BENCHMARK/LIST.txt``; its paths are relative to one of two folders."""
    classic = path.parent.name.startswith("cifar") or path.stem == "test_textures"
    return image_list(path, path.parents[2] / (OPENOOD_CLASSIC if classic else OPENOOD_LARGE), name=name)


def _pairs(path: Path) -> dict[str, str]:
    """The lines of a list as pairs of two words."""
    rows = [line.split(maxsplit=1) for line in text_lines(path)]
    wrong = next((row for row in rows if len(row) < 2), None)
    if wrong is not None:
        raise FileFormatError(f"{path} must hold a number and a value per line; got {' '.join(wrong)!r}")
    return {number: value.strip() for number, value in rows}


def _numbers(path: Path, variable: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A vector of whole numbers in a MATLAB file."""
    arrays = read_mat(path)
    if variable not in arrays or arrays[variable].size == 0 or bool((arrays[variable] % 1 != 0).any()):
        raise FileFormatError(
            f"{path} must hold whole numbers as {variable}; it holds {', '.join(arrays) or 'nothing'}"
        )
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]] = arrays[variable].astype(np.int64).reshape(-1)
    return numbers
