"""Shards scored by Ray Data, on the cores of this machine or of any number of machines that share their files."""

import logging
import os
import platform
import traceback
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kedge import errors
from kedge.checks import at_least, needs
from kedge.detectors import Detector, for_inference, load
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.scoring.inputs import cut
from kedge.scoring.job import PLAN, Job, Report, score_parts

TASKS = 20_000  # at most; with more shards, several share a task, or the driver could not hand them out fast enough
TRIES = 5  # of a shard whose worker is killed
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}  # unless the user has set them
PROBES = 64  # inputs whose existence each worker checks before it begins

TaskResult = tuple[int, str, str, str]  # its images, and the class, message and trace of a failure


@dataclass(frozen=True)
class RayEngine:
    """Runs the shards of a job in workers of Ray; the ``engine`` of `kedge.scoring.score_files`.

    Each worker loads the detector once and writes its shards, whole or not at all, into the folder of the job, which
    all machines must share. A worker that is killed costs the shard in progress: Ray starts another in its place. A
    cluster that is already running is left running; one that the engine starts, it stops.

    Args:
        address: Address of a cluster that this machine is part of: ``"auto"`` or ``"host:port"``; ``"local"`` starts
            one on this machine; None joins one that runs on this machine, or starts one.
        parallel: Largest number of workers, with one core each; by default the cores of the cluster.

    Example:
        >>> RayEngine(parallel=8).address is None
        True
    """

    address: str | None = None
    parallel: int | None = None

    def __post_init__(self) -> None:
        if self.parallel is not None:
            at_least("parallel", self.parallel, 1)
        if self.address is not None and self.address.startswith("ray://"):
            raise InputError(
                f"address must be 'auto', 'host:port' or 'local'; got {self.address!r}: run it inside the cluster"
            )

    def __call__(self, job: Job, waiting: list[int], report: Report) -> None:
        """Score the shards with these numbers."""
        ray = ray_module()
        if not waiting:
            return
        for old in job.folder.glob("try-*"):  # of an earlier run, whose failures no longer count
            old.unlink(missing_ok=True)
        done, results = 0, _results(ray, job, waiting, self.parallel)
        with _connected(ray, self.address), _settings(ray), closing(results):
            for images, kind, message, trace in results:
                if message:
                    failure: KedgeError = getattr(errors, kind, KedgeError)(message)
                    failure.add_note(trace)
                    raise failure
                done += images
                report(done, 0)


class Worker:
    """Scores shards in a process of Ray, with a detector that is loaded once."""

    def __init__(self, job: Job, home: str, probes: list[str]) -> None:
        self.job = job
        self.home = home  # the folder that the job's paths are relative to
        self.probes = probes  # inputs that must exist on this machine too, or each would become a row with an error
        self.detector: Detector | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Score the shards of a task; a failure is returned, since Ray's own report of it is hard to read."""
        images, kind, message, trace = 0, "", "", ""
        try:
            self.detector = self.detector or self._begin()
            for number, offset in zip(batch["number"].tolist(), batch["offset"].tolist(), strict=True):
                images += self._score(self.detector, number, offset)
        except Exception as failure:
            kind, trace = type(failure).__name__, traceback.format_exc()
            message = str(failure) if isinstance(failure, KedgeError) else f"{kind}: {failure}; on {platform.node()}"
        return {"images": [images], "kind": [kind], "error": [message], "trace": [trace]}

    def _begin(self) -> Detector:
        if Path(self.home).is_dir():
            os.chdir(self.home)
        torch.set_num_threads(1)  # a worker is one core
        job, host = self.job, platform.node()
        for path in (str(job.folder / PLAN), *self.probes):
            if not os.path.exists(path):
                raise NotReadyError(f"{path} must be visible to all machines of the cluster; {host} lacks it: share it")
        if job.identity() != job.begun()["identity"]:
            raise NotReadyError(f"detector must be the same file on all machines; {job.detector} on {host} is another")
        return for_inference(load(job.detector, model=job.model))

    def _score(self, detector: Detector, number: int, offset: int) -> int:
        """Score one shard, unless a worker did so before it was killed; return the number of its images."""
        shard = next(self.job.shards(offset))
        if not self.job.part(number).exists():
            tries = self.job.folder / f"try-{number:08}"
            with tries.open("ab") as file:  # Ray would never give up on a shard that kills its workers
                file.write(b".")
            if tries.stat().st_size > TRIES:
                names = shard.names()
                killed = f"{TRIES} workers were killed while they scored the images from {names[0]} to {names[-1]}"
                raise KedgeError(f"{killed}; if they ran out of memory, use a smaller batch or fewer workers")
            list(score_parts(self.job, detector, [(number, shard)]))
            tries.unlink(missing_ok=True)
        return len(shard.items)


def _results(ray: ModuleType, job: Job, waiting: list[int], parallel: int | None) -> Generator[TaskResult, None, None]:
    """Hand out the shards and yield the result of each task when it is done."""
    import pyarrow

    offsets = job.offsets()
    firsts = (next(job.shards(offsets[number])) for number in waiting[:: -(-len(waiting) // PROBES)])
    probes = [path for shard in firsts if os.path.exists(path := shard.source or shard.items[0])]
    tasks = [
        pyarrow.table({"number": numbers, "offset": [offsets[number] for number in numbers]})
        for numbers in map(list, cut(waiting, -(-len(waiting) // TASKS)))
    ]
    workers = min(parallel or int(ray.cluster_resources().get("CPU", 1)), len(tasks))
    # All workers start at once; idle ones may end, to make room for those of a machine that is lost.
    pool = ray.data.ActorPoolStrategy
    at_once = {"initial_size": workers} if "initial_size" in signature(pool).parameters else {}  # others grow to it
    results = ray.data.from_arrow(tasks).map_batches(
        Worker,
        fn_constructor_args=(job, os.getcwd(), probes),
        batch_size=None,
        compute=pool(min_size=1, max_size=workers, **at_once),
        num_cpus=1,
    )
    try:
        for batch in results.iter_batches(batch_size=None, prefetch_batches=0):
            yield from zip(*(batch[name].tolist() for name in ("images", "kind", "error", "trace")), strict=True)
    except Exception as error:
        raise KedgeError(
            f"Ray could not run the workers: {str(error).strip().splitlines()[-1]}; every machine needs this "
            "version of kedge, Python and Ray. What was scored is kept: run the same command again"
        ) from error


@contextmanager
def _connected(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Start or join a cluster, and leave it at the end, unless the process had joined one before."""
    if ray.is_initialized():
        yield
        return
    added = {name: value for name, value in QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        try:
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray has no exception class for this
            reason = error.__cause__ or error
            if address in (None, "local"):
                raise KedgeError(f"Ray did not start on this machine: {reason}") from error
            raise InputError(f"address must be that of a running Ray cluster; {address!r} is not: {reason}") from error
        yield
    finally:
        ray.shutdown()
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _settings(ray: ModuleType) -> Iterator[None]:
    """Ray Data without its progress bar, its log and its time limit for a task."""
    log, context = logging.getLogger("ray.data"), ray.data.DataContext.get_current()
    wanted = {"enable_progress_bars": False, "execution_no_progress_timeout_s": -1}
    before = {name: getattr(context, name) for name in wanted if hasattr(context, name)}  # versions differ
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        for name in before:
            setattr(context, name, wanted[name])
        yield
    finally:
        log.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)


def ray_module() -> ModuleType:
    """The package ray; if it is missing, an error that says how to install it."""
    ray: ModuleType = needs("ray", "ray", "engine 'ray'")
    needs("ray.data", "ray", "engine 'ray'")
    return ray
