"""Files of rows, one row per image: parquet, CSV or JSON lines."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kedge.checks import needs
from kedge.detectors.detection import ROW
from kedge.errors import FileFormatError, InputError

Row = Mapping[str, Any]
Writer = Callable[[Sequence[Row]], None]
FORMATS = ("parquet", "csv", "jsonl")
_TYPES = {"label": int, "is_ood": bool} | dict.fromkeys(("name", "class", "error"), str)
COLUMNS: dict[str, type] = {name: _TYPES.get(name, float) for name in (*ROW, "error")}
# What kedge 0.1 wrote: its label was the name of the class, or the number as text if it had no name.
OLD_COLUMNS = ("path", "label", "probability", "score", "temperature", "p_value", "is_ood", "error")
CHUNK = 4096  # rows in memory at a time


def format_of(path: Path, chosen: str | None = None) -> str:
    """The chosen format, or the one that the file's name ends with."""
    kind = chosen or path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(f"format must be one of {', '.join(FORMATS)}; got {kind!r} for {path}: name it with --format")
    return kind


def parquet_module() -> Any:
    """The module pyarrow.parquet; if it is missing, an error that says how to install it."""
    return needs("pyarrow.parquet", "score", "a parquet file")


@contextmanager
def writing(path: Path, kind: str) -> Iterator[Writer]:
    """Open a file to write rows to."""
    if kind == "parquet":
        parquet = parquet_module()
        import pyarrow

        types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
        schema = pyarrow.schema([(name, types[of]) for name, of in COLUMNS.items()])
        with parquet.ParquetWriter(path, schema) as writer:
            yield lambda rows: writer.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows], schema))
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(COLUMNS))  # writes None as an empty field
            table.writeheader()
            yield table.writerows
    else:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield lambda rows: file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)


def read_rows(path: str | Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file one after the other, with the keys of `Detection.to_rows` and ``error``.

    Files of kedge 0.1, which had other keys, are read too.
    """
    file = Path(path)
    kind = format_of(file, kind)
    try:
        for raw in _raw_rows(file, kind):
            row = _with_current_keys(raw, kind)
            if row["score"] is None and not row["error"]:
                raise ValueError(f"the row of {row['name']} has neither a score nor an error")
            yield row
    except OSError as error:
        raise InputError(f"rows must be a file that can be read; {file} cannot: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:  # pyarrow's own are of these kinds too
        raise FileFormatError(f"{file} must be {kind} as kedge score writes it; it is not: {error}") from error


def _raw_rows(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    if kind == "parquet":
        for batch in parquet_module().ParquetFile(file).iter_batches(CHUNK):
            yield from batch.to_pylist()
        return
    with file.open(encoding="utf-8", newline="") as lines:
        if kind == "jsonl":
            yield from map(json.loads, lines)
            return
        table = csv.DictReader(lines, restval="")
        if not table.fieldnames:
            raise ValueError(f"the column {ROW[0]} is missing")
        yield from table


def _with_current_keys(raw: Any, kind: str) -> dict[str, Any]:
    raw = raw if isinstance(raw, dict) else {}
    old = "path" in raw and "name" not in raw
    columns = OLD_COLUMNS if old else COLUMNS
    if missing := [name for name in columns if name not in raw]:
        raise ValueError(f"the column {missing[0]} is missing")
    if old:
        label: Any = raw["label"] or None
        numbered = label is not None and label.isdecimal()
        label, name = (label if kind == "csv" else int(label), None) if numbered else (None, label)
        raw = raw | {"name": raw["path"], "tau": raw["temperature"], "label": label, "class": name}
    return {name: (_parsed if kind == "csv" else _checked)(name, raw[name], of) for name, of in COLUMNS.items()}


def _checked(name: str, value: Any, kind: type) -> Any:
    whole = kind is float and isinstance(value, int) and not isinstance(value, bool)  # JSON has no type for 1.0
    if value is not None and not isinstance(value, kind) and not whole:
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


def _parsed(_: str, text: str | None, kind: type) -> Any:
    if not text:
        return None
    return text == "True" if kind is bool else kind(text)
