"""What `kedge serve` gives of what the detector alone can do.

    python benchmarks/serving.py [--clients 1 8 32] [--seconds 10] [--detector FILE] [--width 16] [--json PATH]
    python benchmarks/serving.py --detector birds.kedge --photos DATA/photos --side 500 --clients 32

At each level so many clients keep a connection each and send one image after the other, as bytes. The service, the
clients and the bare engine are processes of their own. The engine scores the same images, decoded beforehand, in
batches of the size that the service had: once as a script would, one batch after the other, and once in pairs, two
batches at a time with half of the threads each, as the service does; and once in pairs that decode their images too, as
a script without a server would. They take turns with the service, a second each, so that whatever else the machine does
falls on all alike. Printed are images a second, their ratio, latencies, the memory of the service at the first and the
last turn, and the processor seconds that an image costs service, clients and engine. The images are PNG of random
pixels in the network's size, or with --photos JPEG of photographs enlarged to --side pixels. Linux only: it reads
/proc.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kedge
from common import free_port, noise, png, resident, save
from kedge.detectors import for_inference, thread_copies
from kedge.serving.bodies import decode
from kedge.serving.settings import Settings
from kedge.studies.bench import detector_of
from scoring import make_images

TURN = 1.0  # seconds of the service, then of the engine
IMAGES = 256  # different ones, sent in turn
BARE = ("engine", "in pairs", "decoding in pairs")  # what the service is compared with


class Client(asyncio.Protocol):
    """One connection that sends a request as soon as it has the answer to the last."""

    def __init__(self, requests: list[bytes], first: int, until: float, times: list[float], done: Any) -> None:
        self.requests, self.next, self.until, self.times, self.done = requests, first, until, times, done
        self.errors = 0
        self.heard = bytearray()

    def connection_made(self, transport: Any) -> None:
        """Send the first."""
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.heard.clear()
        self.started = time.perf_counter()
        self.transport.write(self.requests[self.next % len(self.requests)])
        self.next += 1

    def data_received(self, data: bytes) -> None:
        """Wait for a whole answer, then send the next."""
        self.heard += data
        head = self.heard.find(b"\r\n\r\n")
        if head < 0:
            return
        lengths = [line for line in self.heard[:head].lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(self.heard) < head + 4 + int(lengths[0].partition(b":")[2]):
            return
        now = time.perf_counter()
        self.times.append(now - self.started)
        self.errors += not self.heard.startswith(b"HTTP/1.1 200")
        if now < self.until:
            self._send()
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Be done."""
        self.errors += error is not None
        if not self.done.done():
            self.done.set_result(self.errors)


def clients(pipe: Connection, port: int, files: list[bytes]) -> None:
    """A process: told (clients, seconds), it answers with latencies, errors and its processor seconds."""
    head = "POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: image/*\r\nContent-Length: {}\r\n\r\n"
    requests = [head.format(len(data)).encode() + data for data in files]

    async def load(count: int, seconds: float) -> tuple[list[float], int]:
        loop, times = asyncio.get_running_loop(), []
        until = time.perf_counter() + seconds
        done = [loop.create_future() for _ in range(count)]
        for number, future in enumerate(done):
            made = Client(requests, number * len(requests) // count, until, times, future)
            await loop.create_connection(lambda made=made: made, "127.0.0.1", port)
        return times, sum(await asyncio.gather(*done))

    while (task := pipe.recv()) is not None:
        before, started = time.process_time(), time.perf_counter()
        times, errors = asyncio.run(load(*task))
        pipe.send((times, errors, time.perf_counter() - started, time.process_time() - before))


def engine(pipe: Connection, path: str, files: list[bytes]) -> None:
    """A process: told (how, batch, seconds), it answers with images, seconds and processor seconds."""
    detector, threads = for_inference(kedge.load(path)), torch.get_num_threads()  # as the service does
    assert detector.preprocess is not None
    rule = detector.preprocess
    tensors = [decode(data, 0, rule, Settings().max_pixels) for data in files]
    pair = thread_copies(detector, min(2, threads))
    ways = {"engine": [detector], "in pairs": pair, "decoding in pairs": pair}

    def work(one: kedge.Detector, how: str, share: int, batch: int, until: float) -> int:
        torch.set_num_threads(share)
        images = 0
        while time.perf_counter() < until:
            places = [(images + k) % len(files) for k in range(batch)]
            if how == "decoding in pairs":
                read = [decode(files[place], 0, rule, Settings().max_pixels) for place in places]
            else:
                read = [tensors[place] for place in places]
            one(torch.stack(read), batch_size=batch)
            images += batch
        return images

    with ThreadPoolExecutor(2) as pool:
        while (task := pipe.recv()) is not None:
            how, batch, seconds = task
            before, started = time.process_time(), time.perf_counter()
            share, until = threads // len(ways[how]), started + seconds
            images = sum(pool.map(lambda one, h=how, s=share, b=batch, u=until: work(one, h, s, b, u), ways[how]))
            pipe.send((images, time.perf_counter() - started, time.process_time() - before))


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Any]:
    """Start a process; gives a function that tells it a task and returns its answer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    started.start()

    def call(*task: Any) -> Any:
        ours.send(task)
        return ours.recv()

    try:
        yield call
    finally:
        ours.send(None)
        started.join(10)


@contextmanager
def service(path: str, options: list[str]) -> Iterator[tuple[int, int]]:
    """Start `kedge serve`; gives its port and the number of its process."""
    port = free_port()
    command = [sys.executable, "-m", "kedge", "serve", path, "--port", str(port), *options]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            if running.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {running.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield port, running.pid
    finally:
        running.terminate()
        running.wait(60)


def seconds_of(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def batches_so_far(port: int) -> tuple[float, float]:
    """Images and batches that the service has scored."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = {
        name: float(value)
        for name, _, value in (line.partition(" ") for line in lines)
        if "#" not in name and "{" not in name
    }
    return found["kedge_batch_images_sum"], found["kedge_batch_images_count"]


def measure(count: int, seconds: float, port: int, pid: int, load: Any, bare: Any) -> dict[str, Any]:
    """One level: service and engine in turn."""
    turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ("service", *BARE)}
    memory = []
    times, errors, client, batch = [], 0, 0.0, min(count, Settings().max_batch)
    load(count, 0.2)  # warms up
    bare("engine", batch, 0.2)
    images, number = batches_so_far(port)
    for _ in range(max(1, round(seconds / TURN))):
        before = seconds_of(pid)
        latencies, wrong, took, own = load(count, TURN)
        turns["service"].append((len(latencies), took, seconds_of(pid) - before))
        times, errors, client = times + latencies, errors + wrong, client + own
        memory.append(resident(pid))
        now, then = batches_so_far(port)
        batch = max(1, round((now - images) / max(1, then - number)))
        for how in BARE:
            turns[how].append(bare(how, batch, TURN / 2))
    rates = {name: [done / took for done, took, _ in turn] for name, turn in turns.items()}
    cost = {name: sum(cpu for _, _, cpu in turn) / sum(done for done, _, _ in turn) for name, turn in turns.items()}
    p50, p99 = np.quantile(times, [0.5, 0.99])
    return {
        "clients": count,
        "batch": batch,
        "images": len(times),
        "errors": errors,
        **{name: statistics.median(rate) for name, rate in rates.items()},
        **{
            f"service / {name}": statistics.median(s / e for s, e in zip(rates["service"], rates[name], strict=True))
            for name in BARE
        },
        "memory": [memory[0], memory[-1]],
        "p50": float(p50),
        "p99": float(p99),
        "processor": cost | {"clients": client / len(times)},
    }


def made_files(shape: tuple[int, ...], photos: Path | None, side: int) -> list[bytes]:
    """PNG files of the size that the network takes, or JPEG files of photographs."""
    if photos is not None:
        with tempfile.TemporaryDirectory() as folder:
            make_images(Path(folder) / "images", IMAGES, side, photos)
            return [file.read_bytes() for file in sorted((Path(folder) / "images").iterdir())]
    return [png(noise(seed, *shape[1:])) for seed in range(IMAGES)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the service, at each level")
    parser.add_argument("--detector", default=None, help="a calibrated detector; by default one with random weights")
    parser.add_argument("--width", type=int, default=16, help="of that one's network")
    parser.add_argument("--size", type=int, default=32, help="of its images")
    parser.add_argument("--photos", type=Path, default=None, help="a folder of photographs, sent as JPEG")
    parser.add_argument("--side", type=int, default=500, help="of the photographs, in pixels")
    parser.add_argument("--option", action="append", default=[], help="for kedge serve, as --option=--max-delay=0.002")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.detector or f"{folder}/detector.kedge"
        if options.detector is None:
            detector_of("compact", side=options.size, width=options.width).save(path)
        rule = kedge.load(path).preprocess
        assert rule is not None
        files = made_files(rule.shape, options.photos, options.side)
        with (
            service(path, options.option) as (port, pid),
            process(clients, port, files) as load,
            process(engine, path, files) as bare,
        ):
            levels = [measure(count, options.seconds, port, pid, load, bare) for count in options.clients]
    for line in table(levels):
        print(line)
    save(options.json, {**vars(options), "levels": levels})


def table(levels: list[dict[str, Any]]) -> Iterator[str]:
    """Two tables as text."""
    yield "clients  batch  images/s   engine  of it   in pairs  of it  decoding  of it   p50 ms  p99 ms  errors  MB"
    for level in levels:
        pairs = "".join(f"{level[name]:10.0f} {level[f'service / {name}']:6.1%}" for name in BARE[1:])
        memory = " to ".join(f"{each / 1e6:.0f}" for each in level["memory"])
        yield (
            f"{level['clients']:7} {level['batch']:6} {level['service']:9.0f} {level['engine']:8.0f} "
            f"{level['service / engine']:6.1%} {pairs} {1000 * level['p50']:8.1f} {1000 * level['p99']:7.1f} "
            f"{level['errors']:7} {memory}"
        )
    yield ""
    yield "processor milliseconds an image:  service  clients  engine  in pairs"
    for level in levels:
        cost = {name: 1000 * seconds for name, seconds in level["processor"].items()}
        yield (
            f"{level['clients']:24} clients {cost['service']:8.2f} {cost['clients']:8.2f} {cost['engine']:7.2f} "
            f"{cost['in pairs']:9.2f}"
        )


if __name__ == "__main__":
    main()
