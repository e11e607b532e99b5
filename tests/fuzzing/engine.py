"""What every case must keep to, and the loop that runs them."""

import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kedge.errors import KedgeError
from kedge.serving.bodies import Refused

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory
HANG = 120  # seconds after which a process that runs one case has failed
SECONDS, MEGABYTES = 2.0, 256  # of processor time and of memory that one case may take
Case = Callable[[np.random.Generator, Path], bool]  # runs one case in a folder; returns whether it was accepted
Cases = Iterator[Case]
TARGETS = {}  # a function of a folder for the corpus, as a context that gives the cases, by name

_allowed: list[str] = []  # the folder that may be written to, while a case runs
_breaches: list[str] = []
_FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect"}
_FORBIDDEN |= {"pickle.find_class", "ctypes.dlopen"}
# The places of the paths, and of the descriptors of their folders, in the arguments of what changes files.
_CHANGES = {
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.symlink": ((1, 2),),
    "os.rename": ((0, 2), (1, 3)), "os.link": ((0, 2), (1, 3)), "open": ((0, None),),
    "os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.truncate": ((0, None),),
}  # fmt: skip
_FOLLOWED = {"open", "os.chmod", "os.chown", "os.utime", "os.truncate"}  # a link as last part of the path
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def target(name):
    """Register a function that makes a corpus in a folder and yields the function for one case."""

    def register(function):
        TARGETS[name] = contextmanager(function)
        return function

    return register


def _audit(event, arguments):
    if not _allowed or (event not in _CHANGES and event not in _FORBIDDEN):
        return
    if event in _FORBIDDEN:
        if arguments[0] not in ("git", "uname"):  # which `kedge.provenance` runs
            _breaches.append(f"{event} {arguments!r:.200}")
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return
    for place, folder in _CHANGES[event]:
        if not isinstance(arguments[place], (str, bytes, os.PathLike)):
            continue
        path, at = os.fsdecode(arguments[place]), -1 if folder is None else arguments[folder]
        if isinstance(at, int) and at >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{at}"), path)
        path = os.path.abspath(path)
        real = os.path.realpath(path if event in _FOLLOWED else os.path.dirname(path))
        if not f"{real}/".startswith(f"{_allowed[0]}/") and path not in ("/dev/null", _allowed[0]):
            _breaches.append(f"{event} {path}")


sys.addaudithook(_audit)


class Memory:
    """The peak of this process's memory in megabytes above where it stood; 0 where the system does not count it."""

    def __init__(self):
        self.reset = os.open("/proc/self/clear_refs", os.O_WRONLY) if os.path.exists("/proc/self/clear_refs") else None

    def start(self):
        if self.reset is not None:
            os.pwrite(self.reset, b"5", 0)
            self.before = self._kilobytes("VmRSS:")

    def grown(self) -> float:
        return 0.0 if self.reset is None else (self._kilobytes("VmHWM:") - self.before) / 1000

    def _kilobytes(self, name):
        return int(Path("/proc/self/status").read_text().split(name)[1].split()[0])


@dataclass
class Result:
    """What came of the cases of a target: processor seconds and megabytes are those of the worst case."""

    cases: int = 0
    accepted: int = 0
    slowest: float = 0.0
    largest: float = 0.0
    failures: list[str] = field(default_factory=list)


def fuzz(name, *, cases=None, seconds=math.inf, seed=0, first=0, started=lambda number: None, failed=None) -> Result:
    """Run cases of a target from a number on; a failure is raised, or given to ``failed``.

    A case depends on the target, the seed and its number alone.
    """
    result, memory, until = Result(), Memory(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="kedge-fuzz-", dir=FAST) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(temporary).resolve() / "outside" / "inside"
        (folder.parents[1] / "corpus").mkdir()
        with TARGETS[name](folder.parents[1] / "corpus") as case:
            while time.monotonic() < until and (cases is None or result.cases < cases):
                number = first + result.cases
                started(number)
                rng = np.random.default_rng([seed, number, *name.encode()])
                try:
                    accepted, took, grown = _run(case, rng, folder, memory)
                    result.accepted += accepted
                    result.slowest, result.largest = max(result.slowest, took), max(result.largest, grown)
                except Exception as error:
                    line = command(name, seed, number)
                    if failed is None:
                        raise AssertionError(f"repeat with: {line}") from error
                    result.failures.append(line)
                    failed(line, error)
                result.cases += 1
    return result


def command(name, seed, number) -> str:
    """What repeats a case."""
    return f"(cd tests; python -m fuzzing --target {name} --seed {seed} --case {number})"


def _run(case, rng, folder, memory):
    """Run one case and check what it did besides its result."""
    if not folder.exists() or any(folder.iterdir()):
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder.parent / "secret").write_text("unchanged")
    _breaches.clear()
    memory.start()
    here, started = os.getcwd(), time.process_time()
    sys.dont_write_bytecode = True
    os.chdir(folder.parent)
    _allowed.append(str(folder))
    message = ""
    try:
        accepted = case(rng, folder)
    except (KedgeError, Refused) as error:
        accepted, message = False, str(error)
    finally:
        _allowed.clear()
        os.chdir(here)
    took, grown = time.process_time() - started, memory.grown()
    assert "object at 0x" not in message, message
    assert not _breaches, _breaches
    assert sorted(os.listdir(folder.parent)) == ["inside", "secret"]
    secret = folder.parent / "secret"
    assert (secret.read_text(), secret.stat().st_nlink) == ("unchanged", 1)
    assert took < SECONDS, f"it took {took:.1f} seconds"
    assert grown < MEGABYTES, f"it took {grown:.0f} MB"
    return accepted, took, grown


def fuzz_apart(name, seconds, seed) -> Result:
    """Fuzz in another process; after a crash or a hang, which are failures, the next process has the next case."""
    context, whole, until = multiprocessing.get_context("spawn"), Result(), time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ours, theirs = context.Pipe()
        number = context.Value("q", -1)
        child = context.Process(target=_child, args=(name, left, seed, whole.cases, number, theirs))
        child.start()
        theirs.close()
        part, last, since = None, -2, time.monotonic()
        while part is None:
            if ours.poll(0.5):
                try:
                    part = ours.recv()
                except EOFError:  # it crashed
                    break
            elif number.value != last:
                last, since = number.value, time.monotonic()
            elif time.monotonic() - since > HANG:
                child.kill()
        child.join()
        if part is None:
            if number.value < whole.cases:
                raise RuntimeError(f"the process for {name} ended before its first case")
            line = command(name, seed, number.value)
            print(f"\nFAILED: {line}\nthe process crashed or hung: exit code {child.exitcode}", flush=True)
            part = Result(cases=number.value + 1 - whole.cases, failures=[line])
        for key in ("cases", "accepted", "failures"):
            setattr(whole, key, getattr(whole, key) + getattr(part, key))
        whole.slowest, whole.largest = max(whole.slowest, part.slowest), max(whole.largest, part.largest)
    return whole


def _child(name, seconds, seed, first, number, pipe):
    import fuzzing  # noqa: F401 -- registers the targets

    def failed(line, error):
        print(f"\nFAILED: {line}\n{''.join(traceback.format_exception(error)).rstrip()}", flush=True)

    def started(case):
        number.value = case

    torch.set_num_threads(1)
    pipe.send(fuzz(name, seconds=seconds, seed=seed, first=first, started=started, failed=failed))
