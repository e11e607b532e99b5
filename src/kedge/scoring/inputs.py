"""Where images come from: files, folders, globs, lists, tars and parquet files, cut into shards of a few hundred."""

import glob
import io
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from kedge.data.decoding import open_image
from kedge.data.sources.folders import endings
from kedge.errors import FileFormatError, InputError
from kedge.scoring.rows import COLUMNS as OF_ROWS
from kedge.scoring.rows import parquet_module

LISTS = (".txt", ".lst")
COLUMNS = ("image", "img", "bytes", "jpg", "png")  # of a parquet file, where none is named
SHARD = 512  # images, the most that are scored twice when a job is killed
AT_ONCE = 64  # rows of a parquet file that are held beside those which are worked on


@dataclass(frozen=True)
class Shard:
    """A piece of work, as plain data.

    Attributes:
        kind: ``"files"``, ``"tar"`` or ``"parquet"``.
        source: The tar or the parquet file; empty for files.
        items: For files their paths; for a tar (name, offset, size) of its members; for parquet row numbers.
        column: Of a parquet file.
    """

    kind: str
    source: str
    items: tuple[Any, ...]
    column: str = ""

    def names(self) -> list[str]:
        """What the rows call the images."""
        if self.kind == "files":
            return list(map(as_text, self.items))
        if self.kind == "tar":
            return [as_text(f"{self.source}/{name}") for name, _, _ in self.items]
        return [as_text(f"{self.source}#{row}") for row in self.items]


@dataclass(frozen=True)
class Opener:
    """Reads one image when it is called."""

    source: str | BinaryIO
    name: str = ""
    offset: int = 0
    size: int | None = None

    def __call__(self) -> Image.Image:
        """The image, whole."""
        if self.size is None:
            return open_image(self.source, name=self.name or None)
        assert isinstance(self.source, str)
        with open(self.source, "rb") as tar:
            tar.seek(self.offset)
            return open_image(io.BytesIO(tar.read(self.size)), name=f"{self.source}/{self.name}")


class Reader:
    """Opens the images of shards; in a parquet file it goes on where the shard before ended."""

    def __init__(self) -> None:
        self._values: Iterator[Any] = iter(())
        self._at: tuple[str, str, int] | None = None  # the file, the column and the row that come next

    def openers(self, shard: Shard) -> Iterator[Opener]:
        """A function for each image, that reads it or raises an `InputError`."""
        if shard.kind == "parquet":
            yield from self._rows(shard)
        for item in shard.items if shard.kind != "parquet" else ():
            if shard.kind == "files":
                yield Opener(item)
            else:
                name, offset, size = item
                yield Opener(shard.source, name, offset, size)

    def _rows(self, shard: Shard) -> Iterator[Opener]:
        first, count = shard.items[0], len(shard.items)
        if self._at != (shard.source, shard.column, first):
            self._values = ParquetRows(shard.source).values(shard.column, first)
        self._at = None
        for row, value in zip(shard.items, islice(self._values, count), strict=True):
            if isinstance(value, dict):  # as Hugging Face's datasets keep images
                value = value.get("bytes") or value.get("path")
            if not isinstance(value, (str, bytes)):
                value = b""  # no image, as the row will say
            yield Opener(value if isinstance(value, str) else io.BytesIO(value), f"{shard.source}#{row}")
        self._at = (shard.source, shard.column, first + count)


def plan(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    shard: int = SHARD,
    column: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Iterator[Shard]:
    """Cut inputs into shards, in an order that is the same each time.

    Args:
        inputs: Image files, folders (with all below them), globs, lists of paths (.txt, a path a line, relative to the
            list), tars of images (webdataset), parquet files. Rows that kedge wrote are left out of folders and globs.
        shard: Images in a shard at most.
        column: Of parquet files: where the images are, as bytes, paths, or as Hugging Face's datasets keep them.
        out: The file that the rows go to, which is no input.

    Example:
        >>> list(plan(["no-such-folder"]))
        Traceback (most recent call last):
        kedge.errors.InputError: inputs must be there; no-such-folder is not, and as a glob it matches nothing
    """
    if not inputs:
        raise InputError("inputs must name at least one image, folder, glob, list, tar or parquet file; got none")
    waiting: list[str] = []  # single files, until they fill a shard
    for path in _expanded(inputs, None if out is None else os.path.realpath(out)):
        suffix = path.suffix.lower()
        if suffix == ".tar":
            for items in cut(_members(path), shard):
                yield Shard("tar", str(path), items)
            continue
        if suffix == ".parquet":
            table = ParquetRows(str(path))
            where = table.image_column(column)
            for items in cut(range(table.rows), shard):
                yield Shard("parquet", str(path), items, where)
            continue
        waiting.append(str(path))
        if len(waiting) == shard:
            yield Shard("files", "", tuple(waiting))
            waiting = []
    if waiting:
        yield Shard("files", "", tuple(waiting))


def _expanded(inputs: Sequence[str | os.PathLike[str]], out: str | None) -> Iterator[Path]:
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            yield from _below(path, out)
        elif path.suffix.lower() in LISTS and path.is_file():
            yield from _listed(path)
        elif path.exists():
            yield path
        else:
            matched = sorted(glob.glob(str(given), recursive=True))
            if not matched:
                raise InputError(f"inputs must be there; {given} is not, and as a glob it matches nothing")
            for each in matched:
                if Path(each).is_dir():
                    yield from _below(Path(each), out)
                elif not _is_output(Path(each), out):
                    yield Path(each)


def _below(folder: Path, out: str | None) -> Iterator[Path]:
    """Every image, tar and parquet file below a folder, in order; links to folders are not followed."""
    known = endings() | {".tar", ".parquet"}
    for home, folders, files in os.walk(folder):
        # The folder of a job has its lock in it; others may be called so too.
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
    return os.path.realpath(path) == out or ParquetRows(str(path)).names == list(OF_ROWS)


def _listed(path: Path) -> Iterator[Path]:
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                name = line.strip()
                if name and not name.startswith("#"):
                    yield path.parent / name
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} must be a list of paths in UTF-8, one a line: {error}") from error


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, place and size of each image in a tar; nothing is unpacked."""
    known = tuple(endings())
    try:
        with tarfile.open(path, "r:") as tar:  # uncompressed, so that a member can be read by its place
            for member in tar:
                if member.isfile() and member.name.lower().endswith(known):
                    yield member.name, member.offset_data, member.size
                tar.members = []  # type: ignore[attr-defined]  # or it keeps every header it has seen
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:  # a damaged header raises any of them
        raise FileFormatError(f"{path} must be an uncompressed tar: {error}; unpack it") from error


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, path: str) -> None:
        self.path = path
        parquet = parquet_module()
        try:
            self.file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            raise FileFormatError(f"{path} cannot be read as a parquet file: {error}") from error
        self.rows: int = self.file.metadata.num_rows
        self.names: list[str] = list(self.file.schema_arrow.names)

    def image_column(self, wanted: str | None) -> str:
        """The column with the images."""
        names = self.names
        found = [wanted] if wanted else [name for name in COLUMNS if name in names]
        if not found or found[0] not in names:
            raise InputError(
                f"column must be one of {self.path}'s, {', '.join(names)}; "
                + (f"got {wanted!r}" if wanted else f"none of {', '.join(COLUMNS)} is there: name it")
            )
        return found[0]

    def values(self, column: str, first: int) -> Iterator[Any]:
        """The values of a column from a row on, a few at a time; groups of rows before it are not read."""
        sizes = [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]
        ends = list(accumulate(sizes))
        group = bisect_right(ends, first)
        before = first - (ends[group] - sizes[group])  # rows of the group that are passed over
        try:
            for batch in self.file.iter_batches(AT_ONCE, [*range(group, len(sizes))], columns=[column]):
                yield from batch.column(0)[before:].to_pylist()
                before = max(0, before - len(batch))
        except (OSError, ValueError) as error:
            raise FileFormatError(f"{self.path} cannot be read as a parquet file: {error}") from error


def as_text(name: str) -> str:
    r"""A file's name as text that can be written: bytes of it that are no UTF-8 as Python would write them.

    Example:
        >>> print(as_text("caf\udce9.png"))
        caf\xe9.png
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def cut(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Items in tuples of so many."""
    held: list[Any] = []
    for item in items:
        held.append(item)
        if len(held) == size:
            yield tuple(held)
            held = []
    if held:
        yield tuple(held)


def open_named(name: str, column: str | None = None) -> Image.Image:
    """Read an image by the name that its row has; ``column`` is that of parquet files."""
    if not Path(name).exists():
        if ".tar/" in name:
            source, member = name.split(".tar/", 1)
            for shard in plan([f"{source}.tar"]):
                for item in shard.items:
                    if item[0] == member:
                        return Opener(f"{source}.tar", *item)()
        source, _, row = name.rpartition("#")
        if source.endswith(".parquet") and row.isdigit():
            where = ParquetRows(source).image_column(column)
            return next(Reader().openers(Shard("parquet", source, (int(row),), where)))()
    return open_image(name)
