"""Reading ahead: threads decode the next images while the caller computes with these."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kedge.checks import at_least
from kedge.threads import cores

MOST = 8  # threads that are taken unasked
T = TypeVar("T")


def in_order(tasks: Iterable[Callable[[], T]], *, ahead: int, workers: int | None = None) -> Generator[T, None, None]:
    """The results of tasks, in their order; threads work on the next ones while the caller uses what it got.

    An error, of a task or of the iterable itself, is raised when its turn comes, after the results before it.

    Args:
        tasks: Functions that may run in any thread, such as those that decode a file. Taken one by one.
        ahead: Results that may wait, or be worked on.
        workers: Threads; by default one for each core, two at least and `MOST` at most.

    Example:
        >>> list(in_order([lambda n=n: n * n for n in range(4)], ahead=2))
        [0, 1, 4, 9]
    """
    at_least("ahead", ahead, 1)
    pool = ThreadPoolExecutor(readers() if workers is None else workers, thread_name_prefix="kedge-reader")
    running: deque[Future[T]] = deque()
    given = iter(tasks)
    more = True
    try:
        while more or running:
            while more and len(running) < ahead:
                more = _submit(pool, given, running)
            if running:
                yield running.popleft().result()
    finally:  # also where the caller takes no more
        pool.shutdown(cancel_futures=True)


def readers() -> int:
    """Threads that read images, unless somebody says how many.

    Example:
        >>> 2 <= readers() <= MOST
        True
    """
    return min(max(2, cores()), MOST)


def _submit(pool: ThreadPoolExecutor, given: Iterator[Callable[[], T]], running: deque[Future[T]]) -> bool:
    """Start the next task; False if there was none, or getting it failed."""
    try:
        task = next(given)
    except StopIteration:
        return False
    except Exception as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        running.append(failed)
        return False
    running.append(pool.submit(task))
    return True
