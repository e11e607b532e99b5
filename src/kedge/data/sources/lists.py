"""Lists of images with labels: OpenOOD's, and SCOOD's, which label an image by its content and not by its origin."""

import json
import os
from pathlib import Path, PurePosixPath

import torch

from kedge.checks import one_of
from kedge.data.sources.folders import read_lines
from kedge.data.streamed import Files, StreamedSet
from kedge.errors import FileFormatError, InputError, NotReadyError

BENCHMARKS = ("cifar10", "cifar100")
SCOOD_NAMES = ("cifar10", "cifar100", "svhn", "texture", "tin", "lsun", "places365")


def image_list(
    path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, *, name: str | None = None
) -> StreamedSet:
    """The images of a list in OpenOOD's format: a path and a label per line, a negative label for none.

    Args:
        path: The list.
        root: The folder that its paths are relative to; by default the list's own.
        name: Name of the set; by default the list's.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "0.png").write_bytes(b"..."), (folder / "test.txt").write_text("0.png -1")
        >>> image_list(folder / "test.txt").labels
        tensor([-1])
    """
    listed = Path(path)
    lines = read_lines(listed)
    if not lines:
        raise InputError(f"{listed} must list at least one image; it is empty")
    rows = []
    for number, line in enumerate(lines, start=1):
        text, _, last = line.strip().rpartition(" ")
        try:
            rows.append((text.strip(), max(int(last), -1)))
        except ValueError:
            text = ""
        if not text:
            raise FileFormatError(f"{listed} must hold a path and a whole number per line; line {number} is {line!r}")
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
    listed = f"{benchmark}/{split}_{name}"
    inside, outside = (
        read_scood(home / "imglist", f"{listed}/{part}", f"scood {benchmark} {name} ({part})") for part in ("id", "ood")
    )
    return inside, outside


def read_scood(path: Path, split: str, name: str) -> StreamedSet:
    """One list of SCOOD by ``{benchmark}/{train|test}_{name}``; followed by ``/id`` or ``/ood``, that part of it."""
    benchmark, _, rest = split.partition("/")
    stem, _, part = rest.partition("/")
    lists = path / f"benchmark_{benchmark}"
    listed = lists / f"{stem}.txt"
    if not listed.is_file():
        present = ", ".join(sorted(file.stem for file in lists.glob("*.txt"))) or "none"
        raise InputError(f"split of scood must name a list of {lists} ({present}); got {split!r}")
    rows = []
    for number, line in enumerate(read_lines(listed), start=1):
        file, _, extra = line.strip().partition(" ")
        try:
            label = json.loads(extra)["sc_label"]
        except (ValueError, KeyError, TypeError):
            label = None
        if type(label) is not int:
            raise FileFormatError(
                f'{listed} must hold a path and {{"sc_label": ...}} per line; line {number} is {line!r}'
            )
        rows.append((file, max(label, -1)))
    whole = _listed_set(listed, path.parent / "images", rows, name)
    assert whole.labels is not None
    return whole.subset((whole.labels >= 0) == (part == "id")) if part else whole


def _listed_set(listed: Path, root: Path, rows: list[tuple[str, int]], name: str) -> StreamedSet:
    """The listed files with their labels; all files must exist, inside the root."""
    for number, (file, _) in enumerate(rows, start=1):
        inside = PurePosixPath(file)
        if inside.is_absolute() or ".." in inside.parts:
            raise FileFormatError(
                f"{listed} names {file} in line {number}, which is outside {root}: pass the root that all paths share"
            )
    missing = [file for file, _ in rows if not (root / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{listed} names {missing[0]}{more}, which {root} does not hold; is the root right?")
    return StreamedSet(Files(root, tuple(file for file, _ in rows)), torch.tensor([label for _, label in rows]), name)
