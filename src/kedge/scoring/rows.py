"""Files of rows, one row per image: parquet, CSV or JSON lines."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kedge.checks import needs
from kedge.detectors.detection import ROW
from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.files import regular_file

Row = Mapping[str, Any]
Writer = Callable[[Sequence[Row]], None]
FORMATS = ("parquet", "csv", "jsonl")
_TYPES = {"label": int, "is_ood": bool} | dict.fromkeys(("name", "class", "reason", "error", "detector"), str)
# ``detector`` is the sha256 in the header of the detector's file.
COLUMNS: dict[str, type] = {name: _TYPES.get(name, float) for name in (*ROW, "error", "detector")}
# What kedge 0.1 wrote: its label was the name of the class, or the number as text if it had no name.
OLD_COLUMNS = ("path", "label", "probability", "score", "temperature", "p_value", "is_ood", "error")
NEWER = ("reason", "detector")  # older files have neither
LAYOUTS = (
    tuple(COLUMNS),
    tuple(name for name in COLUMNS if name != "reason"),
    tuple(name for name in COLUMNS if name not in NEWER),
    OLD_COLUMNS,
)
CHUNK = 4096  # rows in memory at a time
LARGEST_ROW = 1_000_000  # bytes of a parquet file's rows on average; names have at most a few thousand
# A spreadsheet takes text that begins like this for a formula; the last four are the wide forms of the first four.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_QUOTED = tuple(f"'{start}" for start in (*_FORMULAS, "'"))


def format_of(path: Path, chosen: str | None = None) -> str:
    """The chosen format, or the one that the file's name ends with."""
    kind = chosen or path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(f"format must be one of {', '.join(FORMATS)}; got {kind!r} for {path}: name it with --format")
    return kind


def parquet_module() -> Any:
    """The module pyarrow.parquet; if it is missing, an error that says how to install it."""
    return needs("pyarrow.parquet", "score", "a parquet file")


def shared_values(path: str | Path, columns: Sequence[str]) -> Any:
    """A parquet file whose texts and bytes are read as a dictionary: a value of many rows is in memory once."""
    module = parquet_module()
    schema = module.ParquetFile(path).schema
    leaves = [schema.column(number) for number in range(len(schema))]
    long = [leaf.path for leaf in leaves if leaf.path in columns and leaf.physical_type == "BYTE_ARRAY"]
    return module.ParquetFile(path, read_dictionary=long)


@contextmanager
def writing(path: Path, kind: str, *, raw_cells: bool = False) -> Iterator[Writer]:
    """Open a file to write rows to; in CSV, text like a formula gets an apostrophe in front unless ``raw_cells``."""
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
            yield table.writerows if raw_cells else lambda rows: table.writerows(map(_without_formulas, rows))
    else:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield lambda rows: file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)


def _without_formulas(row: Row) -> Row:
    """A row for CSV; an apostrophe that only looks like ours gets another, so that reading gives the text back."""
    starts = _FORMULAS + _QUOTED
    return {key: f"'{v}" if isinstance(v, str) and v.startswith(starts) else v for key, v in row.items()}


def read_rows(path: str | Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file one after the other, with the keys of `Detection.to_rows`, ``error`` and ``detector``.

    ``detector`` is the sha256 in the header of the detector's file; it and ``reason`` are None in older files. Files of
    kedge 0.1, which had other keys, are read too.
    """
    kind, file = format_of(Path(path), kind), regular_file(path)
    try:
        for raw in _raw_rows(file, kind):
            row = _with_current_keys(raw, kind)
            if row["score"] is None and not row["error"]:
                raise ValueError(f"the row of {row['name']} has neither a score nor an error")
            yield row
    except KedgeError:
        raise
    except Exception as error:  # a damaged file makes the readers raise nearly anything
        raise FileFormatError(f"{file} cannot be read as {kind} that kedge score wrote: {error}") from error


def _raw_rows(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    if kind == "parquet":
        table = shared_values(file, [*COLUMNS, *OLD_COLUMNS])
        groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
        if any(group.total_byte_size > LARGEST_ROW * group.num_rows for group in groups):
            raise ValueError(f"its rows have more than {LARGEST_ROW:,} bytes each")
        for batch in table.iter_batches(CHUNK):
            for cells in zip(*batch.columns, strict=True):
                yield {name: cell.as_py() for name, cell in zip(batch.schema.names, cells, strict=True)}
        return
    with file.open(encoding="utf-8", newline="") as lines:
        if kind == "csv" and not file.stat().st_size:
            raise ValueError(f"the column {ROW[0]} is missing")
        yield from map(json.loads, lines) if kind == "jsonl" else csv.DictReader(lines, restval="")


def _with_current_keys(raw: Any, kind: str) -> dict[str, Any]:
    raw = raw if isinstance(raw, dict) else {}
    old = "path" in raw and "name" not in raw
    if missing := [name for name in LAYOUTS[3 if old else 2] if name not in raw]:
        raise ValueError(f"the column {missing[0]} is missing")
    if old:
        label: Any = raw["label"] or None
        numbered = label is not None and str(label).isdecimal()
        label, name = (label if kind == "csv" else int(label), None) if numbered else (None, label)
        raw = raw | {"name": raw["path"], "tau": raw["temperature"], "label": label, "class": name}
    return {name: _value(name, raw.get(name), of, kind == "csv") for name, of in COLUMNS.items()}


def _value(name: str, value: Any, of: type, as_text: bool) -> Any:
    if value is None or (as_text and not value):
        return None
    if as_text and of is str:
        return value[1:] if value.startswith(_QUOTED) else value
    if as_text:
        return value == "True" if of is bool else of(value)
    if of is float and type(value) is int:  # JSON has no type for 1.0
        return float(value)
    if not isinstance(value, of):
        raise ValueError(f"{name} must be of type {of.__name__}, got {value!r:.80}")
    return value
