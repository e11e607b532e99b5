"""A detector at work: decodes, batches, scores and counts, within the limits of what it may hold."""

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
from kedge.serving.bodies import Refused
from kedge.serving.decode import decode
from kedge.serving.explain import address, by_anchor
from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

LANES = 2  # batches at a time, each with half of the threads: they wait less for each other than for one batch's parts


class Service:
    """Scores the images of many requests.

    Args:
        detector: Fitted and calibrated.
        settings: Its limits.
    """

    def __init__(self, detector: Detector, settings: Settings) -> None:
        if detector.preprocess is None or detector.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) before it is served")
        self.detector, self.settings = for_inference(detector), settings
        self.preprocess = detector.preprocess
        self.metrics = Metrics(detector.calibration.scores)
        self.readers = ThreadPoolExecutor(settings.readers, thread_name_prefix="kedge-reader")
        networks = thread_copies(self.detector, min(LANES, torch.get_num_threads()))
        self.batcher = Batcher(
            [partial(self._run, one) for one in networks],
            max_batch=settings.max_batch,
            max_delay=settings.max_delay,
            max_queue=settings.max_queue,
            prepare=partial(_share_threads, torch.get_num_threads(), len(networks)),
        )
        self.held = 0  # bytes of requests
        self.taken = 0  # images that are decoded, or wait for it or for the network

    async def stop(self) -> None:
        """Finish what was taken, and end."""
        await self.batcher.stop()
        self.readers.shutdown()

    @property
    def ready(self) -> bool:
        """Whether there is room for a request."""
        return self.taken < self.settings.max_queue

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """Room for one request: gives a function that takes more bytes of it, or raises `Busy`."""
        mine = 0

        def take(count: int) -> None:
            nonlocal mine
            if self.held + count > self.settings.max_held:
                raise Busy("the requests that are held fill the memory for them")
            mine += count
            self.held += count

        try:
            yield take
        finally:
            self.held -= mine

    async def score(self, given: Sequence[bytes]) -> list[dict[str, Any]]:
        """An answer for each image."""
        with self._places(given):
            return await self.batcher.submit(await self._decode(given))

    async def explain(self, file: bytes) -> dict[str, Any]:
        """An answer for one image, and what each anchor makes of it."""
        with self._places([file]):
            (image,) = await self._decode([file])
            (result,) = await self.batcher.submit([image])
            by = await self.batcher.between(self._by_anchor, image)
        return {"result": result, "hypotheses": by, "image": address(image)}

    @contextlib.contextmanager
    def _places(self, given: Sequence[bytes]) -> Iterator[None]:
        """Places in the queue, taken before the work of decoding, so that no more is decoded than may wait."""
        if not given:
            raise InputError("images must hold at least one image; got none")
        if len(given) > self.settings.max_images:
            raise Refused(413, f"images must be at most {self.settings.max_images}; got {len(given)}")
        if self.taken + len(given) > self.settings.max_queue:
            raise Busy("the queue is full")
        self.taken += len(given)
        try:
            yield
        finally:
            self.taken -= len(given)

    async def _decode(self, given: Sequence[bytes]) -> list[Tensor]:
        loop = asyncio.get_running_loop()
        reads = [
            loop.run_in_executor(self.readers, decode, data, place, self.preprocess, self.settings.max_pixels)
            for place, data in enumerate(given)
        ]
        try:
            return list(await asyncio.gather(*reads))
        finally:
            for read in reads:  # after the first that fails, the others are not worth the work
                read.cancel()

    def _by_anchor(self, image: Tensor) -> list[dict[str, Any]]:
        with _own_failure():
            return by_anchor(self.detector, image)

    def _run(self, detector: Detector, images: Tensor) -> list[dict[str, Any]]:
        with _own_failure():
            said = detector(images, batch_size=len(images))
        self.metrics.scored(said.score.tolist(), int(said.is_ood.sum()))
        classes, missing = detector.classes, [None] * len(said)
        columns = zip(
            said.label.tolist(),
            said.probability.amax(dim=1).tolist(),
            said.score.tolist(),
            missing if said.tau is None else said.tau.tolist(),
            said.p_value.tolist(),
            said.is_ood.tolist(),
            strict=True,
        )
        return [
            {
                "label": label,
                "name": classes[label] if label < len(classes) else None,
                "probability": probability,
                "score": score,
                "temperature": temperature,
                "p_value": p_value,
                "is_ood": is_ood,
            }
            for label, probability, score, temperature, p_value, is_ood in columns
        ]


def _share_threads(threads: int, lanes: int, number: int) -> None:
    """Let this thread compute with its share of all threads; the first lanes have what does not divide."""
    torch.set_num_threads(threads // lanes + (number < threads % lanes))


@contextlib.contextmanager
def _own_failure() -> Iterator[None]:
    """Keep what the detector complains of from being told to a client, whose images were checked before."""
    try:
        yield
    except KedgeError as error:
        raise RuntimeError(f"the detector failed: {error}") from error
