"""Batches across requests: one thread per network, and a bounded queue."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.errors import KedgeError

Answer = Any
Run = Callable[[Tensor], Sequence[Answer]]
SMALL = 8  # images that are not worth two batches


class Busy(KedgeError):  # noqa: N818 -- a state, not a fault
    """The queue is full, or the service is stopping."""


@dataclass(eq=False)
class _Waiting:
    images: Sequence[Tensor]
    taken: int = 0  # images that were given to a network
    answers: dict[int, Answer] = field(default_factory=dict)
    future: "asyncio.Future[list[Answer]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


_Part = tuple[_Waiting, range]


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
        self.queued = 0  # unanswered images
        self._queue: deque[_Waiting] = deque()  # requests with images that no network was given
        self._more = asyncio.Event()
        self._stopping = False
        self._threads = [
            ThreadPoolExecutor(1, f"kedge-network-{number}", partial(prepare, number) if prepare else None)
            for number in range(len(runs))
        ]
        self._work: list[asyncio.Task[None]] = []

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
        if self.queued + len(images) > self.max_queue:
            raise Busy(f"{self.queued} images are waiting; at most {self.max_queue} may")
        if not self._work:
            pairs = zip(self.runs, self._threads, strict=True)
            self._work = [asyncio.create_task(self._lane(run, thread)) for run, thread in pairs]
        waiting = _Waiting(images)
        self._queue.append(waiting)
        self.queued += len(images)
        self._more.set()
        return await waiting.future

    async def between(self, function: Callable[[Tensor], Answer], image: Tensor) -> Answer:
        """Apply a function to one image in the thread of the first network, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[0], function, image)

    async def _lane(self, run: Run, thread: ThreadPoolExecutor) -> None:
        """Run the batches of one network."""
        last = 0
        while True:
            if not self._queue:
                if self._stopping:
                    return
                self._more.clear()
                await self._more.wait()
                await self._wait_for(last)
                if not self._queue:
                    continue
            batch = self._take()
            last = sum(len(places) for _, places in batch)
            if not last:
                continue
            images = torch.stack([waiting.images[k] for waiting, places in batch for k in places])
            try:
                answers = await asyncio.get_running_loop().run_in_executor(thread, run, images)
            except Exception as error:  # for the callers; the service goes on
                self._fail(batch, error)
            else:
                self._answer(batch, answers)

    async def _wait_for(self, count: int) -> None:
        """Wait until this many images are queued, at most for ``max_delay``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.max_delay
        while not self._stopping and (left := end - loop.time()) > 0:
            if not 0 < sum(len(waiting.images) - waiting.taken for waiting in self._queue) < count:
                return
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), left)

    def _take(self) -> list[_Part]:
        """The next images, from the oldest requests on; requests whose callers gave up are dropped."""
        for gone in [waiting for waiting in self._queue if waiting.future.done()]:
            self._drop(gone)
        alone = len(self.runs) == len(self._queue) == 1  # one caller and one network: halving gains nothing
        share = self.queued if alone else max(SMALL, math.ceil(self.queued / 2))
        batch, room = [], min(self.max_batch, share)
        while self._queue and room:
            waiting = self._queue[0]
            first, waiting.taken = waiting.taken, min(len(waiting.images), waiting.taken + room)
            batch.append((waiting, range(first, waiting.taken)))
            room -= waiting.taken - first
            if waiting.taken == len(waiting.images):
                self._queue.popleft()
        return batch

    def _answer(self, batch: list[_Part], answers: Sequence[Answer]) -> None:
        given = iter(answers)
        for waiting, places in batch:
            waiting.answers.update((k, next(given)) for k in places)
            self.queued -= len(places)
            if len(waiting.answers) == len(waiting.images) and not waiting.future.done():  # the caller may be gone
                waiting.future.set_result([waiting.answers[k] for k in range(len(waiting.images))])

    def _fail(self, batch: list[_Part], error: Exception) -> None:
        for waiting, places in batch:
            self.queued -= len(places)
            if waiting in self._queue:
                self._drop(waiting)
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _drop(self, waiting: _Waiting) -> None:
        self._queue.remove(waiting)
        self.queued -= len(waiting.images) - waiting.taken
