"""Checksums of the files in a set's folder: compared with the published one, or with the one recorded on first use."""

import contextlib
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kedge.data.sources.entry import Checksum, Progress
from kedge.errors import FileFormatError, InputError
from kedge.files import atomic, read_limited

RECORD = "checksums.json"
FIRST_USE = "recorded on first use"


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
    if (
        computed is None
        and expected is not None
        and entry.get("stamp") == stamp
        and (entry.get("algorithm"), entry.get("digest")) == (expected.algorithm, expected.digest)
    ):
        return expected
    algorithm = expected.algorithm if expected is not None else "sha256"
    actual = computed or digest(path, algorithm, progress)
    if expected is not None and actual != expected.digest:
        if expected.origin == FIRST_USE:
            origin, remedy = FIRST_USE, f"delete its entry in {path.parent / RECORD} if you changed it on purpose"
        else:
            origin = f"published ({expected.origin})"
            remedy = "it is damaged or another file: delete it and fetch it again"
        raise FileFormatError(
            f"{path.name} has another {algorithm} than the one {origin}: {actual} instead of {expected.digest} "
            f"in {path.parent}; {remedy}"
        )
    result = expected or Checksum(algorithm, actual, FIRST_USE)
    records[path.name] = {
        "algorithm": result.algorithm,
        "digest": result.digest,
        "origin": result.origin,
        "came_from": entry.get("came_from", came_from),
        "first_seen": entry.get("first_seen", datetime.now(UTC).isoformat(timespec="seconds")),
        "stamp": stamp,
    }
    # A set can be loaded from a read-only folder.
    with contextlib.suppress(InputError, OSError), atomic(path.parent / RECORD) as temporary:
        temporary.write_text(json.dumps(records, indent=1))
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
