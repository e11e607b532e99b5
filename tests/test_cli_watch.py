"""``kedge watch``: an alarm where the scores have moved, none where they have not, and a page that shows it."""

import json

import numpy as np
import pytest
import torch

import kedge
from helpers import run_cli
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.scoring.rows import COLUMNS
from test_report import check

HEAD = (",".join(COLUMNS) + "\n").encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A detector, a stream of scores like those of its calibration, and one that moves after 300 images."""
    home = tmp_path_factory.mktemp("watch")
    images = torch.rand(400, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    detector = kedge.MSP(kedge.models.build("compact", width=4, classes=3)).fit(images[:10])
    detector.save(home / "uncalibrated.kedge")
    detector.calibrate(images).save(home / "msp.kedge")
    calibrated = detector.calibration.scores.numpy()
    same = np.random.default_rng(1).choice(calibrated, 600)
    first, second = same[:300], same[300:] + 2 * calibrated.std()
    for name, scores in {"same": same, "moved": np.append(first, second), "first": first, "second": second}.items():
        write(home / f"{name}.jsonl", scores)
    return home


def write(path, scores, errors=()):
    rows = [dict.fromkeys(COLUMNS) | {"name": str(i), "score": float(s)} for i, s in enumerate(scores)]
    rows += [dict.fromkeys(COLUMNS) | {"name": name, "error": "is broken"} for name in errors]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def line(**values):
    return json.dumps(dict.fromkeys(COLUMNS) | {"name": "a.png"} | values).encode()


def watch(folder, *arguments, detector="msp"):
    return run_cli("watch", *arguments, "--detector", folder / f"{detector}.kedge")


def watched(folder, *arguments):
    done = watch(folder, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_stream_that_moves_raises_both_alarms_after_it_moved(folder):
    result = watched(folder, folder / "moved.jsonl")
    assert (result["images"], result["drift"]) == (600, True)
    assert 300 <= result["martingale_since"] < 400
    assert 300 <= result["window_since"] < 400
    check((folder / "moved-drift.html").read_text())
    assert watched(folder, folder / "first.jsonl", folder / "second.jsonl") == result  # one stream in that order
    assert (folder / "second-drift.html").exists()


def test_a_stream_that_stays_raises_none(folder, tmp_path):
    result = watched(folder, folder / "same.jsonl", "--out", tmp_path / "page.html")
    assert (result["drift"], result["martingale_since"], result["window_since"]) == (False, None, None)
    page = (tmp_path / "page.html").read_text()
    check(page)
    assert "No drift" in page


def test_fail_on_drift_sets_the_exit_code(folder):
    for name, code in (("same", 0), ("moved", 4)):
        assert watch(folder, folder / f"{name}.jsonl", "--fail-on-drift").exit_code == code


def test_rows_with_an_error_are_left_out(folder, tmp_path):
    write(tmp_path / "rows.jsonl", [0.1, 0.2], errors=["a", "b"])
    assert watched(folder, tmp_path / "rows.jsonl")["images"] == 2
    write(tmp_path / "none.jsonl", [], errors=["a"])
    with pytest.raises(InputError, match="rows must hold at least one score"):
        raise watch(folder, tmp_path / "none.jsonl").exception


def test_rows_whose_name_has_no_suffix_need_a_format(folder, tmp_path):
    (tmp_path / "rows").write_bytes((folder / "same.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"format must be one of .*: name it with --format"):
        raise watch(folder, tmp_path / "rows").exception
    assert watched(folder, tmp_path / "rows", "--format", "jsonl")["images"] == 600


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("none.csv", None, InputError, r"rows must be a file that can be read; .*none\.csv cannot: No such file"),
        ("none.parquet", None, InputError, r"rows must be a file that can be read; .*none\.parquet cannot"),
        ("other.csv", b"a,b\n1,2\n", FileFormatError, r"other\.csv must be csv as kedge score .*: the column name is"),
        ("empty.csv", b"", FileFormatError, "the column name is missing"),
        ("bad.csv", HEAD + b"a.png,0,cat,much,1,1,1,True,\n", FileFormatError, "could not convert string to float"),
        ("bad.jsonl", b'{"name": "a.png"\n', FileFormatError, r"bad\.jsonl must be jsonl as kedge score writes it"),
        ("list.jsonl", b"[1, 2]\n", FileFormatError, "the column name is missing"),
        ("other.jsonl", b'{"name": "a.png"}\n', FileFormatError, "the column label is missing"),
        ("text.jsonl", line(score="much"), FileFormatError, "score must be of type float, got 'much'"),
        ("flag.jsonl", line(score=True), FileFormatError, "score must be of type float, got True"),
        ("empty.jsonl", line(score=None), FileFormatError, r"the row of a\.png has neither a score nor an error"),
        ("bytes.jsonl", b"\xff\xfe", FileFormatError, "can't decode"),
        ("bad.parquet", b"no parquet", FileFormatError, r"bad\.parquet must be parquet as kedge score writes it"),
    ],
)
def test_files_that_are_no_rows_are_an_error_in_a_line(folder, tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words):
        raise watch(folder, tmp_path / name).exception


def test_an_uncalibrated_detector_is_an_error(folder):
    with pytest.raises(NotReadyError, match="is not: run kedge calibrate first"):
        raise watch(folder, folder / "same.jsonl", detector="uncalibrated").exception
