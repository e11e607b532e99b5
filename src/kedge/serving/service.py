"""A detector at work: decodes, batches and scores the images of many requests, within memory limits."""

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from fastapi import Request
from torch import Tensor

from kedge.detectors import Detector, for_inference, thread_copies
from kedge.detectors.detection import ROW
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.serving.batcher import Batcher, Busy
from kedge.serving.bodies import LARGE, Files, LargeError, Refused, body_of, decode, parser_of
from kedge.serving.explain import Explainer, Gallery, data_url
from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

LANES = 2  # batches at a time, each with half of the threads: faster than one batch with all threads
LIBC: Any = ctypes.CDLL(None) if os.name == "posix" else None
INLINE = 1 << 16  # bytes; parsing longer bodies would hold up all other requests
VALUES = ROW[1:]  # of a row, all but its name; null if it has an error


class Room:
    """A bounded amount that requests share."""

    def __init__(self, most: int, full: str) -> None:
        self.most, self.full, self.taken = most, full, 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes more, or raises `Busy` if there is no room; in the end all is given back."""
        own = 0

        def take(count: int) -> None:
            nonlocal own
            if self.taken + count > self.most:
                raise Busy(self.full)
            own += count
            self.taken += count

        try:
            yield take
        finally:
            self.taken -= own


class Service:
    """Scores the images of many requests with a calibrated detector."""

    def __init__(self, detector: Detector, settings: Settings, gallery: Gallery | None = None) -> None:
        if detector.preprocess is None or detector.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) before it is served")
        self.detector, self.settings = for_inference(detector), settings
        self.explainer = Explainer(self.detector, gallery)
        self.preprocess = detector.preprocess
        self.metrics = Metrics(detector.calibration.scores)
        # Bodies, images and large images have threads of their own, so that none waits for something that takes longer.
        self.parser, self.reader, self.large_reader = self._threads = [
            ThreadPoolExecutor(count, f"kedge-{name}")
            for name, count in (("parser", 1), ("reader", settings.readers), ("large-reader", 1))
        ]
        copies = thread_copies(self.detector, min(LANES, torch.get_num_threads()))
        self.batcher = Batcher(
            [partial(self._run, copy) for copy in copies],
            max_batch=settings.max_batch,
            max_delay=settings.max_delay,
            max_queue=settings.max_queue,
            prepare=partial(_share_threads, torch.get_num_threads(), len(copies)),
        )
        self.bytes = Room(settings.max_held, "the requests in progress fill the memory for them")
        self.places = Room(settings.max_queue, "the queue is full")  # for images being decoded or scored, or waiting

    async def stop(self) -> None:
        """Answer all accepted requests, and end."""
        await self.batcher.stop()
        for threads in self._threads:
            threads.shutdown()

    @property
    def ready(self) -> bool:
        """Whether there is room for a request, and it would be answered in time."""
        return self.places.taken < self.places.most and self.batcher.expected_wait < self.settings.timeout / 2

    async def score(self, request: Request) -> list[dict[str, Any]]:
        """One row per image, named by its place in the request.

        An image that cannot be read has an error in its row; one that is the whole body raises it.
        """
        async with self._images(request) as images:
            readable = [image for image in images if isinstance(image, Tensor)]
            rows = iter(await self.batcher.submit(readable) if readable else ())
        self.metrics.unreadable.inc(len(images) - len(readable))
        failed = dict.fromkeys(VALUES)
        return [
            (next(rows) if isinstance(image, Tensor) else failed)
            | {"name": f"images[{place}]", "error": None if isinstance(image, Tensor) else str(image)}
            for place, image in enumerate(images)
        ]

    async def explain(self, request: Request) -> dict[str, Any]:
        """The row of one image, and what `Explainer` adds."""
        async with self._images(request) as images:
            if len(images) != 1:
                raise Refused(422, f"a request must hold one image to explain; got {len(images)}")
            if isinstance(image := images[0], InputError):
                raise image
            (row,) = await self.batcher.submit([image])
            more = await self.batcher.between(self._explained, image)
        return {"result": row | {"name": "images[0]", "error": None}, **more, "image": data_url(image)}

    @contextlib.asynccontextmanager
    async def _images(self, request: Request) -> AsyncIterator[list[Tensor | InputError]]:
        """The images of a request, decoded, with places in the queue; capacity is checked before each costly step."""
        parse = parser_of(request.headers.get("content-type", ""), self.settings.max_images)
        with self.bytes.share() as hold, self.places.share() as take:
            self._require_ready()
            body = await body_of(request, self.settings, hold)
            self._require_ready()
            files: Files = [body]
            if parse is not None and len(body) <= INLINE:
                files = parse(body)
            elif parse is not None:
                files = await asyncio.get_running_loop().run_in_executor(self.parser, parse, body)
            del body
            if not files:
                raise InputError("images must hold at least one image; got none")
            take(len(files))
            images = await self._decode(files)
            if parse is None and isinstance(images[0], InputError):
                raise images[0]
            yield images

    def _require_ready(self) -> None:
        if not self.ready:
            raise Busy(self.places.full)

    async def _decode(self, files: Files) -> list[Tensor | InputError]:
        """Decode the images of one request, a few at a time, so that other requests have their turn."""
        images: dict[int, Tensor | InputError] = {}
        left, lock = self.settings.max_request_pixels, threading.Lock()

        def accept(at_once: int, pixels: int) -> None:
            nonlocal left
            with lock:
                if pixels > left:
                    most = self.settings.max_request_pixels
                    raise InputError(f"the images of a request must have at most {most:,} pixels together")
                if pixels > at_once:
                    raise LargeError
                left -= pixels

        async def decoded(file: bytes, place: int, large: bool = False) -> Tensor | InputError:
            threads, function = (self.large_reader, _decode_large) if large else (self.reader, decode)
            most = self.settings.max_pixels
            rest = (file, place, self.preprocess, most, partial(accept, most if large else LARGE))
            try:
                return await asyncio.get_running_loop().run_in_executor(threads, function, *rest)
            except LargeError:
                return await decoded(file, place, large=True)
            except InputError as error:
                return error

        waiting = iter(enumerate(files))

        async def some() -> None:
            for place, file in waiting:
                images[place] = file if isinstance(file, InputError) else await decoded(file, place)

        await asyncio.gather(*(some() for _ in range(self.settings.readers)))
        return [images[place] for place in range(len(files))]

    def _explained(self, image: Tensor) -> dict[str, Any]:
        with _as_own_failure():
            return self.explainer(image)

    def _run(self, detector: Detector, images: Tensor) -> list[dict[str, Any]]:
        with _as_own_failure():
            detection = detector(images, batch_size=len(images))
        self.metrics.scored(detection.score.tolist(), int(detection.is_ood.sum()))
        return detection.to_rows(detector.classes)


def _decode_large(*arguments: Any) -> Tensor:
    """Decode an image, and give the memory back: glibc would keep up to a few hundred MB of it for this thread."""
    try:
        return decode(*arguments)
    finally:
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)


def _share_threads(threads: int, lanes: int, number: int) -> None:
    """Give this thread its share of the compute threads; the first lanes get the remainder."""
    torch.set_num_threads(threads // lanes + (number < threads % lanes))


@contextlib.contextmanager
def _as_own_failure() -> Iterator[None]:
    """Report an error of the detector as the service's: the client's images were checked before."""
    try:
        yield
    except KedgeError as error:
        raise RuntimeError(f"the detector failed: {error}") from error
