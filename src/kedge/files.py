"""Checked reading of files, and atomic writing: a crash, a full disk or a second process leaves no half file."""

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedge.errors import InputError, KedgeError

_KINDS = {"d": "a folder", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}


def regular_file(path: str | os.PathLike[str], purpose: str = "read") -> Path:
    """Return the path of a regular file, or of a link to one; reading a pipe or a device might never end.

    Args:
        path: Where the file should be.
        purpose: What it is for, in the error: "cannot be ...".

    Example:
        >>> regular_file(os.devnull)
        Traceback (most recent call last):
        kedge.errors.InputError: /dev/null cannot be read: it is a device and not a regular file
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        raise InputError(f"{path} cannot be {purpose}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.filemode(mode)[0], "something else")
        raise InputError(f"{path} cannot be {purpose}: it is {kind} and not a regular file")
    return Path(path)


def read_limited(path: str | os.PathLike[str], largest: int) -> bytes:
    """The content of a regular file of at most ``largest`` bytes; a larger one is refused before it is read."""
    size = regular_file(path).stat().st_size
    if size > largest:
        raise InputError(f"{path} cannot be read: it has {size:,} bytes, and at most {largest:,} are expected")
    return Path(path).read_bytes()


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, which is renamed to it when the block succeeds.

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
        temporary.chmod(mode)  # the writer may have replaced it by a private file
        temporary.replace(target)
    except OSError as error:
        reason = f"{error.strerror or error}; any earlier file is unchanged"
        raise KedgeError(f"{target} could not be written: {reason}. Free space, or choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write plain data as JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def file_name(label: str) -> str:
    """A label as a file name: letters, digits, and a hyphen for anything else; a star and a plus become words.

    Example:
        >>> file_name("MDS++, near OOD*")
        'mds-plus-plus-near-ood-starred'
    """
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("*", " starred").replace("+", " plus")).strip("-")


def check_target(
    name: str, path: str | os.PathLike[str], *, folder: bool = False, overwrite: bool | None = None
) -> None:
    """Raise an error about ``name`` if a file, or files in a ``folder``, could not be written; nothing is created.

    Args:
        name: The option.
        path: The file, or the folder.
        folder: Whether it is a folder.
        overwrite: Whether an existing file may be replaced; None if the caller decides.
    """
    target = Path(path)
    if overwrite is False and target.is_file():
        raise InputError(f"{name} must not exist yet; {target} does: choose another name, or use --overwrite")
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
    """Delete temporary files that `atomic` left when its process was killed; no other process may be writing there."""
    for leftover in Path(directory).glob(".*.part"):
        leftover.unlink(missing_ok=True)
