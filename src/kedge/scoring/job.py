"""A scoring job: shard by shard, each written whole or not at all, so that it can be killed and started again."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, chain, tee
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.checks import at_least
from kedge.data import Preprocess
from kedge.data.reading import in_order, readers
from kedge.detectors import Detector, for_inference, load
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.files import atomic, remove_leftovers
from kedge.io.artifact import locate, read
from kedge.scoring import inputs
from kedge.scoring.inputs import SHARD, Opener, Reader, Shard, as_text, cut
from kedge.scoring.rows import ROWS, Row, format_of, parquet_module, read_rows, rows_of, writing

Report = Callable[[int, int], None]
BATCH = 256
HEAD = "job.json"  # in the folder of a job that is planned


@dataclass(frozen=True)
class Job:
    """What is to be scored, and where its rows go.

    Args:
        detector: A calibrated detector's file.
        sources: See `kedge.scoring.plan`.
        out: The file of rows.
        kind: Its format; by default what its name says.
        shard: Images in a shard.
        column: Of parquet files.
        batch: Images that the network sees at a time.
        workers: Threads that read images.
    """

    detector: Path
    sources: tuple[str, ...]
    out: Path
    kind: str
    shard: int = SHARD
    column: str | None = None
    batch: int = BATCH
    workers: int = 2

    def __post_init__(self) -> None:
        for name in ("shard", "batch", "workers"):
            at_least(name, getattr(self, name), 1)

    @property
    def folder(self) -> Path:
        """Where the shards that are done lie until all are."""
        return _folder(self.out)

    def part(self, number: int) -> Path:
        """The rows of one shard."""
        return self.folder / f"part-{number:08}.{self.kind}"

    def identity(self) -> dict[str, Any]:
        """What a job that was begun must have in common with this one to be gone on with."""
        try:
            content = locate(self.detector).read_bytes()
        except OSError as error:
            raise InputError(f"detector must be a readable file; {self.detector} is not: {error.strerror}") from error
        return {
            "detector": hashlib.sha256(content).hexdigest(),
            "inputs": list(self.sources),
            "shard": self.shard,
            "column": self.column,
            "format": self.kind,
        }

    def shards(self) -> Iterator[Shard]:
        """The shards as they were planned when the job was begun."""
        with (self.folder / "plan.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield _shard(line)

    def places(self) -> list[int]:
        """Where in the plan each shard begins."""
        with (self.folder / "plan.jsonl").open("rb") as lines:
            return list(accumulate(map(len, lines), initial=0))[:-1]

    def shard_at(self, place: int) -> Shard:
        """The shard that begins at a place in the plan; the rest of the plan, which may be long, is not read."""
        with (self.folder / "plan.jsonl").open("rb") as lines:
            lines.seek(place)
            return _shard(lines.readline())


def begun(out: Path) -> bool:
    """Whether a job for this file was begun and is not finished."""
    return (_folder(out) / HEAD).exists()


def _folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def _shard(line: str | bytes) -> Shard:
    plain = json.loads(line)
    items = tuple(tuple(item) if isinstance(item, list) else item for item in plain["items"])
    return Shard(plain["kind"], plain["source"], items, plain["column"])


def score_files(
    detector: str | Path,
    sources: Sequence[str],
    out: str | Path,
    *,
    kind: str | None = None,
    shard: int = SHARD,
    column: str | None = None,
    batch: int = BATCH,
    workers: int | None = None,
    overwrite: bool = False,
    engine: Callable[[Job, list[int], Report], None] | None = None,
    progress: Report | None = None,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Score images of any number into a file with a row for each.

    Killed at any moment and called again with the same arguments, it goes on; every image is in the file exactly once.

    Args:
        detector: A calibrated detector's file, or the name of one that comes with kedge.
        sources: Image files, folders, globs, lists, tars and parquet files.
        out: The file to write.
        kind: ``"parquet"``, ``"csv"`` or ``"jsonl"``; by default what the name of ``out`` says.
        shard: Images that are written together.
        column: Of parquet files: where the images are.
        batch: Images that the network sees at a time.
        workers: Threads that read images, of each process; by default two for an ``engine`` and one for each core, at
            most eight, without.
        overwrite: Whether to write over ``out``, and over a job for it that was begun with other arguments.
        engine: What runs the shards of these numbers: this process by default, or `kedge.scoring.RayEngine`.
        progress: Called with the number of images done and the number in all.
        finish: Called with the path once the rows are there, as the job's last part: where it was killed, or failed,
            the same call does it again.

    Returns:
        The path written.
    """
    if workers is None:
        workers = readers() if engine is None else 2
    job = Job(
        Path(detector), tuple(map(str, sources)), Path(out), format_of(Path(out), kind), shard, column, batch, workers
    )
    if job.kind == "parquet":
        parquet_module()  # before anything is begun
    _check_out(job, overwrite)
    identity = job.identity()
    if not read(job.detector)[0].get("calibration"):
        raise _without_threshold(job)
    with _locked(job):
        _check_out(job, overwrite)  # another process may have written it meanwhile
        total = _begin(job, identity, overwrite)
        sizes = [len(shard.items) for shard in job.shards()]
        waiting = [number for number in range(len(sizes)) if not job.part(number).exists()]
        done = total - sum(sizes[number] for number in waiting)
        report = progress or (lambda done, total: None)
        report(done, total)
        (engine or run_here)(job, waiting, lambda more, _: report(done + more, total))
        _put_together(job, len(sizes))
        if finish is not None:
            finish(job.out)
        _forget(job)
    return job.out


def run_here(job: Job, waiting: Sequence[int], report: Report) -> None:
    """Run shards one after the other in this process."""
    wanted, done = set(waiting), 0
    numbered = ((number, shard) for number, shard in enumerate(job.shards()) if number in wanted)
    with closing(Scorer(job).all_of(numbered)) as scored:
        for images in scored:
            done += images
            report(done, 0)


def _without_threshold(job: Job) -> NotReadyError:
    return NotReadyError(f"{job.detector} has no threshold yet; run kedge calibrate on it first")


class Scorer:
    """Scores shards of a job and writes their rows."""

    def __init__(self, job: Job) -> None:
        detector = load(job.detector)
        if detector.preprocess is None or detector.calibration is None:
            raise _without_threshold(job)
        self.job, self.detector = job, for_inference(detector)

    def __call__(self, number: int, shard: Shard) -> None:
        """Score one shard; its rows appear whole or not at all."""
        for _ in self.all_of([(number, shard)]):
            pass

    def all_of(self, numbered: Iterable[tuple[int, Shard]]) -> Generator[int, None, None]:
        """Score shards of these numbers; after each give the number of its images.

        While the network is at one shard, threads read the next.
        """
        batch, workers = self.job.batch, self.job.workers
        with closing(score_shards(self.detector, numbered, batch=batch, workers=workers)) as scored:
            for number, rows in scored:
                with atomic(self.job.part(number)) as temporary, writing(temporary, self.job.kind) as write:
                    write(rows)
                yield len(rows)


def score_shards(
    detector: Detector, numbered: Iterable[tuple[int, Shard]], *, batch: int = BATCH, workers: int = 2
) -> Generator[tuple[int, list[Row]], None, None]:
    """The rows of each shard with its number; an image that cannot be read gets a row with an error.

    The images of a shard are read while the one before is scored.
    """
    assert detector.preprocess is not None
    mine, ahead = tee(numbered)
    openers = chain.from_iterable(map(Reader().openers, (shard for _, shard in ahead)))
    tasks = (partial(_decode, opener, detector.preprocess) for opener in openers)
    with closing(in_order(tasks, ahead=2 * batch, workers=workers)) as found:
        for number, shard in mine:
            rows: list[Row] = []
            names = shard.names()
            for start in range(0, len(names), batch):
                part = names[start : start + batch]
                read = [next(found) for _ in part]
                places = [place for place, image in enumerate(read) if isinstance(image, Tensor)]
                errors = {place: image for place, image in enumerate(read) if isinstance(image, str)}
                images = [image for image in read if isinstance(image, Tensor)]
                said = detector(torch.stack(images), batch_size=batch) if images else None
                rows += rows_of(part, said, places, errors, detector.classes)
            yield number, rows


def _decode(opener: Opener, preprocess: Preprocess) -> Tensor | str:
    try:
        return preprocess(opener())
    except InputError as error:
        return as_text(str(error))
    except (OSError, ValueError, MemoryError) as error:  # a disk that fails, or an image too large for what is left
        return as_text(f"{type(error).__name__}: {error}")


@contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Keep others out; the system lets go of the lock when the process ends, however it ends.

    Where the job fails before it is planned, nothing is left of it.
    """
    new = [place for place in job.folder.parents if not place.exists()]
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        lock = (job.folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"out must be writable; {job.out} is not: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), (job.folder / "lock").stat()):
                raise OSError("whoever had the lock has ended the job, and another has begun it anew")
        except OSError as error:
            raise InputError(f"another process is writing {job.out}; wait for it, or choose another name") from error
        try:
            yield
        except BaseException:
            if not begun(job.out):
                for name in ("plan.jsonl", "lock"):
                    (job.folder / name).unlink(missing_ok=True)
                for place in (job.folder, *new):
                    with suppress(OSError):  # something else is in it
                        place.rmdir()
            raise


def _check_out(job: Job, overwrite: bool) -> None:
    if job.out.is_dir():
        raise InputError(f"out must be a file to write; {job.out} is a folder: add a file name")
    if job.out.exists() and not (overwrite or begun(job.out)):
        raise InputError(f"out must not be there yet; {job.out} is: choose another name, or overwrite it")


def _begin(job: Job, identity: dict[str, Any], overwrite: bool) -> int:
    """Plan the job, or take up one that was begun; return the number of images."""
    remove_leftovers(job.folder)
    head = job.folder / HEAD
    if head.exists():
        known = json.loads(head.read_text())
        if known["identity"] == identity:
            return int(known["images"])
        changed = [key for key, value in identity.items() if known["identity"].get(key) != value]
        if not overwrite:
            raise InputError(
                f"{job.folder} holds a job that was begun with other {', '.join(changed)}; finish it as it was, choose "
                "another name, or overwrite it"
            )
        head.unlink()
    for old in job.folder.glob("part-*"):
        old.unlink()
    images = 0
    with atomic(job.folder / "plan.jsonl") as temporary, temporary.open("w", encoding="utf-8") as lines:
        for shard in inputs.plan(job.sources, shard=job.shard, column=job.column, out=job.out):
            lines.write(json.dumps(asdict(shard)) + "\n")
            images += len(shard.items)
    if images == 0:
        raise InputError(f"inputs must hold images; none was found in {', '.join(job.sources)}")
    with atomic(head) as temporary:  # last: a job with a head is planned
        temporary.write_text(json.dumps({"identity": identity, "images": images}))
    return images


def _put_together(job: Job, shards: int) -> None:
    """Make one file of the shards, in order."""
    missing = [number for number in range(shards) if not job.part(number).exists()]
    if missing:
        raise KedgeError(f"{len(missing)} of {shards} shards were not scored; run the same command again")
    whole = job.folder / "whole"  # in the folder, so that no half of it is left elsewhere
    with atomic(whole) as temporary, writing(temporary, job.kind) as write:
        for number in range(shards):
            for rows in cut(read_rows(job.part(number), job.kind), ROWS):
                write(rows)
    whole.replace(job.out)


def _forget(job: Job) -> None:
    """Remove the folder while the lock is held: the head first, without which nothing counts, and the lock last."""
    lock = job.folder / "lock"
    (job.folder / HEAD).unlink(missing_ok=True)
    for file in job.folder.iterdir():
        if file != lock and file.is_file():
            file.unlink()
    lock.unlink()
    with suppress(OSError):  # the next one may be there already
        job.folder.rmdir()
