"""What the benchmarks share: the file of a result, files of random pixels, a free port, and processor time."""

import io
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kedge.files import write_text
from kedge.provenance import provenance


def save(path: str | Path | None, result: dict[str, Any]) -> None:
    """Write a result, with what it was made with, if there is a file to write."""
    if path is not None:
        write_text(path, json.dumps({"made with": provenance(), **result}, indent=1, default=str) + "\n")


def noise(seed: int, height: int, width: int) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    """An image as the bytes of a file."""
    target = io.BytesIO()
    image.save(target, "png")
    return target.getvalue()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def processor_seconds(work: Callable[[], Any]) -> float:
    """The seconds of the processor, in all threads of this process, that a call takes."""
    started = time.process_time()
    work()
    return time.process_time() - started


def resident(pid: int) -> int:
    """Bytes of a process in main memory, on Linux."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
