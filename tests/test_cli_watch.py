"""``kedge watch``: an alarm where the scores have moved, none where they have not, and a page that shows it."""

import json
import math
import re

import numpy as np
import pyarrow.parquet
import pytest

import kedge
from helpers import images, labelled, network, picture, run_cli
from kedge.drift import scores_of
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.io.artifact import read_header
from kedge.scoring import read_rows, score_files
from kedge.scoring.rows import COLUMNS, OLD_COLUMNS
from test_report import check

HEAD = (",".join(COLUMNS) + "\n").encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A detector, a stream of scores like those of its calibration, and one that moves after 300 images."""
    home = tmp_path_factory.mktemp("watch")
    detector = kedge.MSP(network(classes=3)).fit(labelled(9, classes=3, side=16))
    detector.save(home / "uncalibrated.kedge")
    detector.calibrate(images(400, side=16, seed=1)).save(home / "msp.kedge")
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
    return run_cli("watch", folder / f"{detector}.kedge", *arguments, "--overwrite")


def watched(folder, *arguments):
    done = watch(folder, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_stream_that_moves_raises_both_alarms_after_it_moved_and_one_that_stays_raises_none(folder, tmp_path):
    result = watched(folder, folder / "moved.jsonl")
    assert (result["images"], result["drift"]) == (600, True)
    assert 300 <= result["martingale_since"] < 400
    assert 300 <= result["window_since"] < 400
    check((folder / "moved-drift.html").read_text())
    assert watched(folder, folder / "first.jsonl", folder / "second.jsonl") == result  # one stream in that order
    assert (folder / "second-drift.html").exists()
    result = watched(folder, folder / "same.jsonl", "--out", tmp_path / "page.html")
    assert (result["drift"], result["martingale_since"], result["window_since"]) == (False, None, None)
    page = (tmp_path / "page.html").read_text()
    check(page)
    assert "No drift" in page
    for name, code in (("same", 0), ("moved", 4)):
        assert watch(folder, folder / f"{name}.jsonl", "--fail-on-drift").exit_code == code


def test_the_page_shows_images_before_and_since_the_change(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        picture(1).save(f"{name}.png")
    scores = [json.loads(line)["score"] for line in (folder / "moved.jsonl").read_text().splitlines()]
    rows = [
        dict.fromkeys(COLUMNS)
        | {"name": "old.png" if i < 300 else "new.png", "label": i // 300, "score": score, "is_ood": i >= 300}
        for i, score in enumerate(scores)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [line_of_an_error(), *rows]))
    watched(folder, tmp_path / "rows.jsonl")
    text = (tmp_path / "rows-drift.html").read_text()
    page = check(text)
    start = int(re.search(r"have changed since about image (\d+) of 600", page.text)[1])
    assert abs(start - 300) <= 30
    assert "probability of at most one in" in page.text
    before, since, highest = (part.partition("</div>")[0] for part in text.split("<h3>")[1:4])
    assert (before.count('alt="old.png"'), before.count('alt="new.png"')) == (6, 0)
    assert since.count('alt="new.png"') >= 10
    largest = sorted(range(start, 600), key=lambda i: -scores[i])[:6]
    assert [int(n) for n in re.findall(r"image (\d+)", highest)] == largest
    assert text.count("<details") == 2  # the statistics
    classes = re.findall(r'<th scope="row">(\d)</th><td>([\d.]+)</td><td>([\d.]+)</td>', text)
    assert sorted(name for name, *_ in classes) == ["0", "1"]
    shares = {name: (float(before), float(since)) for name, before, since in classes}
    assert shares["0"][0] > 90 > 10 > shares["1"][0]
    assert shares["1"][1] > 90 > 10 > shares["0"][1]


def line_of_an_error():
    return dict.fromkeys(COLUMNS) | {"name": "broken.png", "error": "is broken"}


def test_rows_with_an_error_are_left_out_and_names_without_a_suffix_need_a_format(folder, tmp_path):
    write(tmp_path / "rows.jsonl", [0.1, 0.2], errors=["a", "b"])
    assert watched(folder, tmp_path / "rows.jsonl")["images"] == 2
    write(tmp_path / "none.jsonl", [], errors=["a"])
    with pytest.raises(InputError, match="ROWS must hold at least one score"):
        raise watch(folder, tmp_path / "none.jsonl").exception
    rows = (tmp_path / "rows.jsonl").rename(tmp_path / "rows\x1b[2J")
    with pytest.raises(InputError, match=r"format must be one of .*: name it with --format"):
        raise watch(folder, rows).exception
    done = watch(folder, rows, "--format", "jsonl")
    assert "rows\\x1b[2J-drift.html" in done.output  # what a terminal would obey is printed as an escape


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("none.csv", None, InputError, r"none\.csv cannot be read: No such file"),
        ("other.csv", b"a,b\n1,2\n", FileFormatError, r"other\.csv cannot be read as csv .*: the column name is"),
        ("empty.csv", b"", FileFormatError, "the column name is missing"),
        ("bad.csv", HEAD + b"a.png,0,cat,much,1,1,1,True,\n", FileFormatError, "could not convert string to float"),
        ("bad.jsonl", b'{"name": "a.png"\n', FileFormatError, r"bad\.jsonl cannot be read as jsonl"),
        ("list.jsonl", b"[1, 2]\n", FileFormatError, "the column name is missing"),
        ("other.jsonl", b'{"name": "a.png"}\n', FileFormatError, "the column label is missing"),
        ("text.jsonl", line(score="much"), FileFormatError, "score must be of type float, got 'much'"),
        ("flag.jsonl", line(score=True), FileFormatError, "score must be of type float, got True"),
        ("empty.jsonl", line(score=None), FileFormatError, r"the row of a\.png has neither a score nor an error"),
        ("bytes.jsonl", b"\xff\xfe", FileFormatError, "can't decode"),
        ("digits.jsonl", line(score=10**400), FileFormatError, r"digits\.jsonl cannot .*: int too large"),
        ("deep.jsonl", b"[" * 100_000, FileFormatError, r"deep\.jsonl cannot .*: maximum recursion"),
        ("nan.jsonl", line(score=math.nan), InputError, "scores must be finite"),
        ("bad.parquet", b"no parquet", FileFormatError, r"bad\.parquet cannot be read as parquet"),
    ],
)
def test_files_that_are_no_rows_are_an_error_in_a_line(folder, tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words):
        raise watch(folder, tmp_path / name).exception


def test_values_of_another_type_in_a_parquet_file_are_an_error_in_a_line(folder, tmp_path):
    row = dict.fromkeys(COLUMNS, "much") | {"error": None}
    old = dict.fromkeys(OLD_COLUMNS) | {"path": "a.png", "label": 7.5, "score": "much"}
    for wrong in (row, old, old | {"label": 7, "score": 1.0, "path": 3}, row | {"score": [1.0]}, old | {"score": b"1"}):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([wrong]), tmp_path / "rows.parquet")
        with pytest.raises(FileFormatError, match=r"rows\.parquet cannot be read as parquet .* must be of type"):
            raise watch(folder, tmp_path / "rows.parquet").exception


def test_rows_of_another_detector_are_refused(folder, tmp_path):
    identity, other = read_header(folder / "msp.kedge")["sha256"], read_header(folder / "uncalibrated.kedge")["sha256"]
    file = tmp_path / "rows.jsonl"
    for values, accepted in (
        ({"detector": identity, "class": "cat"}, True),
        ({"detector": other}, False),
        ({"label": 1, "class": "bee"}, True),  # older rows have the class alone
        ({"class": "bee"}, True),
        ({"label": 1, "class": "dog"}, False),
    ):
        file.write_bytes(line(score=1.0, detector=identity) + b"\n" + line(score=2.0, **values))
        if not accepted:
            with pytest.raises(InputError, match=r"ROWS must be of .*msp\.kedge, .*a\.png has .*--any-detector"):
                raise watch(folder, file).exception
            assert not (tmp_path / "rows-drift.html").exists()
        assert watched(folder, file, *([] if accepted else ["--any-detector"]))["images"] == 2
        (tmp_path / "rows-drift.html").unlink()
    assert scores_of(read_rows(file), folder / "msp.kedge", any_detector=True).tolist() == [1, 2]
    for number in range(3):
        picture(number).save(tmp_path / f"{number}.png")
    score_files(folder / "msp.kedge", [str(tmp_path)], tmp_path / "a.csv")
    assert watched(folder, tmp_path / "a.csv")["images"] == 3
    kedge.load(folder / "msp.kedge").calibrate(images(50, side=16, seed=2)).save(tmp_path / "anew.kedge")
    with pytest.raises(InputError, match="ROWS must be of"):
        raise watch(tmp_path, tmp_path / "a.csv", detector="anew").exception


def test_an_uncalibrated_detector_is_an_error(folder):
    with pytest.raises(NotReadyError, match="is not: run kedge calibrate first"):
        raise watch(folder, folder / "same.jsonl", detector="uncalibrated").exception
