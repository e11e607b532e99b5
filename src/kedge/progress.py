"""Progress bars: on standard error, in a terminal or a notebook, for work that takes longer than a moment."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

MOMENT = 0.5  # seconds
_shown = False  # whether a bar is open; only the main thread reads and sets it


class Update(Protocol):
    """The type of what `progress_bar` yields."""

    def __call__(
        self, done: int, total: int | None = None, *, label: str | None = None, note: str | None = None
    ) -> None:
        """Set how much is done, and whatever else has changed."""


@contextmanager
def progress_bar(label: str, total: int | None = None) -> Iterator[Update]:
    """Show a bar inside the block; the value is a function that takes the number of images done.

    The function also takes a new total, a new label, with which the bar begins again, and a note to show instead of
    the number of images. Nothing is shown inside another bar, in other threads than the main one, if standard error is
    neither a terminal nor a notebook, or if the environment variable ``KEDGE_PROGRESS`` is ``0``.

    Example:
        >>> with progress_bar("scoring", 10) as update:
        ...     update(10)
    """
    global _shown
    if _shown or threading.current_thread() is not threading.main_thread():
        yield lambda *_, **__: None
        return
    bar = _Bar(label, total)
    _shown = True
    try:
        yield bar.update
    finally:
        _shown = False
        bar.close()


class _Bar:
    """A bar that appears once a moment has passed, if the work is not done by then."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.begun = label, total, time.monotonic()
        self.lock = threading.Lock()
        self.bars: Progress | None = None
        self.silent = os.environ.get("KEDGE_PROGRESS") == "0"

    def update(self, done: int, total: int | None = None, *, label: str | None = None, note: str | None = None) -> None:
        with self.lock:
            begins, self.label = label not in (None, self.label), label or self.label
            self.total = self.total if total is None and not begins else total
            if self.bars is None and not self.silent and done != self.total and time.monotonic() - self.begun > MOMENT:
                self._open()
            if self.bars is not None:
                (task,) = self.bars.tasks
                if begins:
                    self.bars.reset(task.id, description=self.label, total=self.total)
                note = self._count(done, task.speed) if note is None else note
                self.bars.update(task.id, completed=done, total=self.total, note=note)
                self.bars.start()

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()

    def _open(self) -> None:
        from rich.console import Console  # here, since it takes a tenth of the time that torch takes
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_jupyter:  # rich's own bars need ipywidgets there
            console = Console(stderr=True, force_jupyter=False, force_terminal=True, width=100)
        self.silent = not console.is_terminal
        if not self.silent:
            label, note = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
            columns = label, BarColumn(), note, TimeRemainingColumn(compact=True)
            both = sys.stdout.isatty()  # or what others print while the bar is shown would go to standard error
            self.bars = Progress(*columns, console=console, transient=True, redirect_stdout=both)
            self.bars.add_task(self.label, total=self.total, note="")

    def _count(self, done: int, speed: float | None) -> str:
        total = "" if self.total is None else f" of {self.total:,}"
        return f"{done:,}{total} images" + ("" if speed is None else f"  {speed:,.0f} images/s")
