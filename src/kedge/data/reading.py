"""Prefetching: threads decode the next images while the caller computes with the current ones."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kedge.checks import at_least
from kedge.threads import cores

MOST = 8  # threads by default
T = TypeVar("T")


def in_order(tasks: Iterable[Callable[[], T]], *, ahead: int, workers: int | None = None) -> Generator[T, None, None]:
    """Run tasks in threads and yield their results in order.

    An error, of a task or of the iterable itself, is raised after the results that come before it.

    Args:
        tasks: Functions that may run in any thread. Taken one by one.
        ahead: The largest number of tasks that are running or wait to be yielded.
        workers: Threads; by default `readers`.
    """
    at_least("ahead", ahead, 1)
    pool = ThreadPoolExecutor(readers() if workers is None else workers, thread_name_prefix="kedge-reader")
    running: deque[Future[T]] = deque()
    pending = iter(tasks)
    more = True
    try:
        while more or running:
            while more and len(running) < ahead:
                try:
                    running.append(pool.submit(next(pending)))
                except StopIteration:
                    more = False
                except Exception as error:  # of the iterable
                    more = False
                    running.append(Future())
                    running[-1].set_exception(error)
            if running:
                yield running.popleft().result()
    finally:  # also if the caller stops early
        pool.shutdown(cancel_futures=True)


def readers() -> int:
    """The default number of threads: one per core, at least two and at most `MOST`."""
    return min(max(2, cores()), MOST)
