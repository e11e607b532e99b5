"""The commands that run studies: ``kedge demo``, ``kedge reproduce`` and ``kedge bench``."""

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kedge import training
from kedge.cli.terminal import Console


class Bars(Progress):
    """Progress of a study: a bar for each training, and one for the scoring."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description:<32}"), BarColumn(), TimeRemainingColumn()
        super().__init__(*columns, TextColumn("{task.fields[note]}"), console=console)
        self._known: dict[str, TaskID] = {}

    def on_training(self, network: str, p: training.Progress) -> None:
        """Move the bar of a network."""
        note = f"loss {p.loss:.3f}  accuracy {p.accuracy:.1%}  {p.images_per_second:,.0f} images/s"
        self.move(f"training {network}", p.step, p.steps, note)

    def on_scoring(self, label: str, done: int, total: int) -> None:
        """Move the bar of the method that is scoring."""
        self.move("scoring", done, total, label)

    def move(self, task: str, done: int, total: int, note: str) -> None:
        """Move a bar, which is added at its first move."""
        if task not in self._known:
            self._known[task] = self.add_task(escape(task), note="")
        self.update(self._known[task], total=total, completed=done, note=escape(note))
