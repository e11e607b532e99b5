"""Kill `kedge score` (also on Ray), `kedge train` and `kedge serve` at random lines and moments, resume, compare.

    python benchmarks/chaos.py [--minutes 5] [--work score-csv train ...] [--seed N] [--episode N] [--json PATH]

An episode runs one command in a fresh folder and kills it (SIGKILL) one to four times: when it reaches a line of kedge
that an uninterrupted run passed, each line being as likely, or each passage; or at a moment of the time that such a run
takes. Under Ray, a worker may be killed instead. Then the same command runs to its end. It must succeed and leave what
the uninterrupted run leaves: the same rows byte for byte, weights to the last bit, no other file. A service is started
again on its port, and every answer that a client gets must be the right one. The processes are forked where torch is
imported already, so that kills fall into kedge's own work. `--seed` and `--episode` repeat an episode. Linux only.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import runpy
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import kedge
from common import free_port, noise, png, save
from kedge.io import artifact
from kedge.scoring import FORMATS
from kedge.studies.bench import detector_of

ROOT = str(Path(kedge.__file__).parent)
FORKED = multiprocessing.get_context("forkserver")
LONGEST = 600  # seconds after which a process is given up
MOST_KILLS = 4
SIDE = 16  # of images
VARYING = ("seconds", "history", "made with")  # what a record says of the run and not of its result
WORK = ("score-parquet", "score-csv", "score-jsonl", "train", "serve", "score-ray")


# --- the process that is killed ---------------------------------------------------------------------------------------


def command(arguments: list[str], folder: str, kill: tuple[str, int, int] | None, record: str | None) -> None:
    """Run `kedge` with these arguments; die at the so-manieth passage of a line, or write down all lines passed."""
    os.chdir(folder)
    os.environ |= {"TMPDIR": f"{folder}/tmp", "COLUMNS": "160"}
    tempfile.tempdir = None
    log = os.open("../log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    passed: Counter[tuple[str, int]] = Counter()
    due = (kill[0], kill[1]) if kill is not None else None

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            if record is not None or place == due:
                passed[place] += 1
                if kill is not None and passed[place] == kill[2]:
                    os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(ROOT) else None

    if record is not None or kill is not None:
        threading.settrace(call)
        sys.settrace(call)
    sys.argv = ["kedge", *arguments]
    try:
        runpy.run_module("kedge", run_name="__main__")
    finally:
        sys.settrace(None)
        if record is not None:
            Path(record).write_text(json.dumps([[*place, count] for place, count in passed.items()]))


def start(arguments: list[str], folder: Path, kill: Any = None, record: Path | None = None) -> Any:
    """Start the command in another process."""
    (folder / "tmp").mkdir(exist_ok=True)
    process = FORKED.Process(target=command, args=(arguments, str(folder), kill, record and str(record)))
    process.start()
    return process


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and that those started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


# --- the work ---------------------------------------------------------------------------------------------------------


def images_in(folder: Path, count: int) -> None:
    """Images of noise, one of them broken."""
    folder.mkdir()
    for number in range(count):
        noise(number, SIDE, SIDE).save(folder / f"{number:04}.png")
    (folder / "0007-broken.png").write_bytes(b"broken")


class Work:
    """One command: its arguments, and what must be equal however often it was killed."""

    def __init__(self, name: str, home: Path, arguments: list[str]) -> None:
        self.name, self.home, self.arguments = name, home, arguments
        self.reference: Any = None
        self.lines: list[tuple[str, int, int]] = []
        self.seconds = 0.0

    def measure(self) -> None:
        """Run it once to its end for the result, once for the lines that it passes, once for its time."""
        for number, record in enumerate((None, self.home / f"{self.name}.lines", None)):
            folder = self.home / f"{self.name}-{number}" / "work"
            folder.mkdir(parents=True)
            began = time.monotonic()
            code = self.run(folder, None, record)
            self.seconds = time.monotonic() - began
            if code != 0:
                raise SystemExit(f"kedge {' '.join(self.arguments)} ended with {code}: see {folder.parent}/log")
            if record is not None:
                self.lines = [tuple(line) for line in json.loads(record.read_text())]
            result = self.result(folder)
            if self.reference is not None and result != self.reference:
                raise SystemExit(f"two runs of kedge {' '.join(self.arguments)} differ; nothing can be compared")
            self.reference = result
            shutil.rmtree(folder.parent)

    def run(self, folder: Path, kill: Any, record: Path | None) -> int:
        """Run the command to its end, or to a kill; return the exit code, -9 for a kill."""
        at_line = kill if isinstance(kill, tuple) else None
        process = start(self.arguments, folder, at_line, record)
        if isinstance(kill, float):
            process.join(kill)
            self.kill(process)
        process.join(LONGEST)
        if process.exitcode is None:
            process.kill()
            raise SystemExit(f"kedge {' '.join(self.arguments)} hung for {LONGEST} seconds")
        return int(process.exitcode)

    def kill(self, process: Any) -> None:
        """Kill at a moment."""
        process.kill()

    def result(self, folder: Path) -> dict[str, Any]:
        """Every file by its name with what it holds."""
        files = sorted(path for path in folder.rglob("*") if not path.is_dir() or not any(path.iterdir()))
        return {str(path.relative_to(folder)): self.content(path) for path in files if path.name != "tmp"}

    def content(self, path: Path) -> Any:
        """What a file must hold again."""
        if path.suffix == ".html" or path.is_dir():
            return "present"
        if path.suffix in (".kedge", ".ckpt"):
            header, tensors = artifact.read(path)
            return _settled(header), {name: _digest(value.numpy().tobytes()) for name, value in tensors.items()}
        if path.suffix in (".json", ".jsonl") and "rows" not in path.name:
            return (
                [_settled(json.loads(line)) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else 0
            )
        return _digest(path.read_bytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _settled(value: Any) -> Any:
    """Nested data without times."""
    if isinstance(value, dict):
        return {key: _settled(entry) for key, entry in value.items() if key not in VARYING}
    return [_settled(entry) for entry in value] if isinstance(value, list) else value


class Ray(Work):
    """Scoring on Ray, whose workers may be killed instead of the command."""

    def __init__(self, home: Path, arguments: list[str], rng: random.Random) -> None:
        super().__init__("score-ray", home, arguments)
        self.rng = rng

    def run(self, folder: Path, kill: Any, record: Path | None) -> int:
        """Also end the cluster of a command that was killed."""
        process_ids: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.3):
                process_ids[:] = sorted({*process_ids, *descendants(os.getpid())})

        before = set(descendants(os.getpid()))
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            return super().run(folder, kill, record)
        finally:
            done.set()
            watcher.join()
            until = time.monotonic() + self.rng.choice([0.5, 20])  # the next one may begin at once
            cluster = [pid for pid in process_ids if pid not in before]
            while any(_is_ray(pid) for pid in cluster) and time.monotonic() < until:
                time.sleep(0.2)
            for pid in cluster:
                if _is_ray(pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    def kill(self, process: Any) -> None:
        """Kill a worker or the command."""
        workers = [pid for pid in descendants(process.pid) if "ray::" in _command_of(pid)]
        if workers and self.rng.random() < 0.5:
            with contextlib.suppress(OSError):
                os.kill(self.rng.choice(workers), signal.SIGKILL)
        else:
            process.kill()


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _is_ray(pid: int) -> bool:
    return "ray" in _command_of(pid)


class Serve(Work):
    """A service and a client, which asks for the whole time and checks every answer."""

    def __init__(self, home: Path, detector: Path) -> None:
        self.port = free_port()
        super().__init__("serve", home, ["serve", str(detector), "--port", str(self.port)])
        drawn = [noise(number, SIDE, SIDE) for number in range(20)]
        scores = kedge.load(detector)(drawn).score.tolist()
        self.images = list(zip(map(png, drawn), scores, strict=True))
        self.answers = self.unanswered = 0
        self.wrong: list[str] = []

    def run(self, folder: Path, kill: Any, record: Path | None) -> int:
        """Ask until the service is killed, or until each image was answered; then stop it."""
        process = start(self.arguments, folder, kill if isinstance(kill, tuple) else None, record)
        due = time.monotonic() + kill if isinstance(kill, float) else None
        until, answered = time.monotonic() + LONGEST, 0
        while process.is_alive() and time.monotonic() < until:
            if due is not None and time.monotonic() > due:
                process.kill()
            elif answered < len(self.images):
                answered += self._ask(answered)
            else:
                os.kill(process.pid, signal.SIGTERM)
                process.join(60)
        process.join(60)
        return -signal.SIGKILL if process.exitcode is None else int(process.exitcode)

    def _ask(self, number: int) -> bool:
        data, expected = self.images[number]
        address = f"http://127.0.0.1:{self.port}/v1/score"
        request = urllib.request.Request(address, data, {"Content-Type": "image/png"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                score = json.load(answer)["results"][0]["score"]
        except (OSError, ValueError, EOFError):  # it is not there yet, or no longer
            self.unanswered += 1
            time.sleep(0.05)
            return False
        self.answers += 1
        if abs(score - expected) > 1e-4 * max(1.0, abs(expected)):
            self.wrong.append(f"image {number} has {score} and should have {expected}")
        return True

    def result(self, folder: Path) -> dict[str, Any]:
        """Stray files, and wrong answers."""
        return super().result(folder) | {"wrong answers": list(self.wrong)}


def works(home: Path, names: list[str], rng: random.Random) -> list[Work]:
    """The commands, on a small detector, images and a data set made here."""
    detector, images = home / "detector.kedge", home / "images"
    detector_of("compact", side=SIDE, width=4).save(detector)
    images_in(images, 150)
    x = np.stack([np.asarray(noise(number, 8, 8)) for number in range(96)])
    np.savez(home / "set.npz", x=x, y=np.arange(96) % 3)
    score = ["score", "--detector", str(detector), str(images), "--shard", "16", "-o"]
    train = ["train", f"npz:{home / 'set.npz'}", "--epochs", "4", "--batch", "16", "--out", "run"]
    every: dict[str, Callable[[], Work]] = {
        **{f"score-{kind}": partial(Work, f"score-{kind}", home, [*score, f"rows.{kind}"]) for kind in FORMATS},
        "train": lambda: Work("train", home, train),
        "serve": lambda: Serve(home, detector),
        "score-ray": lambda: Ray(home, [*score, "rows.parquet", "--engine", "ray", "--parallel", "2"], rng),
    }
    return [every[name]() for name in names]


# --- episodes ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the episodes of one command."""

    episodes: int = 0
    at_lines: int = 0
    at_moments: int = 0
    resumed: int = 0
    places: set[tuple[str, int]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def draw(work: Work, rng: random.Random) -> Any:
    """A line with the number of its passage, or a moment."""
    kind = rng.random()
    if kind < 0.25:
        return rng.uniform(0, work.seconds)
    weights = None if kind < 0.75 else [count for _, _, count in work.lines]
    file, line, count = rng.choices(work.lines, weights)[0]
    return file, line, rng.randint(1, count)


def episode(work: Work, rng: random.Random, tally: Tally, name: str) -> None:
    """Kill one command a few times, let it end, compare."""
    folder = work.home / "episode" / "work"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    history, code = [], -signal.SIGKILL
    for _ in range(rng.randint(1, MOST_KILLS)):
        kill = draw(work, rng)
        history.append(f"{kill:.2f} s" if isinstance(kill, float) else f"{Path(kill[0]).relative_to(ROOT)}:{kill[1]}")
        code = work.run(folder, kill, None)
        if code != -signal.SIGKILL:
            break  # it ended before that line, or with an error
        tally.at_moments += isinstance(kill, float)
        tally.at_lines += not isinstance(kill, float)
        if not isinstance(kill, float):
            tally.places.add(kill[:2])
        tally.resumed += 1
    if code == -signal.SIGKILL:
        code = work.run(folder, None, None)
    tally.episodes += 1
    if code != 0:
        log = (folder.parent / "log").read_text(errors="replace").strip()[-1500:]
        problem = f"the command ended with {code}:\n{log}"
    else:
        result = work.result(folder)
        different = [key for key in work.reference.keys() | result.keys() if work.reference.get(key) != result.get(key)]
        problem = f"different, missing or left over: {', '.join(sorted(different))}" if different else ""
    if problem:
        tally.problems.append(problem)
        print(f"PROBLEM in {name}, killed at {', '.join(history)}: {problem}", flush=True)


def main() -> None:
    """Run episodes for some time, and print a table for docs/reliability.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--seed", type=int, default=None, help="by default a fresh one")
    parser.add_argument("--episode", type=int, default=None, help="run this one alone")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    if "score-ray" in options.work and find_spec("ray") is None:
        options.work.remove("score-ray")
        print("Ray is not installed: pip install 'kedge[ray]'", file=sys.stderr)
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    FORKED.set_forkserver_preload(
        ["kedge.cli", "kedge.detectors", "kornia.augmentation", "torch._dynamo", "pyarrow.parquet"]
    )
    with tempfile.TemporaryDirectory(prefix="kc-") as temporary:
        os.environ["RAY_TMPDIR"] = f"{temporary}/r"
        Path(temporary, "r").mkdir()
        rng = random.Random(seed)
        chosen = works(Path(temporary), options.work, rng)
        for work in chosen:
            work.measure()
            print(f"{work.name}: {len(work.lines)} lines of kedge, {work.seconds:.1f} s", file=sys.stderr, flush=True)
        tallies = {work.name: Tally() for work in chosen}
        spent, until = dict.fromkeys(chosen, 0.0), time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            work, began = min(chosen, key=lambda each: spent[each]), time.monotonic()  # each gets as much time
            number = tallies[work.name].episodes if options.episode is None else options.episode
            rng.seed(f"{seed} {work.name} {number}")
            episode(work, rng, tallies[work.name], f"--work {work.name} --seed {seed} --episode {number}")
            spent[work] += time.monotonic() - began
            if options.episode is not None:
                break
    print(*table(tallies), sep="\n")
    kills = sum(tally.at_lines + tally.at_moments for tally in tallies.values())
    problems = sum(len(tally.problems) for tally in tallies.values())
    print(f"\n{kills} kills in {options.minutes:g} minutes, seed {seed}: {problems} problems")
    if options.json:
        rows = {name: {**vars(tally), "places": sorted(tally.places)} for name, tally in tallies.items()}
        save(options.json, {"seed": seed, "minutes": options.minutes, **rows})
    sys.exit(problems > 0)


def table(tallies: dict[str, Tally]) -> list[str]:
    """Markdown."""
    rows = [
        "| command | episodes | kills at a line | distinct lines | kills at a moment | resumed | problems |",
        "|---" * 7 + "|",
    ]
    for name, tally in tallies.items():
        numbers = [
            tally.episodes,
            tally.at_lines,
            len(tally.places),
            tally.at_moments,
            tally.resumed,
            len(tally.problems),
        ]
        rows.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return rows


if __name__ == "__main__":
    main()
