"""``kedge watch``: an alarm where the scores have moved, none where they have not, and a page that shows it."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.scoring.rows import COLUMNS
from test_report import check

HEAD = (",".join(COLUMNS) + "\n").encode()


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A detector, a stream of scores like those of its calibration, and one that moves after 300 images."""
    home = tmp_path_factory.mktemp("watch")
    images = torch.rand(400, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    net = kedge.models.build("compact", width=4, classes=3)
    detector = kedge.MSP(net).fit(images[:10]).calibrate(images)
    detector.save(home / "msp.kedge")
    kedge.MSP(net).fit(images[:10]).save(home / "uncalibrated.kedge")
    known, rng = detector.calibration.scores.numpy(), np.random.default_rng(1)
    same = rng.choice(known, 600)
    write(home / "same.jsonl", same)
    write(home / "moved.jsonl", np.append(same[:300], same[300:] + 2 * known.std()))
    write(home / "first.jsonl", same[:300])
    write(home / "second.jsonl", same[300:] + 2 * known.std())
    return home


def write(path, scores, errors=()):
    rows = [dict.fromkeys(COLUMNS) | {"name": str(i), "score": float(s)} for i, s in enumerate(scores)]
    rows += [dict.fromkeys(COLUMNS) | {"name": name, "error": "is broken"} for name in errors]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def line(**values):
    return json.dumps(dict.fromkeys(COLUMNS) | {"name": "a.png"} | values).encode()


def watched(*arguments):
    done = run("watch", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_stream_that_moves_raises_both_alarms_after_it_moved(folder):
    said = watched(folder / "moved.jsonl", "--detector", folder / "msp.kedge")
    assert said["images"] == 600
    assert said["drift"] is True
    assert 300 <= said["martingale_since"] < 400
    assert 300 <= said["window_since"] < 400
    check((folder / "moved-drift.html").read_text())


def test_a_stream_that_stays_raises_none(folder, tmp_path):
    said = watched(folder / "same.jsonl", "--detector", folder / "msp.kedge", "--out", tmp_path / "page.html")
    assert (said["drift"], said["martingale_since"], said["window_since"]) == (False, None, None)
    page = (tmp_path / "page.html").read_text()
    check(page)
    assert "No drift" in page


def test_several_files_are_one_stream_in_the_order_given(folder):
    one = watched(folder / "moved.jsonl", "--detector", folder / "msp.kedge")
    two = watched(folder / "first.jsonl", folder / "second.jsonl", "--detector", folder / "msp.kedge")
    assert one == two
    assert (folder / "second-drift.html").exists()


def test_the_exit_code_tells_of_drift_where_asked(folder):
    code = {
        name: run("watch", folder / f"{name}.jsonl", "--detector", folder / "msp.kedge", "--fail-on-drift").exit_code
        for name in ("same", "moved")
    }
    assert code == {"same": 0, "moved": 4}


def test_rows_with_an_error_are_left_out(folder, tmp_path):
    write(tmp_path / "rows.jsonl", [0.1, 0.2], errors=["a", "b"])
    assert watched(tmp_path / "rows.jsonl", "--detector", folder / "msp.kedge")["images"] == 2
    write(tmp_path / "none.jsonl", [], errors=["a"])
    with pytest.raises(InputError, match="rows must hold at least one score"):
        raise run("watch", tmp_path / "none.jsonl", "--detector", folder / "msp.kedge").exception


def test_rows_of_a_name_that_does_not_tell_their_format(folder, tmp_path):
    (tmp_path / "rows").write_bytes((folder / "same.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"format must be one of .*: name it with --format"):
        raise run("watch", tmp_path / "rows", "--detector", folder / "msp.kedge").exception
    assert watched(tmp_path / "rows", "--detector", folder / "msp.kedge", "--format", "jsonl")["images"] == 600


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
def test_files_that_are_no_rows_are_told_in_a_line(folder, tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words):
        raise run("watch", tmp_path / name, "--detector", folder / "msp.kedge").exception


def test_without_calibration_there_is_nothing_to_compare_with(folder):
    with pytest.raises(NotReadyError, match="is not: run kedge calibrate first"):
        raise run("watch", folder / "same.jsonl", "--detector", folder / "uncalibrated.kedge").exception
