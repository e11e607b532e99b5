"""Requests that come close together share a batch: one thread runs the network, a queue of bounded length waits."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kedge.errors import KedgeError

Answer = Any
FEW = 8  # images that are not worth two batches


class Busy(KedgeError):  # noqa: N818 -- a state, not a fault
    """The queue is full, or the service is stopping."""


@dataclass(eq=False)
class _Waiting:
    images: Sequence[Tensor]
    answers: list[Answer] = field(default_factory=list)
    future: "asyncio.Future[list[Answer]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Runs a function on batches of images that several callers gave.

    A batch is half of what waits where several callers wait: the other half is the next one's, so that the network has
    work while answers go out and callers come back.

    Args:
        run: Takes images (B, D, ...) and gives one answer for each; called in one thread of its own.
        max_batch: Images at a time.
        max_delay: Seconds to wait for more while there are fewer, where the network had nothing to do.
        max_queue: Images that may wait.
    """

    def __init__(
        self, run: Callable[[Tensor], Sequence[Answer]], *, max_batch: int, max_delay: float, max_queue: int
    ) -> None:
        self.run, self.max_batch, self.max_delay, self.max_queue = run, max_batch, max_delay, max_queue
        self.queued = 0
        self._queue: deque[_Waiting] = deque()
        self._more = asyncio.Event()
        self._stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kedge-network")
        self._loop: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Take no more, finish what was taken, and end."""
        self._stopping = True
        self._more.set()
        if self._loop is not None:
            await self._loop
        self._thread.shutdown()

    async def submit(self, images: Sequence[Tensor]) -> list[Answer]:
        """The answers to these images, in order.

        Raises:
            Busy: There is no room for them.
        """
        if self._stopping:
            raise Busy("the service is stopping")
        if self.queued + len(images) > self.max_queue:
            raise Busy(f"{self.queued} images are waiting, and {self.max_queue} may")
        if self._loop is None:
            self._loop = asyncio.create_task(self._work())
        waiting = _Waiting(images)
        self._queue.append(waiting)
        self.queued += len(images)
        self._more.set()
        return await waiting.future

    async def between(self, function: Callable[[Tensor], Answer], image: Tensor) -> Answer:
        """What a function that uses the network too gives for one image; it runs between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, image)

    async def _work(self) -> None:
        idle = True
        while True:
            if not self._queue:
                if self._stopping:
                    return
                self._more.clear()
                await self._more.wait()
                idle = True
                continue
            if idle and self.queued < self.max_batch and self.max_delay and not self._stopping:
                await self._for_more()
            idle = False
            if not (batch := self._take()):
                continue
            images = torch.stack([image for waiting, first, last in batch for image in waiting.images[first:last]])
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.run, images)
            except Exception as error:  # the callers' to handle; the service goes on
                for waiting, _, _ in batch:
                    self._drop(waiting)
                    if not waiting.future.done():
                        waiting.future.set_exception(error)
                continue
            self._answer(batch, list(answers))

    async def _for_more(self) -> None:
        """Wait for a full batch, but not for long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.max_delay
        while self.queued < self.max_batch and not self._stopping and (left := end - loop.time()) > 0:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), left)

    def _take(self) -> list[tuple[_Waiting, int, int]]:
        """The next images: of the first request what is left of it, and of those behind it as many as fit.

        Requests whose callers gave up are dropped.
        """
        for gone in [waiting for waiting in self._queue if waiting.future.done()]:
            self._drop(gone)
        share = self.queued if len(self._queue) == 1 else max(FEW, math.ceil(self.queued / 2))
        batch, room = [], min(self.max_batch, share)
        for waiting in self._queue:
            first = len(waiting.answers)
            last = min(len(waiting.images), first + room)
            batch.append((waiting, first, last))
            room -= last - first
            if room == 0:
                break
        return batch

    def _answer(self, batch: list[tuple[_Waiting, int, int]], answers: list[Answer]) -> None:
        for waiting, first, last in batch:
            count = last - first
            waiting.answers += answers[:count]
            answers = answers[count:]
            self.queued -= count
            if len(waiting.answers) == len(waiting.images):
                self._queue.remove(waiting)
                if not waiting.future.done():  # its caller may have given up
                    waiting.future.set_result(waiting.answers)

    def _drop(self, waiting: _Waiting) -> None:
        self._queue.remove(waiting)
        self.queued -= len(waiting.images) - len(waiting.answers)
