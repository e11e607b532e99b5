"""The commands that run studies: ``kedge demo``, ``kedge reproduce`` and ``kedge bench``."""

from typing import TYPE_CHECKING

from kedge.progress import Update

if TYPE_CHECKING:
    from kedge.training import Progress


class StudyProgress:
    """Shows the trainings and the scoring of a study in one bar, of `progress_bar`."""

    def __init__(self, update: Update) -> None:
        self.update = update

    def on_training(self, network: str, p: "Progress") -> None:
        """Move the bar of a network."""
        self.update(p.step, p.steps, label=f"training {network}", note=p.note)

    def on_scoring(self, label: str, done: int, total: int) -> None:
        """Move the bar of the method that is scoring."""
        self.update(done, total, label=f"scoring {label}")
