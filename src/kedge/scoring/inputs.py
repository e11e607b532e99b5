"""Images to score: files, folders, globs, lists, tars and parquet files, cut into shards of a few hundred."""

import glob
import hashlib
import io
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from PIL import Image

from kedge.data.decoding import MAX_FILE, open_image
from kedge.data.sources.folders import endings
from kedge.errors import FileFormatError, InputError
from kedge.files import regular_file
from kedge.scoring.rows import LAYOUTS, parquet_module, shared_values

Opener = Callable[[], Image.Image]  # reads one image, or raises an `InputError`
LISTS = (".txt", ".lst")
IMAGE_COLUMNS = ("image", "img", "bytes", "jpg", "png")  # of a parquet file, unless one is named
SHARD = 512  # images, the most that are scored twice when a job is killed
READ_AHEAD = 64  # rows of a parquet file in memory besides those in use
_ESCAPES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}  # of bytes that Python could not decode
LONGEST = 4096  # characters of a name in a row: longer ones make a CSV file that not every program can read


@dataclass(frozen=True)
class Shard:
    """A piece of work that JSON can hold."""

    kind: str  # "files", "tar" or "parquet"
    source: str  # the tar or parquet file; empty for files
    items: tuple[Any, ...]  # paths of files, (name, offset, size) of members of a tar, numbers of rows
    column: str = ""  # of a parquet file

    def names(self) -> list[str]:
        """The images' names, as in the rows."""
        if self.kind == "tar":
            return [as_text(f"{self.source}/{name}") for name, _, _ in self.items]
        return [as_text(item if self.kind == "files" else f"{self.source}#{item}") for item in self.items]


def openers(shards: Iterable[Shard]) -> Iterator[Opener]:
    """A function for each image of the shards; in a parquet file, a shard continues where the one before ended."""
    values: Iterator[Any] = iter(())
    position: tuple[str, str, int] | None = None  # the file, column and row that the values continue with
    for shard in shards:
        if shard.kind == "files":
            yield from (partial(open_image, path) for path in shard.items)
        elif shard.kind == "tar":
            yield from (partial(_open_member, shard.source, *item) for item in shard.items)
        else:
            if position != (shard.source, shard.column, shard.items[0]):
                values = ParquetImages(shard.source).values(shard.column, shard.items[0])
            for row in shard.items:
                value = next(values, StopIteration)
                if value is StopIteration:
                    raise FileFormatError(f"{shard.source} cannot be read as a parquet file: it has too few rows")
                yield partial(_open_cell, value, f"{shard.source}#{row}")
            position = (shard.source, shard.column, shard.items[-1] + 1)


def _open_cell(cell: Any, name: str) -> Image.Image:
    """Read the image in a cell of a parquet file; its bytes are copied only now, since many cells may share them."""
    value = cell.as_py()
    if isinstance(value, dict):  # as Hugging Face's datasets store images
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, (str, bytes)):
        value = b""  # not an image, which becomes the row's error
    return open_image(value if isinstance(value, str) else io.BytesIO(value), name=name)


def plan(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    shard: int = SHARD,
    column: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Iterator[Shard]:
    """Cut inputs into shards, in an order that is the same each time.

    Args:
        inputs: Image files, folders (with everything below), globs, lists of paths (.txt, one path per line, relative
            to the list), tars of images (webdataset), parquet files. Rows that kedge wrote are skipped in folders and
            globs.
        shard: Largest number of images in a shard.
        column: The column of parquet files with the images, as bytes, paths, or as Hugging Face's datasets store them.
        out: The file that the rows go to, which is not an input.
    """
    if not inputs:
        raise InputError("inputs must name at least one image, folder, glob, list, tar or parquet file; got none")
    single: list[str] = []  # files that do not fill a shard yet
    for path in _expanded(inputs, None if out is None else os.path.realpath(out)):
        if path.suffix.lower() == ".tar":
            yield from (Shard("tar", str(path), items) for items in cut(_members(path), shard))
        elif path.suffix.lower() == ".parquet":
            table = ParquetImages(path)
            chosen = table.image_column(column)
            yield from (Shard("parquet", str(path), items, chosen) for items in cut(range(table.rows), shard))
        else:
            single.append(str(path))
            if len(single) == shard:
                yield Shard("files", "", tuple(single))
                single = []
    if single:
        yield Shard("files", "", tuple(single))


def _expanded(inputs: Sequence[str | os.PathLike[str]], out: str | None) -> Iterator[Path]:
    for given in inputs:
        path = Path(given)  # may be too long for the system, on which its own methods fail
        folder = os.path.isdir(path)
        if path.suffix.lower() in LISTS and os.path.isfile(path):
            yield from _listed(path)
        elif os.path.exists(path) and not folder:
            yield path
        else:
            matched = [path] if folder else sorted(map(Path, glob.glob(str(given), recursive=True)))
            if not matched:
                raise InputError(f"inputs must exist; {given} does not, and as a glob it matches nothing")
            for each in matched:
                if each.is_dir():
                    yield from _below(each, out)
                elif not _is_output(each, out):
                    yield each


def _below(folder: Path, out: str | None) -> Iterator[Path]:
    """Every image, tar and parquet file below a folder, in order; links to folders are not followed."""
    known = endings() | {".tar", ".parquet"}

    def refuse(error: OSError) -> None:  # `os.walk` itself would leave out what is in the folder
        raise InputError(f"inputs must be readable; {error.filename} is not: {error.strerror}") from error

    for home, folders, files in os.walk(folder, onerror=refuse):
        # The folder of a job contains its lock; other folders may have such a name too.
        folders[:] = sorted(
            name for name in folders if not (name.endswith(".parts") and Path(home, name, "lock").exists())
        )
        for name in sorted(files):
            path = Path(home, name)
            if path.suffix.lower() in known and not name.startswith(".") and not _is_output(path, out):
                yield path


def _is_output(path: Path, out: str | None) -> bool:
    """Whether a file is what kedge score writes now, or wrote before."""
    if path.suffix.lower() != ".parquet":
        return False
    return os.path.realpath(path) == out or tuple(ParquetImages(path).names) in LAYOUTS


def _listed(path: Path) -> Iterator[Path]:
    try:
        with path.open(encoding="utf-8") as lines:
            for name in map(str.strip, lines):
                if name and not name.startswith("#"):
                    yield path.parent / name
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} must be a list of paths in UTF-8, one per line: {error}") from error


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each image in a tar; nothing is unpacked."""
    known = tuple(endings())
    try:
        with tarfile.open(regular_file(path), "r:") as tar:  # uncompressed, so that a member can be read by its offset
            for member in tar:
                if member.isfile() and member.name.lower().endswith(known):
                    yield member.name, member.offset_data, member.size
                tar.members = []  # type: ignore[attr-defined]  # or it keeps every header in memory
    except InputError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:  # a damaged header raises any of them
        raise FileFormatError(f"{path} must be an uncompressed tar: {error}; unpack it") from error


def _open_member(tar: str, name: str, offset: int, size: int) -> Image.Image:
    with regular_file(tar).open("rb") as file:
        file.seek(offset)
        return open_image(io.BytesIO(file.read(min(size, MAX_FILE + 1))), name=f"{tar}/{name}")


class ParquetImages:
    """A parquet file with a column of images."""

    def __init__(self, path: str | Path) -> None:
        self.path, parquet = regular_file(path), parquet_module()
        try:
            self.file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            raise FileFormatError(f"{path} cannot be read as a parquet file: {error}") from error
        self.rows: int = self.file.metadata.num_rows
        self.names: list[str] = list(self.file.schema_arrow.names)
        groups = range(self.file.num_row_groups)
        self.sizes = [self.file.metadata.row_group(group).num_rows for group in groups]
        if sum(self.sizes) != self.rows or min(self.sizes, default=0) < 0:
            raise FileFormatError(f"{path} cannot be read as a parquet file: its groups have other rows than it has")

    def image_column(self, wanted: str | None) -> str:
        """The column with the images."""
        chosen = wanted or next((name for name in IMAGE_COLUMNS if name in self.names), None)
        if chosen not in self.names:
            reason = f"got {wanted!r}" if wanted else f"it has none of {', '.join(IMAGE_COLUMNS)}: name one"
            raise InputError(f"column must be a column of {self.path}, one of {', '.join(self.names)}; {reason}")
        return chosen

    def values(self, column: str, first: int) -> Iterator[Any]:
        """The cells of a column from a row on, a few at a time; earlier groups of rows are not read."""
        ends = list(accumulate(self.sizes))
        group = bisect_right(ends, first)
        if group == len(ends):
            raise FileFormatError(f"{self.path} cannot be read as a parquet file: it has too few rows")
        skipped = first - (ends[group] - self.sizes[group])  # rows of the group before the first
        try:
            for batch in shared_values(self.path, [column]).iter_batches(
                READ_AHEAD, [*range(group, len(ends))], columns=[column]
            ):
                yield from batch.column(0)[skipped:]
                skipped = max(0, skipped - len(batch))
        except (OSError, ValueError) as error:
            raise FileFormatError(f"{self.path} cannot be read as a parquet file: {error}") from error


def as_text(text: str) -> str:
    """Valid text of bounded length: bytes that are not UTF-8 become escapes, the middle of a long text its sha256."""
    text = text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode()
    if len(text) <= LONGEST:
        return text
    return f"{text[:2048]}...{hashlib.sha256(text.encode()).hexdigest()}...{text[-1024:]}"


def cut(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Items in tuples of ``size``, the last one maybe shorter."""
    rest = iter(items)
    while chunk := tuple(islice(rest, size)):
        yield chunk


def open_named(name: str, column: str | None = None) -> Image.Image:
    """Read an image by the name that its row has; ``column`` is for parquet files."""
    if not os.path.exists(name):
        if ".tar/" in name:
            source, member = name.split(".tar/", 1)
            for item in _members(Path(f"{source}.tar")):
                if item[0] == member:
                    return _open_member(f"{source}.tar", *item)
        source, _, row = name.rpartition("#")
        if source.endswith(".parquet") and row.isdigit():
            shard = Shard("parquet", source, (int(row),), ParquetImages(source).image_column(column))
            return next(openers([shard]))()
    return open_image(name)
