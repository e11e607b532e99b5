"""Downloads that resume where they were cut, and get their name only when they are complete; and checksums of files.

A checksum is compared with the published one, or with the one recorded on first use.
Written here because pooch, the usual library for this, starts an interrupted download from the beginning.
"""

import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kedge.data.sources.entry import Checksum, Progress
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.files import read_limited, write_json

RECORD = "checksums.json"
FIRST_USE = "recorded on first use"

TIMEOUT = 10.0  # seconds for a connection, and for any silence in it
_CHUNK = 2**18
_NETWORK = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def download(
    urls: Sequence[str],
    target: Path,
    *,
    checksum: Checksum | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
    attempts: int = 4,
) -> str:
    """Fetch a file from the first address that has it, and return its digest (sha256 if none is published).

    The bytes received so far are kept in a hidden .part file, from which the next attempt or process resumes. A file
    with another checksum than the published one is deleted.

    Args:
        urls: Addresses of the file.
        target: Path of the complete file.
        checksum: As published.
        progress: Called with the bytes received so far.
        timeout: Seconds to wait for the server.
        attempts: Consecutive attempts without a new byte before giving up, once the server has sent anything.
    """
    reasons = []
    for url in urls:
        try:
            return _download(url, target, checksum, progress, timeout, attempts)
        except FileFormatError as error:
            reasons.append(str(error))
        except _NETWORK as error:
            reasons.append(f"{url}: {_reason(error)}")
    raise NotReadyError(f"{target.name} could not be fetched: {'; '.join(reasons) or 'it has no address'}")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Report a disk error as one of the argument data_dir; network errors pass through."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        raise InputError(f"data_dir must be writable; {path} is not: {error.strerror or error}") from error


def _download(
    url: str, target: Path, checksum: Checksum | None, progress: Progress | None, timeout: float, attempts: int
) -> str:
    part = target.with_name(f".{target.name}.part")
    left = 1  # an unreachable server is tried once; a cut connection is resumed
    while True:
        before = _size(part)
        try:
            total = _receive(url, part, checksum is not None, progress, timeout)
            if total is None or _size(part) == total:
                break
            raise ConnectionError(f"the connection was cut at {_size(part)} of {total} bytes")
        except _NETWORK as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            left = attempts if _size(part) > before else left - 1
            if refused or left < 1:
                raise
            time.sleep(0.2)
    actual = digest(part, checksum.algorithm if checksum is not None else "sha256")
    if checksum is not None and actual != checksum.digest:
        _discard(part)
        raise FileFormatError(
            f"{url} gave a file with the {checksum.algorithm} {actual}; {checksum.digest} is published "
            f"({checksum.origin}): it was deleted"
        )
    with disk_errors(target):
        with part.open("rb+") as complete:
            os.fsync(complete.fileno())
        os.replace(part, target)
    _discard(part)
    return actual


def _receive(url: str, part: Path, checked: bool, progress: Progress | None, timeout: float) -> int | None:
    """Append the missing bytes to the part; return the size of the whole file if the server states it."""
    note = part.with_name(f"{part.name}.json")
    have, validator = _size(part), ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        saved = json.loads(note.read_text())
        validator = str(saved.get("validator", "")) if saved.get("url") == url else ""
    if have and not validator:
        have = 0  # the part may be of another file
    headers = {"User-Agent": "kedge", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return have  # the part is complete
        _discard(part)  # the part is longer than the file: start again
        return _receive(url, part, checked, progress, timeout)
    with response:
        if not checked and url.startswith("https://") and not response.geturl().startswith("https://"):
            raise urllib.error.URLError(f"it was redirected to {response.geturl()}, which is not https")
        start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if have and response.status == 206 and (start is None or int(start[1]) != have):
            _discard(part)
            raise ConnectionError("the server sent another part of the file than the requested one")
        have = have if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdigit() else None
        tag = response.headers.get("ETag") or "W/"
        validator = response.headers.get("Last-Modified") or "" if tag.startswith("W/") else tag  # not a weak one
        with disk_errors(part):
            part.parent.mkdir(parents=True, exist_ok=True)
            if not have:
                part.unlink(missing_ok=True)  # before the note, or a kill between them would join two files
            note.write_text(json.dumps({"url": url, "validator": validator}))
            with part.open("r+b" if have else "wb") as stream:
                stream.seek(have)
                stream.truncate()
                _copy(response, stream, part, have, total, progress)
    return total


def _copy(response: Any, stream: Any, part: Path, done: int, total: int | None, progress: Progress | None) -> None:
    name = part.name.removeprefix(".").removesuffix(".part")
    while True:
        try:
            chunk = response.read(_CHUNK)
        except OSError as error:  # a timeout or reset, not a disk error
            raise ConnectionError(_reason(error)) from error
        if not chunk:
            return
        stream.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(f"fetching {name}", done, total)


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    part.with_name(f"{part.name}.json").unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(inner, BaseException):
        return _reason(inner)
    return getattr(error, "strerror", None) or str(inner or error) or type(error).__name__


def digest(path: Path, algorithm: str, progress: Progress | None = None) -> str:
    """The hexadecimal digest of a file."""
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    done, total = 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(2**20):
            hasher.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"checking {path.name}", done, total)
    return hasher.hexdigest()


def verified(
    path: Path,
    published: Checksum | None,
    *,
    came_from: str = "found in the folder",
    progress: Progress | None = None,
    computed: str | None = None,
) -> Checksum:
    """Compare a file with its published checksum, or with the recorded one; the first use writes the record.

    A file whose size and time have not changed since the last comparison is not read again. ``computed`` is the digest
    if it was computed already.
    """
    records = read_record(path.parent)
    entry = records.get(path.name, {})
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    expected = published
    if expected is None and entry.get("origin") == FIRST_USE:
        expected = Checksum(str(entry["algorithm"]), str(entry["digest"]), FIRST_USE)
    unchanged = computed is None and entry.get("stamp") == stamp
    if unchanged and expected is not None and entry["digest"] == expected.digest:
        return expected
    algorithm = "sha256" if expected is None else expected.algorithm
    actual = computed or digest(path, algorithm, progress)
    result = expected or Checksum(algorithm, actual, FIRST_USE)
    if actual != result.digest:
        origin, remedy = FIRST_USE, f"delete its entry in {path.parent / RECORD} if you changed it on purpose"
        if published is not None:
            origin = f"published ({published.origin})"
            remedy = "it is damaged or another file: delete it and fetch it again"
        raise FileFormatError(
            f"{path.name} has another {algorithm} than the one {origin}: {actual} instead of {result.digest} "
            f"in {path.parent}; {remedy}"
        )
    records[path.name] = dataclasses.asdict(result) | {
        "came_from": entry.get("came_from", came_from),
        "first_seen": entry.get("first_seen", datetime.now(UTC).isoformat(timespec="seconds")),
        "stamp": stamp,
    }
    # A set can be loaded from a read-only folder.
    with contextlib.suppress(InputError, OSError):
        write_json(path.parent / RECORD, records)
    return result


def read_record(folder: Path) -> dict[str, dict[str, Any]]:
    """The recorded checksums of a folder, by file name."""
    if not (folder / RECORD).exists():
        return {}
    try:
        records = json.loads(read_limited(folder / RECORD, 2**24))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{folder / RECORD} cannot be read: {error}; delete it to start a new record") from error
    if not isinstance(records, dict) or not all(isinstance(entry, dict) for entry in records.values()):
        raise FileFormatError(f"{folder / RECORD} is not a record of checksums; delete it to start a new one")
    return records
