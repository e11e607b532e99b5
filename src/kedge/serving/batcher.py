"""Batches across requests: one thread per network, and a bounded queue."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.errors import KedgeError

Answer = Any
Run = Callable[[Tensor], Sequence[Answer]]
Waiting = tuple[Tensor, "asyncio.Future[Answer]", list["asyncio.Future[Answer]"]]  # an image, its answer, its caller's
SMALL = 8  # images that are not worth two batches


class Busy(KedgeError):  # noqa: N818 -- a state, not a fault
    """The queue is full, or the service is stopping."""


class Batcher:
    """Runs networks on batches of images from several callers.

    A batch is at most half of the unanswered images: the other half is for the other network, or for the next batch if
    there is only one, so that a network has work while answers go out and callers come back.

    Args:
        runs: One function per network: takes images (B, D, ...) and returns one answer for each; called in a thread of
            its own.
        max_batch: Images in a batch.
        max_delay: Seconds that an idle network waits for as many images as its last batch had.
        max_queue: Images that may wait.
        prepare: Called in each thread before its first batch, with the number of the network.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        max_batch: int,
        max_delay: float,
        max_queue: int,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        self.runs, self.max_batch, self.max_delay, self.max_queue = runs, max_batch, max_delay, max_queue
        self._queue: list[Waiting] = []  # images that no network was given
        self._computing = 0
        self._pace = 0.0  # seconds of one network for an image, smoothed
        self._more = asyncio.Event()
        self._stopping = False
        self._threads = [
            ThreadPoolExecutor(1, f"kedge-network-{number}", partial(prepare, number) if prepare else None)
            for number in range(len(runs))
        ]
        self._work: list[asyncio.Task[None]] = []

    @property
    def queued(self) -> int:
        """The number of unanswered images."""
        return self._computing + sum(not answer.done() for _, answer, _ in self._queue)

    @property
    def expected_wait(self) -> float:
        """Seconds until an image would be answered that came now, by the speed of the last batches."""
        return self.queued * self._pace / len(self.runs)

    async def stop(self) -> None:
        """Accept no more, answer what was accepted, and end."""
        self._stopping = True
        self._more.set()
        await asyncio.gather(*self._work)
        for thread in self._threads:
            thread.shutdown()

    async def submit(self, images: Sequence[Tensor]) -> list[Answer]:
        """The answers to these images, in order; raises `Busy` if there is no room for them."""
        if self._stopping:
            raise Busy("the service is stopping")
        if (queued := self.queued) + len(images) > self.max_queue:
            raise Busy(f"{queued} images are waiting; at most {self.max_queue} may")
        if not self._work:
            pairs = zip(self.runs, self._threads, strict=True)
            self._work = [asyncio.create_task(self._lane(run, thread)) for run, thread in pairs]
        answers = [asyncio.get_running_loop().create_future() for _ in images]
        self._queue += [(image, answer, answers) for image, answer in zip(images, answers, strict=True)]
        self._more.set()
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:  # of a caller who gave up, or had an error
                answer.cancel()

    async def between(self, function: Callable[[Tensor], Answer], image: Tensor) -> Answer:
        """Apply a function to one image in the thread of the first network, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[0], function, image)

    async def _lane(self, run: Run, thread: ThreadPoolExecutor) -> None:
        """Run the batches of one network."""
        last = 0
        while self._queue or not self._stopping:
            if not self._queue:
                self._more.clear()
                await self._more.wait()
                await self._wait_for(last)
            batch = self._take()
            last = len(batch)
            if not batch:
                continue
            self._computing += last
            images = torch.stack([image for image, _, _ in batch])
            started = time.monotonic()
            try:
                results = await asyncio.get_running_loop().run_in_executor(thread, run, images)
                pairs = list(zip(batch, results, strict=True))
            except Exception as error:  # for the callers, with all their images; the service goes on
                for answer in (each for _, _, answers in batch for each in answers if not each.done()):
                    answer.set_exception(error)
            else:
                for (_, answer, _), result in pairs:
                    if not answer.done():  # the caller may be gone
                        answer.set_result(result)
            self._computing -= last
            pace = (time.monotonic() - started) / last
            self._pace = 0.8 * self._pace + 0.2 * pace if self._pace else pace

    async def _wait_for(self, count: int) -> None:
        """Wait until this many images are queued, at most for ``max_delay``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.max_delay
        while not self._stopping and 0 < len(self._queue) < count and (left := end - loop.time()) > 0:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), left)

    def _take(self) -> list[Waiting]:
        """The next images; those whose callers gave up are dropped."""
        waiting = [each for each in self._queue if not each[1].done()]
        unanswered = len(waiting) + self._computing
        if len(self.runs) > 1 or (waiting and waiting[0][2] is not waiting[-1][2]):
            unanswered = max(SMALL, math.ceil(unanswered / 2))  # halving gains nothing for one caller and one network
        size = min(self.max_batch, unanswered)
        self._queue = waiting[size:]
        return waiting[:size]
