"""Progress bars: on standard error, in a terminal or a notebook, for work that takes longer than a moment."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

MOMENT = 0.5  # seconds
_active = False


@contextmanager
def progress_bar(label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar inside the block; the value is a function that takes the number of images done.

    Nothing is shown inside another bar, if standard error is neither a terminal nor a notebook, or if the environment
    variable ``KEDGE_PROGRESS`` is ``0``.

    Example:
        >>> with progress_bar("scoring", 10) as update:
        ...     update(10)
    """
    global _active
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter
    if _active or not shown or os.environ.get("KEDGE_PROGRESS") == "0":
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
    task, begun = bars.add_task(label, total=total, rate=""), time.monotonic()

    def update(done: int) -> None:
        if time.monotonic() - begun > MOMENT:
            bars.start()
        speed = bars.tasks[task].speed
        bars.update(task, completed=done, rate="" if speed is None else f"{speed:,.0f} images/s")

    _active = True
    try:
        yield update
    finally:
        _active = False
        bars.stop()
