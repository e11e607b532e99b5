"""Prefetching: threads decode the next images while the caller computes with the current ones."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
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

    Example:
        >>> list(in_order([lambda n=n: n * n for n in range(4)], ahead=2))
        [0, 1, 4, 9]
    """
    at_least("ahead", ahead, 1)
    pool = ThreadPoolExecutor(readers() if workers is None else workers, thread_name_prefix="kedge-reader")
    running: deque[Future[T]] = deque()
    pending = iter(tasks)
    more = True
    try:
        while more or running:
            while more and len(running) < ahead:
                more = _submit(pool, pending, running)
            if running:
                yield running.popleft().result()
    finally:  # also if the caller stops early
        pool.shutdown(cancel_futures=True)


def readers() -> int:
    """The default number of threads: one per core, at least two and at most `MOST`."""
    return min(max(2, cores()), MOST)


def _submit(pool: ThreadPoolExecutor, pending: Iterator[Callable[[], T]], running: deque[Future[T]]) -> bool:
    """Start the next task; False if there is none, or if the iterable raised an error."""
    try:
        task = next(pending)
    except StopIteration:
        return False
    except Exception as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        running.append(failed)
        return False
    running.append(pool.submit(task))
    return True
