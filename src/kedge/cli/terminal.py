"""Where the commands print: names from files cannot control the terminal, and lines in a pipe are never broken."""

import re
from pathlib import Path
from typing import Any

import rich.console
from rich.markup import escape
from rich.text import Text

kept: list[Path] = []  # what the running command would go on with, if it were stopped
UNLIMITED = 1_000_000  # columns, where no terminal limits them
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_REORDERING = (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))  # of lines and of text in two directions
_ESCAPES = _CONTROL | {code: f"\\u{code:04x}" for code in (*_REORDERING, *range(0xD800, 0xE000))}  # and surrogates


def printable(text: object) -> str:
    r"""Text from a file, an archive or a detector, with everything that a terminal would obey as an escape.

    Example:
        >>> print(printable("cat\x1b[2J\n.png"))
        cat\x1b[2J\x0a.png
    """
    return str(text).translate(_ESCAPES)


def left_behind() -> str:
    """What a command that was stopped leaves, and how to go on."""
    files = [str(path) for path in kept if path.exists()]
    return f"{files[0]} is kept, and the same command goes on from there" if files else "nothing was written"


class Console(rich.console.Console):
    """Rich's console, made safe for names of any origin; it wraps and cuts nothing unless it is a terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, emoji=False)
        if not self.is_terminal:
            self.soft_wrap, self.width = True, UNLIMITED

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; in a pipe, without the spaces that fill up the rows of a table."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of every string that is printed, cells of tables included."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def wrote(self, what: str, path: object) -> None:
        """Print what a file is and where it was written."""
        self.print(f"{what:<10}[bold]{escape(printable(path))}[/]")

    def resumable(self, path: Path, *, begun: bool, anew: str = "--overwrite begins anew") -> None:
        """Print that work which was ``begun`` goes on; if this run is stopped, `left_behind` names its path."""
        kept[:] = [path]
        if begun:
            self.print(f"{'resuming':<10}{escape(printable(path))}; {anew}")

    def next(self, *commands: str) -> None:
        """Print what to type next."""
        self.print(f"{'next':<10}{'   or   '.join(escape(printable(command)) for command in commands)}")
