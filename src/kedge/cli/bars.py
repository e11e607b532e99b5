"""The bar that a training shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kedge import training


@contextmanager
def training_bar(console: Console, words: str) -> Iterator[Callable[[training.Progress], None]]:
    """Show a bar inside the block; what it yields is the ``progress`` of `kedge.train`."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        console=console,
    ) as bars:  # fmt: skip
        task = bars.add_task(words, total=None, note="")

        def on_step(p: training.Progress) -> None:
            note = f"epoch {p.epoch}/{p.epochs}  loss {p.loss:.3f}  accuracy {p.accuracy:.1%}"
            bars.update(task, total=p.steps, completed=p.step, note=f"{note}  {p.images_per_second:,.0f} images/s")

        yield on_step
