"""Hold several times the capacity of `kedge serve`, with hostile clients among the others, and watch the service.

    python benchmarks/load.py [--minutes 5] [--times 4] [--detector cifar10] [--option=--max-queue=512] [--json PATH]
    python benchmarks/load.py --minutes 20 --times 2 --detector birds.kedge --photos DATA/photos [--side 500]

First the capacity: images that 32 clients, one request each at a time, get answered a second. Then requests arrive at
random moments at so many times that rate, each on a connection of its own: images (PNG of random pixels in the
network's size, or with --photos JPEG of photographs, --side pixels on the longer side), forms of eight, files that are
no images, tiny JPEGs that declare 7000 x 7000 pixels, bodies that trickle in, clients that ask and never read, and
connections that send nothing; the last three stay for a while. One more client asks for /healthz ten times a second.
Every score is compared with the detector's own. Printed are tables for docs/reliability.md; the exit code is 1 after a
5xx other than 503, a wrong score, a /healthz that fails, or memory or file descriptors that grow. Linux only.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import kedge
from common import free_port, noise, resident, save
from scoring import make_images

MIX = {"image": 0.76, "form": 0.02, "no image": 0.1, "huge": 0.04, "trickle": 0.03, "deaf": 0.02, "idle": 0.03}
STAY = 20.0  # seconds that the last three of them stay
CLIENTS = 32  # for the capacity
IMAGES = 64  # different ones
MOST = 6000  # requests in progress; further ones are counted and not sent
PATIENCE = 60.0  # seconds until a client gives up


@dataclass
class Counts:
    """What clients saw, in all or in one interval."""

    status: Counter[str] = field(default_factory=Counter)
    accepted: list[float] = field(default_factory=list)  # seconds of each
    health: list[float] = field(default_factory=list)
    wrong: int = 0
    unsent: int = 0
    offered: int = 0

    def add(self, other: "Counts") -> None:
        """Add what another one counted."""
        self.status += other.status
        self.accepted += other.accepted
        self.health += other.health
        self.wrong += other.wrong
        self.unsent += other.unsent
        self.offered += other.offered


class Clients:
    """All clients of one service."""

    def __init__(self, port: int, images: list[tuple[bytes, float]]) -> None:
        self.port, self.images, self.counts, self.rng = port, images, Counts(), random.Random(0)
        self.huge = huge_jpeg()
        self.running: set[asyncio.Task[None]] = set()

    def request(self, body: bytes, kind: str = "image/png", path: str = "/v1/score", method: str = "POST") -> bytes:
        """The bytes of a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Connection: close\r\n\r\n".encode() + body

    async def ask(self, request: bytes) -> tuple[str, Any, float]:
        """Status, content and seconds of an answer on a connection of its own; ``lost`` if there is none."""
        began, writer = time.perf_counter(), None
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(request)
                await writer.drain()
                answer = await reader.read()
        except TimeoutError:
            return "no answer", None, time.perf_counter() - began
        except OSError:
            return "lost", None, time.perf_counter() - began
        finally:
            if writer is not None:
                writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        status = head[9:12].decode("latin-1") or "lost"
        try:
            return status, json.loads(content), time.perf_counter() - began
        except ValueError:
            return status, None, time.perf_counter() - began

    async def score(self, count: int = 1) -> None:
        """Send good images, one by itself or several as a form, and compare the answers."""
        chosen = self.rng.choices(self.images, k=count)
        if count == 1:
            request = self.request(chosen[0][0])
        else:
            head = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
            body = b"".join(head + data + b"\r\n" for data, _ in chosen) + b"--x--\r\n"
            request = self.request(body, "multipart/form-data; boundary=x")
        status, content, seconds = await self.ask(request)
        self.counts.status[status] += 1
        if status == "200":
            self.counts.accepted.append(seconds)
            scores = [row["score"] for row in content["results"]]
            near = [abs(a - b) <= 1e-3 * max(1.0, abs(b)) for a, (_, b) in zip(scores, chosen, strict=True)]
            self.counts.wrong += not all(near)

    async def refused(self, data: bytes) -> None:
        """Send what is no good image; whatever is answered is counted."""
        status, _, _ = await self.ask(self.request(data, "image/jpeg"))
        self.counts.status[status] += 1

    async def stay(self, first: bytes, drops: bytes = b"") -> None:
        """Connect, send something, and neither read nor leave."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        except OSError:
            self.counts.status["lost"] += 1
            return
        with contextlib.suppress(OSError):
            writer.write(first)
            for _ in range(int(STAY)):
                await asyncio.sleep(1)
                writer.write(drops)
                if writer.is_closing() or reader.at_eof():
                    break
        writer.transport.abort()

    def arrive(self) -> None:
        """Start one client of the mix."""
        self.counts.offered += 1
        if len(self.running) >= MOST:
            self.counts.unsent += 1
            return
        kind = self.rng.choices(list(MIX), list(MIX.values()))[0]
        unread = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 200
        task = {
            "image": self.score,
            "form": lambda: self.score(8),
            "no image": lambda: self.refused(self.rng.randbytes(3000)),
            "huge": lambda: self.refused(self.huge),
            "trickle": lambda: self.stay(self.request(bytes(1000))[:-900], b"x"),
            "deaf": lambda: self.stay(unread),
            "idle": lambda: self.stay(b""),
        }[kind]()
        running = asyncio.create_task(task)
        self.running.add(running)
        running.add_done_callback(self.running.discard)

    async def health(self) -> None:
        """Ask for /healthz ten times a second."""
        request = self.request(b"", path="/healthz", method="GET")
        while True:
            status, _, seconds = await self.ask(request)
            self.counts.health.append(seconds)
            if status != "200":
                self.counts.status[f"/healthz {status}"] += 1
            await asyncio.sleep(0.1)

    async def capacity(self, seconds: float) -> float:
        """Images answered a second, one at a time by each of a few clients."""
        self.counts, until = Counts(), time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < until:
                await self.score()

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return len(self.counts.accepted) / (time.perf_counter() - began)


def huge_jpeg() -> bytes:
    """A small file that declares 7000 x 7000 pixels."""
    target = io.BytesIO()
    Image.new("RGB", (64, 64), "gray").save(target, "jpeg")
    data = bytearray(target.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = (7000).to_bytes(2, "big") * 2
    return bytes(data)


def scored_images(detector: kedge.Detector, photos: Path | None, side: int) -> list[tuple[bytes, float]]:
    """Files of different images, and the detector's own scores of them."""
    assert detector.preprocess is not None
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "images")
        if photos is not None:
            make_images(folder, IMAGES, side, photos)
        else:
            folder.mkdir()
            for number in range(IMAGES):
                noise(number, *detector.preprocess.shape[1:]).save(folder / f"{number}.png")
        files = sorted(folder.iterdir())
        return list(zip([file.read_bytes() for file in files], detector(files).score.tolist(), strict=True))


def memory_of(pid: int) -> tuple[float, int]:
    """Resident megabytes and open file descriptors of a process."""
    return resident(pid) / 1e6, len(os.listdir(f"/proc/{pid}/fd"))


async def load(clients: Clients, pid: int, log: Path, times: float, seconds: float) -> dict[str, Any]:
    """Measure the capacity, hold a multiple of it, and see whether the service recovers."""
    await clients.capacity(2)  # warms up
    capacity = await clients.capacity(min(10.0, seconds / 4))
    rest = memory_of(pid)
    rate, whole, rows, parts = times * capacity, Counts(), [], 12
    health = asyncio.create_task(clients.health())
    clients.counts, began = Counts(), time.perf_counter()
    due, sampled = began, began
    while (now := time.perf_counter()) < began + seconds:
        while due < now:  # arrivals that are late because this process was busy all come now
            clients.arrive()
            due += clients.rng.expovariate(rate)
        if now - sampled > seconds / parts:
            rows.append(interval(clients.counts, now - sampled, now - began, memory_of(pid)))
            whole.add(clients.counts)
            clients.counts, sampled = Counts(), now
        await asyncio.sleep(0.002)
    held = time.perf_counter() - began
    whole.add(clients.counts)
    clients.counts = Counts()
    while clients.running:
        await asyncio.sleep(0.1)
    health.cancel()
    whole.add(clients.counts)
    drained = time.perf_counter()
    while memory_of(pid)[1] > rest[1] + 3 and time.perf_counter() < drained + 60:
        await asyncio.sleep(0.2)
    after = memory_of(pid)
    again = await clients.capacity(min(5.0, seconds / 4))
    return {
        "capacity": capacity, "times": times, "seconds": held, "capacity afterwards": again, "offered": whole.offered,
        "not sent": whole.unsent, "accepted a second": len(whole.accepted) / held, "status": dict(whole.status),
        "wrong scores": whole.wrong, "accepted p50, p99": quantiles(whole.accepted),
        "healthz p50, p99": quantiles(whole.health), "healthz asked": len(whole.health), "at rest": rest,
        "after": after, "log bytes": log.stat().st_size, "intervals": rows,
    }  # fmt: skip


def quantiles(seconds: list[float]) -> list[float]:
    """Median and 99th percentile."""
    return [float(q) for q in np.quantile(seconds, [0.5, 0.99])] if seconds else [float("nan")] * 2


def interval(counts: Counts, seconds: float, since: float, memory: tuple[float, int]) -> dict[str, Any]:
    """What happened since the last one."""
    p50, p99 = quantiles(counts.accepted)
    return {
        "at": since, "offered": counts.offered / seconds, "accepted": len(counts.accepted) / seconds,
        "503": counts.status["503"] / seconds, "p50": p50, "p99": p99, "healthz p99": quantiles(counts.health)[1],
        "memory": memory[0], "descriptors": memory[1],
    }  # fmt: skip


def problems(result: dict[str, Any]) -> list[str]:
    """What must not happen."""
    status = result["status"]
    found = [f"{count} answers {code}" for code, count in status.items() if code[0] == "5" and code != "503"]
    found += [f"{count} x {code}" for code, count in status.items() if code.startswith("/healthz")]
    if result["wrong scores"]:
        found.append(f"{result['wrong scores']} wrong scores")
    rows = result["intervals"]
    for name, slack in (("memory", 50), ("descriptors", 100)):
        early, late = (float(np.median([row[name] for row in part])) for part in (rows[2 : len(rows) // 2], rows[-3:]))
        if late > 1.2 * early + slack:
            found.append(f"{name} grew from {early:.0f} to {late:.0f}")
    if result["after"][1] > result["at rest"][1] + 3:
        found.append(f"{result['after'][1]} descriptors are open afterwards; {result['at rest'][1]} were before")
    if result["log bytes"] > 1_000_000:
        found.append(f"{result['log bytes']:,} bytes of log")
    if result["capacity afterwards"] < result["capacity"] / 2:
        found.append(f"{result['capacity afterwards']:.0f} images a second afterwards; {result['capacity']:.0f} before")
    return found


def table(result: dict[str, Any]) -> list[str]:
    """Markdown."""
    status, seconds = result["status"], result["seconds"]
    other = sum(count for code, count in status.items() if code[0] == "5" and code != "503")
    unhealthy = sum(count for code, count in status.items() if code.startswith("/healthz"))
    (p50, p99), (h50, h99) = result["accepted p50, p99"], result["healthz p50, p99"]
    held = (
        f"{result['times']:g} x for {seconds:.0f} s: {result['offered']:,} requests ({result['not sent']:,} not sent)"
    )
    failed = f"{unhealthy} of {result['healthz asked']:,} failed"
    rows = [
        ("capacity", f"{result['capacity']:.0f} images/s; afterwards {result['capacity afterwards']:.0f}"),
        ("held", held),
        ("accepted", f"{result['accepted a second']:.0f} requests/s, p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms"),
        ("refused with 503", f"{status.get('503', 0):,}"),
        ("other 5xx, wrong scores", f"{other}, {result['wrong scores']}"),
        ("/healthz", f"p50 {1000 * h50:.0f} ms, p99 {1000 * h99:.0f} ms, {failed}"),
        ("memory", f"{result['at rest'][0]:.0f} MB at rest, {result['after'][0]:.0f} MB afterwards"),
        ("file descriptors", f"{result['at rest'][1]} at rest, {result['after'][1]} afterwards"),
        ("log", f"{result['log bytes']:,} bytes"),
    ]  # fmt: skip
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += [
        "| s | offered/s | accepted/s | 503/s | p50 ms | p99 ms | /healthz p99 ms | MB | descriptors |",
        "|---" * 9 + "|",
    ]
    for row in result["intervals"]:
        rates = " | ".join(f"{row[name]:.0f}" for name in ("at", "offered", "accepted", "503"))
        times = " | ".join(f"{1000 * row[name]:.0f}" for name in ("p50", "p99", "healthz p99"))
        lines.append(f"| {rates} | {times} | {row['memory']:.0f} | {row['descriptors']} |")
    return lines


def main() -> None:
    """Run the load test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--times", type=float, default=4.0, help="the capacity")
    parser.add_argument("--detector", default="cifar10")
    parser.add_argument("--option", action="append", default=[], help="for kedge serve, as --option=--max-queue=64")
    parser.add_argument("--photos", type=Path, default=None, help="a folder with photographs, *.jpg")
    parser.add_argument("--side", type=int, default=500, help="the longer side of the photographs")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    images = scored_images(kedge.load(options.detector), options.photos, options.side)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as stream:
            command = [sys.executable, "-m", "kedge", "serve", options.detector, "--port", str(port), *options.option]
            service = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            while b"serving" not in log.read_bytes():
                if service.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {service.returncode}:\n{log.read_text()}")
                time.sleep(0.1)
            time.sleep(1)
            clients = Clients(port, images)
            result = asyncio.run(load(clients, service.pid, log, options.times, 60 * options.minutes))
            if service.poll() is not None:
                raise SystemExit(f"the service ended with {service.returncode}:\n{log.read_text()[-3000:]}")
        finally:
            service.terminate()
            service.wait(60)
    print(*table(result), sep="\n")
    found = problems(result)
    print(
        f"\nstatus: {dict(sorted(result['status'].items()))}", *(f"PROBLEM: {problem}" for problem in found), sep="\n"
    )
    save(options.json, {**result, "problems": found})
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
