"""A scoring job: shard by shard, each written whole or not at all, so that a killed job can be resumed."""

import json
import os
import socket
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, tee, zip_longest
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.data import Preprocess
from kedge.data.reading import in_order, readers
from kedge.detectors import Detector, for_inference, load
from kedge.errors import InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.files import atomic, remove_leftovers, write_json
from kedge.io.artifact import read_header
from kedge.progress import progress_bar
from kedge.scoring.inputs import SHARD, Opener, Shard, as_text, cut, openers, plan
from kedge.scoring.rows import CHUNK, COLUMNS, format_of, parquet_module, read_rows, writing

Report = Callable[[int, int], None]  # called with the number of images done and the number in all
HEAD = "job.json"  # in the folder of a job, written once the job is planned
PLAN = "plan.jsonl"


@dataclass(frozen=True)
class Job:
    """The images to score, and where the rows go; the arguments are those of `score_files`."""

    detector: Path
    sources: tuple[str, ...]
    out: Path
    kind: str
    shard: int = SHARD
    column: str | None = None
    batch: int | None = None
    workers: int = 2
    model: nn.Module | str | None = None

    def __post_init__(self) -> None:
        for name in ("shard", "batch", "workers"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)

    @property
    def folder(self) -> Path:
        """Holds the shards that are done until all are."""
        return self.out.with_name(f"{self.out.name}.parts")

    def part(self, number: int) -> Path:
        """The file with the rows of one shard."""
        return self.folder / f"part-{number:08}.{self.kind}"

    def identity(self) -> dict[str, Any]:
        """What an unfinished job must share with this one to be resumed; the detector must have a threshold."""
        header = read_header(self.detector)
        if not header.get("calibration"):
            raise NotReadyError(f"{self.detector} has no threshold yet; run kedge calibrate on it first")
        return {
            "detector": header["sha256"],  # of its content, which loading it checks
            "inputs": list(self.sources),
            "shard": self.shard,
            "column": self.column,
            "format": self.kind,
        }

    def begun(self) -> dict[str, Any]:
        """The ``identity`` and the number of ``images`` of the job that was begun."""
        return dict(json.loads((self.folder / HEAD).read_text()))

    def shards(self, offset: int = 0) -> Iterator[Shard]:
        """The shards as they were planned when the job was begun, from a position in the plan on."""
        with (self.folder / PLAN).open("rb") as lines:
            lines.seek(offset)
            for plain in map(json.loads, lines):
                items = tuple(tuple(item) if isinstance(item, list) else item for item in plain["items"])
                yield Shard(**plain | {"items": items})

    def offsets(self) -> list[int]:
        """The position of each shard in the plan."""
        with (self.folder / PLAN).open("rb") as lines:
            return list(accumulate(map(len, lines), initial=0))[:-1]


def is_begun(out: Path) -> bool:
    """Whether a job for this file was planned and is not finished."""
    return (out.with_name(f"{out.name}.parts") / HEAD).exists()


def score_files(
    detector: str | Path,
    sources: Sequence[str],
    out: str | Path,
    *,
    kind: str | None = None,
    shard: int = SHARD,
    column: str | None = None,
    batch: int | None = None,
    workers: int | None = None,
    model: nn.Module | str | None = None,
    overwrite: bool = False,
    raw_cells: bool = False,
    engine: Callable[[Job, list[int], Report], None] | None = None,
    progress: Report | None = None,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Score any number of images into a file with one row per image; see `Detection.to_rows` for the columns.

    If it is killed, the same call resumes it; every image is in the file exactly once. A file that cannot be read as an
    image becomes a row with an ``error``. Each row has the sha256 in the header of the ``detector``. If ``out`` is
    complete and no input is newer, nothing is scored, with a warning.

    Args:
        detector: A calibrated detector's file, or the name of one that comes with kedge.
        sources: Image files, folders, globs, lists, tars and parquet files.
        out: The file to write.
        kind: ``"parquet"``, ``"csv"`` or ``"jsonl"``; by default the ending of ``out``.
        shard: Images that are written together.
        column: The column of parquet files with the images.
        batch: Images in a batch of the network, by default `kedge.Preprocess.batch_size`.
        workers: Threads that read images in each process; by default two with an ``engine``, and otherwise one per
            core, at most eight.
        model: See `kedge.load`; for workers of Ray, best a name.
        overwrite: Whether to replace ``out``, and an unfinished job for it with other arguments.
        raw_cells: Whether text in CSV that a spreadsheet takes for a formula is left as it is; by default an apostrophe
            stands before it, which `read_rows` removes.
        engine: Runs the shards with the given numbers; by default this process, or a `kedge.scoring.RayEngine`.
        progress: Called with the number of images done and the number in all, instead of a bar in a terminal.
        finish: Called with the path once the rows are written, as the last step of the job: if it fails or is killed,
            the same call repeats it.

    Returns:
        The path written.
    """
    workers = workers if workers is not None else readers() if engine is None else 2
    inputs = tuple(map(str, sources))
    job = Job(Path(detector), inputs, Path(out), format_of(Path(out), kind), shard, column, batch, workers, model)
    if job.kind == "parquet":
        parquet_module()  # fails before anything is begun
    if job.out.is_dir():
        raise InputError(f"out must be a file to write; {job.out} is a folder: add a file name")
    identity = job.identity()
    with _locked(job):
        if overwrite or is_begun(job.out) or not job.out.exists():
            total = _begin(job, identity, overwrite)
            sizes = [len(shard.items) for shard in job.shards()]
            waiting = [number for number in range(len(sizes)) if not job.part(number).exists()]
            done = total - sum(sizes[number] for number in waiting)
            with progress_bar("scoring") as update:
                report = progress or update
                report(done, total)
                (engine or run_here)(job, waiting, lambda more, _: report(done + more, total))
            _assemble(job, len(sizes), raw_cells)
        elif _is_complete(job, identity["detector"]):
            warnings.warn(f"{job.out} is complete: nothing was scored; overwrite it to score again", KedgeWarning, 2)
        else:
            raise InputError(f"out must not exist yet; {job.out} does: choose another name, or pass overwrite=True")
        if finish is not None:
            finish(job.out)
        (job.folder / HEAD).unlink(missing_ok=True)  # without it, the other files do not count
    return job.out


def run_here(job: Job, waiting: Sequence[int], report: Report) -> None:
    """Run shards one after the other in this process."""
    wanted, done = set(waiting), 0
    numbered = ((number, shard) for number, shard in enumerate(job.shards()) if number in wanted)
    with closing(score_parts(job, for_inference(load(job.detector, model=job.model)), numbered)) as scored:
        for images in scored:
            done += images
            report(done, 0)


def score_parts(job: Job, detector: Detector, numbered: Iterable[tuple[int, Shard]]) -> Generator[int, None, None]:
    """Score numbered shards and write the rows of each, whole or not at all; yield the number of its images."""
    source = {"detector": job.begun()["identity"]["detector"]}
    with closing(score_shards(detector, numbered, batch=job.batch, workers=job.workers)) as scored:
        for number, rows in scored:
            with atomic(job.part(number)) as temporary, writing(temporary, job.kind) as write:
                write([row | source for row in rows])
            yield len(rows)


def score_shards(
    detector: Detector, numbered: Iterable[tuple[int, Shard]], *, batch: int | None = None, workers: int = 2
) -> Generator[tuple[int, list[dict[str, Any]]], None, None]:
    """The number and the rows of each shard; threads read the images of a shard while the one before is scored."""
    assert detector.preprocess is not None
    batch = batch or detector.preprocess.batch_size
    current, ahead = tee(numbered)
    classes = list(map(as_text, detector.classes))
    tasks = (partial(_decode, opener, detector.preprocess) for opener in openers(shard for _, shard in ahead))
    with closing(in_order(tasks, ahead=2 * batch, workers=workers)) as decoded:
        for number, shard in current:
            rows = []
            for names in cut(shard.names(), batch):
                results = [next(decoded) for _ in names]
                scored = iter(_detect(detector, [image for image in results if isinstance(image, Tensor)], classes))
                for name, result in zip(names, results, strict=True):
                    row = next(scored) if isinstance(result, Tensor) else {"error": result}
                    rows.append(dict.fromkeys(COLUMNS) | row | {"name": name})
            yield number, rows


def _detect(detector: Detector, images: list[Tensor], classes: list[str]) -> list[dict[str, Any]]:
    """A row for each image; if a batch cannot be scored, its images are scored one by one."""
    try:
        return detector(torch.stack(images), batch_size=len(images)).to_rows(classes) if images else []
    except InputError as error:
        if len(images) == 1:
            return [{"error": as_text(str(error))}]
        return [row for image in images for row in _detect(detector, [image], classes)]


def _decode(opener: Opener, preprocess: Preprocess) -> Tensor | str:
    """An image as the network's input, or the reason why it cannot be read."""
    try:
        return preprocess(opener())
    except InputError as error:
        return as_text(str(error))
    except Exception as error:  # a failing disk, or an image too large for the memory left
        return as_text(f"{type(error).__name__}: {error}")


@contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Exclude other processes, however this one ends; a job that is not planned, or is finished, leaves nothing."""
    created = [folder for folder in job.folder.parents if not folder.exists()]
    lock, owner = FileLock(job.folder / "lock", timeout=0), job.folder / "owner"
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        owner.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
    except Timeout as error:
        holder = "which has just begun"
        with suppress(OSError):
            holder = owner.read_text()
        raise InputError(f"another process ({holder}) is writing {job.out}; wait, or choose another name") from error
    except OSError as error:
        raise InputError(f"out must be writable; {job.out} is not: {error.strerror or error}") from error
    try:
        yield
    finally:
        if not is_begun(job.out):
            _clear(job.folder, "owner", "lock")
        lock.release()
        if not is_begun(job.out):
            for folder in (job.folder, *created):
                with suppress(OSError):  # something else is in it
                    folder.rmdir()


def _clear(folder: Path, *more: str) -> None:
    """Delete the files of a job."""
    for pattern in ("part-*", "try-*", ".*.part", "whole", PLAN, *more):
        for file in folder.glob(pattern):
            with suppress(OSError):  # Windows does not delete an open file; there, filelock removes it on release
                file.unlink()


def _is_complete(job: Job, detector: str) -> bool:
    """Whether the file to write has the detector's row for each input already, and is newer than all of them."""
    written = job.out.stat().st_mtime

    def names() -> Iterator[str]:
        for shard in plan(job.sources, column=job.column, out=job.out):
            for path in [shard.source] if shard.source else shard.items:
                with suppress(OSError):  # a file that is missing has a row with an error
                    status = os.stat(path)
                    if max(status.st_mtime, status.st_ctime) > written:
                        raise InputError(f"{path} is newer than {job.out}")
            yield from shard.names()

    values = ("label", "probability", "score", "p_value", "is_ood")
    try:
        return all(
            row is not None
            and (row["name"], row["detector"]) == (name, detector)
            and (row["error"] or all(row[key] is not None for key in values))
            for name, row in zip_longest(names(), read_rows(job.out, job.kind))
        )
    except KedgeError:  # one of the two cannot be read
        return False


def _begin(job: Job, identity: dict[str, Any], overwrite: bool) -> int:
    """Plan the job, or resume one that was begun; return the number of images."""
    head = job.folder / HEAD
    if head.exists():
        begun = job.begun()
        if begun["identity"] == identity:
            remove_leftovers(job.folder)
            return int(begun["images"])
        if not overwrite:
            changed = ", ".join(key for key, value in identity.items() if begun["identity"].get(key) != value)
            raise InputError(f"{job.folder} holds a job begun with other {changed}; finish it, or pass overwrite=True")
        head.unlink()
    _clear(job.folder)
    images = 0
    with atomic(job.folder / PLAN) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for shard in plan(job.sources, shard=job.shard, column=job.column, out=job.out):
            lines.write(json.dumps(asdict(shard)) + "\n")
            images += len(shard.items)
    if images == 0:
        raise InputError(f"inputs must contain images; none were found in {', '.join(job.sources)}")
    write_json(head, {"identity": identity, "images": images})  # last: a job with a head is planned
    return images


def _assemble(job: Job, shards: int, raw_cells: bool) -> None:
    """Make one file of the shards, in order."""
    if missing := [number for number in range(shards) if not job.part(number).exists()]:
        raise KedgeError(f"{len(missing)} of {shards} shards were not scored; run the same command again")
    whole = job.folder / "whole"  # in the folder, so that no half of it is left elsewhere
    with atomic(whole) as temporary, writing(temporary, job.kind, raw_cells=raw_cells) as write:
        for number in range(shards):
            for rows in cut(read_rows(job.part(number), job.kind), CHUNK):
                write(rows)
    whole.replace(job.out)
