"""Rows: what is said of each image, as parquet, CSV or JSON lines."""

import csv
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kedge.checks import needs
from kedge.detectors import Detection
from kedge.errors import FileFormatError, InputError

Row = Mapping[str, Any]
FORMATS = ("parquet", "csv", "jsonl")
COLUMNS = {
    "path": str,
    "label": str,
    "probability": float,
    "score": float,
    "temperature": float,
    "p_value": float,
    "is_ood": bool,
    "error": str,
}
ROWS = 4096  # held at a time


def format_of(path: Path, asked: str | None = None) -> str:
    """The format that a file's name, or the user, asks for.

    Example:
        >>> format_of(Path("out.jsonl"))
        'jsonl'
    """
    found = asked or path.suffix.removeprefix(".").lower()
    if found not in FORMATS:
        raise InputError(f"format must be one of {', '.join(FORMATS)}; got {found!r} for {path}: name it with --format")
    return found


def parquet_module() -> Any:
    """pyarrow.parquet; where it is missing, an error that says how to get it."""
    return needs("pyarrow.parquet", "score", "a parquet file")


def rows_of(names: Sequence[str], said: Detection | None, places: Sequence[int], errors: Mapping[int, str],
            classes: Sequence[str]) -> list[Row]:  # fmt: skip
    """A row for each image: what the detector said of it, or why it could not be read.

    Args:
        names: Of all images.
        said: Of those that could be read; None if none could.
        places: Which of ``names`` these are.
        errors: By place, for the others.
        classes: Names of the classes, where they have any.
    """
    rows: list[dict[str, Any]] = [dict.fromkeys(COLUMNS) | {"path": name} for name in names]
    for place, error in errors.items():
        rows[place]["error"] = error
    if said is not None:
        labels, sure = said.label.tolist(), said.probability.amax(dim=1).tolist()
        temperatures = [None] * len(said) if said.tau is None else said.tau.tolist()
        values = zip(places, labels, sure, said.score.tolist(), temperatures, said.p_value.tolist(),
                     said.is_ood.tolist(), strict=True)  # fmt: skip
        for place, label, probability, score, temperature, p_value, is_ood in values:
            rows[place] |= {
                "label": classes[label] if label < len(classes) else str(label),
                "probability": probability,
                "score": score,
                "temperature": temperature,
                "p_value": p_value,
                "is_ood": is_ood,
            }
    return list(rows)


class Writer(Protocol):
    """Takes rows."""

    def __call__(self, rows: Sequence[Row]) -> None:
        """Write a few."""


@contextmanager
def writing(path: Path, kind: str) -> Iterator[Writer]:
    """Open a file to write rows to."""
    if kind == "parquet":
        parquet = parquet_module()
        import pyarrow

        types = {str: pyarrow.string(), float: pyarrow.float64(), bool: pyarrow.bool_()}
        schema = pyarrow.schema([(name, types[of]) for name, of in COLUMNS.items()])
        with parquet.ParquetWriter(path, schema) as writer:
            yield lambda rows: writer.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows], schema))
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(COLUMNS))
            table.writeheader()
            yield lambda rows: table.writerows(map(_csv, rows))
    else:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield lambda rows: file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)


def read_rows(path: str | Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file, one after the other, with the types that they were written with."""
    file = Path(path)
    found = format_of(file, kind)
    try:
        for row in _parquet_rows(file) if found == "parquet" else _text_rows(file, found):
            if row["score"] is None and not row["error"]:
                raise ValueError(f"the row of {row['path']} has neither a score nor an error")
            yield row
    except OSError as error:
        raise InputError(f"rows must be a file that can be read; {file} cannot: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:  # pyarrow's own are of these kinds too
        raise FileFormatError(f"{file} must be {found} as kedge score writes it; it is not: {error}") from error


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    opened = parquet_module().ParquetFile(file)
    _check(opened.schema_arrow.names)
    for batch in opened.iter_batches(ROWS):
        yield from batch.to_pylist()


def _text_rows(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as lines:
        if kind == "csv":
            table = csv.DictReader(lines, restval="")
            _check(table.fieldnames or ())
            for row in table:
                yield {name: _typed(row[name], of) for name, of in COLUMNS.items()}
        else:
            for line in lines:
                row = json.loads(line)
                _check(row if isinstance(row, dict) else ())
                yield {name: _checked(name, row[name], of) for name, of in COLUMNS.items()}


def _check(columns: Container[str]) -> None:
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ValueError(f"the column {missing[0]} is missing")


def _checked(name: str, value: Any, kind: type) -> Any:
    """A value out of JSON, where numbers may be whole."""
    right = isinstance(value, kind) or (kind is float and isinstance(value, int) and not isinstance(value, bool))
    if value is not None and not right:
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


def _csv(row: Row) -> dict[str, Any]:
    return {name: "" if value is None else value for name, value in row.items()}


def _typed(text: str, kind: type) -> Any:
    if text == "" and kind is not str:
        return None
    if kind is bool:
        return text == "True"
    return (text or None) if kind is str else kind(text)
