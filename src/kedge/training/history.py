"""The history of a run: one JSON object a line and epoch, and TensorBoard's files where asked for."""

import json
from pathlib import Path
from typing import Any

from kedge.checks import needs
from kedge.files import atomic


class History:
    """Lines of plain data, kept in memory and, with a directory, in ``history.jsonl``.

    Example:
        >>> history = History(None)
        >>> history.add({"epoch": 1, "loss": 0.5})
        >>> history.lines
        [{'epoch': 1, 'loss': 0.5}]
    """

    def __init__(self, directory: Path | None, tensorboard: bool = False) -> None:
        self.path = None if directory is None else directory / "history.jsonl"
        self.lines: list[dict[str, Any]] = []
        self._board = _board(directory) if tensorboard and directory is not None else None

    def resume(self, epochs: int) -> None:
        """Read what an earlier part of the run wrote, up to so many whole epochs."""
        if self.path is not None and self.path.exists():
            written = [json.loads(line) for line in self.path.read_text().splitlines() if line.strip()]
            self.lines = [line for line in written if line["epoch"] <= epochs]

    def add(self, line: dict[str, Any]) -> None:
        """Add the line of an epoch; the file is replaced whole, so it never ends in half a line."""
        self.lines.append(line)
        if self.path is not None:
            with atomic(self.path) as temporary:
                temporary.write_text("".join(json.dumps(entry) + "\n" for entry in self.lines))
        if self._board is not None:
            for name, value in line.items():
                if name != "epoch" and value is not None:
                    self._board.add_scalar(name, value, line["epoch"])
            self._board.flush()


def _board(directory: Path) -> Any:
    return needs("torch.utils.tensorboard", "tensorboard", "tensorboard=True").SummaryWriter(str(directory))
