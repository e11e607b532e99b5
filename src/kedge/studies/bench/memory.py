"""The memory that an engine adds to a process of its own."""

import contextlib
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch

from kedge.errors import KedgeError, NotReadyError
from kedge.export.runtime import ENGINES, package
from kedge.studies.bench.early_exit import EarlyExitEngine
from kedge.studies.bench.engines import FULL_SHARE, Prepared
from kedge.studies.bench.subjects import batches_of

CHILD = "import json, sys; from kedge.studies.bench.memory import added; print(added(*json.loads(sys.argv[1])))"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def check_memory() -> None:
    """Raise where memory cannot be measured."""
    try:
        _bytes("VmHWM")
        CLEAR.write_text("5")
    except OSError as error:
        raise NotReadyError(
            f"memory can be measured on Linux, where a process may write {CLEAR}; here it may not: {error}. Measure "
            "without memory"
        ) from error


def peak_memory(prepared: Prepared, engine: str, batch: int, *, threads: int, share: float = FULL_SHARE) -> int:
    """Bytes that an engine adds to a new process at the peak of a batch, with its weights; see `check_memory`."""
    arguments = json.dumps([str(prepared.folder), prepared.shape, engine, batch, threads, share])
    done = subprocess.run([sys.executable, "-c", CHILD, arguments], capture_output=True, text=True)
    if done.returncode:
        raise KedgeError(f"the memory of {engine} could not be measured: {done.stderr.strip() or done.returncode}")
    return int(done.stdout)


def added(folder: str, shape: list[int], engine: str, batch: int, threads: int, share: float) -> int:
    """Measure in this process, which should do nothing else."""
    torch.set_num_threads(threads)
    if (runtime := engine.partition("-")[0]) in ENGINES:
        package(runtime)
    prepared = Prepared(Path(folder), tuple(shape), 0, (engine,), {})
    parts = batches_of(batch, prepared.shape)
    torch.nn.functional.conv2d(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3))  # starts torch's threads and kernels
    before = _bytes("VmRSS")
    run = prepared.start(engine, threads=threads)
    if isinstance(run, EarlyExitEngine):
        run.set_full_share(torch.cat(parts), share)
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # memory that is free, but not returned, is not the engine's
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")  # resets the peak
    for images in parts:
        run(images)
    return _bytes("VmHWM") - before


def _bytes(key: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KedgeError(f"{STATUS} must have a line {key}; it has none")
