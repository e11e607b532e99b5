"""A detector at work: decodes, batches and scores the images of many requests, within memory limits."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.detectors import Detector, for_inference, thread_copies
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.serving.batcher import Batcher, Busy
from kedge.serving.bodies import Refused, decode
from kedge.serving.explain import data_url, predictions_by_anchor
from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

LANES = 2  # batches at a time, each with half of the threads: faster than one batch with all threads


class Service:
    """Scores the images of many requests with a calibrated detector."""

    def __init__(self, detector: Detector, settings: Settings) -> None:
        if detector.preprocess is None or detector.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) before it is served")
        self.detector, self.settings = for_inference(detector), settings
        self.preprocess = detector.preprocess
        self.metrics = Metrics(detector.calibration.scores)
        self.readers = ThreadPoolExecutor(settings.readers, thread_name_prefix="kedge-reader")
        copies = thread_copies(self.detector, min(LANES, torch.get_num_threads()))
        self.batcher = Batcher(
            [partial(self._run, copy) for copy in copies],
            max_batch=settings.max_batch,
            max_delay=settings.max_delay,
            max_queue=settings.max_queue,
            prepare=partial(_share_threads, torch.get_num_threads(), len(copies)),
        )
        self.held = 0  # bytes of requests
        self.taken = 0  # images being decoded or scored, or waiting for it

    async def stop(self) -> None:
        """Answer all accepted requests, and end."""
        await self.batcher.stop()
        self.readers.shutdown()

    @property
    def ready(self) -> bool:
        """Whether there is room for a request."""
        return self.taken < self.settings.max_queue

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """Room for one request: yields a function that reserves more bytes for it, or raises `Busy`."""
        reserved = 0

        def take(count: int) -> None:
            nonlocal reserved
            if self.held + count > self.settings.max_held:
                raise Busy("the requests in progress fill the memory for them")
            reserved += count
            self.held += count

        try:
            yield take
        finally:
            self.held -= reserved

    async def score(self, files: Sequence[bytes]) -> list[dict[str, Any]]:
        """One row per image, named by its place in the request."""
        with self._places(files):
            rows = await self.batcher.submit(await self._decode(files))
        return [row | {"name": f"images[{place}]"} for place, row in enumerate(rows)]

    async def explain(self, file: bytes) -> dict[str, Any]:
        """The row of one image, and the prediction under each anchor."""
        with self._places([file]):
            (image,) = await self._decode([file])
            (row,) = await self.batcher.submit([image])
            by_anchor = await self.batcher.between(self._by_anchor, image)
        return {"result": row | {"name": "images[0]"}, "anchors": by_anchor, "image": data_url(image)}

    @contextlib.contextmanager
    def _places(self, files: Sequence[bytes]) -> Iterator[None]:
        """Places in the queue, reserved before decoding, so that no more images are decoded than may wait."""
        if not files:
            raise InputError("images must hold at least one image; got none")
        if len(files) > self.settings.max_images:
            raise Refused(413, f"images must be at most {self.settings.max_images}; got {len(files)}")
        if self.taken + len(files) > self.settings.max_queue:
            raise Busy("the queue is full")
        self.taken += len(files)
        try:
            yield
        finally:
            self.taken -= len(files)

    async def _decode(self, files: Sequence[bytes]) -> list[Tensor]:
        loop = asyncio.get_running_loop()
        tasks = [
            loop.run_in_executor(self.readers, decode, data, place, self.preprocess, self.settings.max_pixels)
            for place, data in enumerate(files)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # once one fails, the others are not needed
                task.cancel()

    def _by_anchor(self, image: Tensor) -> list[dict[str, Any]]:
        with _as_own_failure():
            return predictions_by_anchor(self.detector, image)

    def _run(self, detector: Detector, images: Tensor) -> list[dict[str, Any]]:
        with _as_own_failure():
            detection = detector(images, batch_size=len(images))
        self.metrics.scored(detection.score.tolist(), int(detection.is_ood.sum()))
        return detection.to_rows(detector.classes)


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
