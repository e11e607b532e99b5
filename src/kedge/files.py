"""Writing files so that a crash, a full disk or a second process never leaves half of one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from kedge.errors import InputError, KedgeError


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its name once the block has succeeded.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with atomic(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"path must be a file to write; {target} is a directory: add a file name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less the process's umask
        mode = temporary.stat().st_mode
    except OSError as error:
        raise InputError(f"path must be writable; {target} is not: {error.strerror or error}") from error
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(mode)  # a writer may have put a private file in its place
        temporary.replace(target)
    except OSError as error:
        raise KedgeError(
            f"{target} could not be written: {error.strerror or error}; what was there before is as it was. "
            "Free space on the disk, or choose another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_target(name: str, path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Raise an error where a file, or files in a folder, could not be written; to call before the work.

    Args:
        name: What the error calls the path.
        path: That will be written; nothing is made yet.
        folder: Whether it is a folder for files.

    Example:
        >>> check_target("--report", "/")
        Traceback (most recent call last):
        kedge.errors.InputError: --report must be a file to write; / is a folder: add a file name
    """
    target = Path(path)
    if not folder and target.is_dir():
        raise InputError(f"{name} must be a file to write; {target} is a folder: add a file name")
    home = target if folder else target.parent
    nearest = next(place for place in (home, *home.absolute().parents) if os.path.lexists(place))
    kind = "a folder to write to" if folder else "a file to write"
    if not nearest.is_dir():
        raise InputError(f"{name} must be {kind}; got {target}, but {nearest} is no folder: choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{name} must be {kind}; got {target}, but {nearest} may not be written to: choose another")


def remove_leftovers(directory: str | os.PathLike[str]) -> None:
    """Delete what `atomic` left in a directory when its process was killed; no other process may be writing there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / ".a.txt.x1.part").write_text("half")
        >>> remove_leftovers(folder)
        >>> list(folder.iterdir())
        []
    """
    for leftover in Path(directory).glob(".*.part"):
        leftover.unlink(missing_ok=True)
