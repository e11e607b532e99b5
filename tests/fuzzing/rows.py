"""Files of rows, as `kedge watch` reads them, and tars, parquet files and folders of images to score."""

import contextlib
import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

import kedge
from fuzzing.damage import altered, any_of, damaged
from fuzzing.engine import Cases, target
from fuzzing.images import FILES, SIDE, damaged_image
from helpers import images, labelled, network
from kedge.drift import history
from kedge.scoring import plan, read_rows
from kedge.scoring.job import score_shards
from kedge.scoring.rows import COLUMNS, writing


def typical_rows(n=30):
    row = {
        "name": "a.png",
        "label": 1,
        "class": "cat",
        "probability": 0.5,
        "tau": None,
        "p_value": 0.5,
        "is_ood": False,
    }
    rows = [dict.fromkeys(COLUMNS) | row | {"score": 0.1 * number} for number in range(n)]
    rows[3] = dict.fromkeys(COLUMNS) | {"name": "b.png", "error": "broken"}
    return rows


@target("rows")
def rows_cases(home) -> Cases:
    whole = {}
    for kind in ("csv", "jsonl", "parquet"):
        with writing(home / f"rows.{kind}", kind) as write:
            write(typical_rows())
        whole[kind] = (home / f"rows.{kind}").read_bytes()
    scores = np.linspace(0, 3, 50)
    cells = (
        "nan",
        "inf",
        "-inf",
        "1e999",
        "9" * 400,
        "=1+1",
        "x",
        "",
        "True",
        "-1",
        "0x1",
        "1_0",
        "\u0663",
        "a" * 140_000,
    )

    def case(rng, folder):
        kind = any_of(rng, ("csv", "jsonl", "parquet"))
        path, data = folder / f"rows.{kind}", whole[kind]
        how = rng.integers(5)
        if how == 0:
            data = damaged(rng, data, tuple(whole.values()), head=400)
        elif kind == "csv":
            table = list(csv.reader(io.StringIO(data.decode())))
            for _ in range(rng.integers(1, 4)):
                line = any_of(rng, table)
                line[int(rng.integers(len(line)))] = any_of(rng, cells)
            target = io.StringIO()
            csv.writer(target, quoting=int(any_of(rng, (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)))).writerows(table)
            data = target.getvalue().encode("utf-8", "surrogatepass")
        else:
            rows = typical_rows()
            rows[int(rng.integers(len(rows)))] = altered(rng, any_of(rng, rows))
            if kind == "jsonl":
                text = "".join(f"{json.dumps(row)}\n" for row in rows)
                data = (text + any_of(rng, ("", "", "[" * 100_000, '{"score": ' + "9" * 5000 + "}", "\0"))).encode()
            else:
                data = table_bytes(rng, rows)
        path.write_bytes(data)
        read = list(read_rows(path))
        for row in read:
            assert list(row) == list(COLUMNS)
            for name, of in COLUMNS.items():
                assert row[name] is None or isinstance(row[name], (of, int) if of is float else of), (name, row[name])
        found = np.array([row["score"] for row in read if not row["error"]], dtype=np.float64)
        if len(found):
            history(found, scores, window=20)
        return True

    yield case


def table_bytes(rng, rows) -> bytes:
    """Rows as parquet, with columns of other types, missing or twice."""
    columns = {}
    for name in COLUMNS:
        values = [row.get(name) if isinstance(row, dict) else None for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError, ValueError, UnicodeError):
            columns[name] = pyarrow.array([None if value is None else repr(value) for value in values])
    name, kinds = any_of(rng, sorted(COLUMNS)), (pyarrow.string(), pyarrow.binary(), pyarrow.float32(), pyarrow.int8())
    change = rng.integers(4)
    if change == 0:
        try:
            columns[name] = columns[name].cast(any_of(rng, kinds))
        except pyarrow.ArrowException:
            columns[name] = pyarrow.nulls(len(rows))
    elif change == 1:
        del columns[name]
    elif change == 2:
        columns[name] = pyarrow.array([[1.5]] * len(rows))
    target = io.BytesIO()
    with contextlib.suppress(pyarrow.ArrowNotImplementedError):  # a struct without fields
        parquet.write_table(pyarrow.table(columns), target)
    return target.getvalue()


@target("score")
def score_cases(home) -> Cases:
    detector, plain = kedge.MSP(network(classes=3)), io.BytesIO()
    detector.fit(labelled(60, 3, side=SIDE)).calibrate(images(50, side=SIDE, seed=1))
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name in ("a.png", "../../b.png", "/etc/c.png", "d/e.jpg"):
            info = tarfile.TarInfo(name)
            info.size = len(FILES[0])
            tar.addfile(info, io.BytesIO(FILES[0]))
    odd = [3, 1.5, True, ["a"], {"bytes": 3, "path": None}, {"path": "gone"}, {"bytes": b"x"}, "gone", "../secret", b""]

    def case(rng, folder):
        kind = any_of(rng, ("tar", "parquet", "folder"))
        path = folder / f"images.{kind}"
        if kind == "tar":
            path.write_bytes(damaged(rng, plain.getvalue(), head=600))
        elif kind == "parquet":
            values = [damaged_image(rng) for _ in range(3)] if rng.random() < 0.7 else [any_of(rng, odd)] * 2
            target = io.BytesIO()
            parquet.write_table(pyarrow.table({"image": values}), target)
            path.write_bytes(damaged(rng, target.getvalue()) if rng.random() < 0.5 else target.getvalue())
        else:
            path.mkdir()
            for number in range(3):
                (path / f"{number}.{any_of(rng, ('png', 'jpg', 'tif', 'webp'))}").write_bytes(damaged_image(rng))
            any_of(rng, (Path.touch, Path.mkdir, _loop))(path / "odd.png")
        accepted = False
        for number, shard in enumerate(plan([path])):
            ((_, rows),) = score_shards(detector, [(number, shard)], workers=1)
            assert [row["name"] for row in rows] == shard.names()
            for row in rows:
                assert (row["error"] is None) == (row["score"] is not None)
                assert row["error"] is None or "object at 0x" not in row["error"]
                accepted |= row["error"] is None
        return accepted

    yield case


def _loop(path):
    path.symlink_to(path)
