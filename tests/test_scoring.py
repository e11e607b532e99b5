"""Scoring files: every input exactly once, in order, whatever is broken and however often the job is killed."""

import base64
import csv
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import kedge
from helpers import StopError, encoded, images, network, picture, run_cli, small_amp
from kedge.errors import FileFormatError, InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.io import artifact
from kedge.scoring import FORMATS, job, plan, read_rows, score_files, summarize_rows
from kedge.scoring.inputs import open_named
from kedge.scoring.page import row_card
from processes import FRESH
from test_report import check

KEYS = ["name", "label", "class", "probability", "tau", "score", "p_value", "is_ood", "reason", "error", "detector"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Thirty images in folders, two files that are none, the same images in a tar and in a parquet file; a detector."""
    home = tmp_path_factory.mktemp("scoring")
    for number in range(30):
        file = home / "photos" / f"{number % 3}" / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(file)
    (home / "photos" / "0" / "broken.jpg").write_bytes(b"\xff\xd8\xff no more than a start")
    (home / "photos" / "1" / "empty.png").write_bytes(b"")
    (home / "photos" / "notes.md").write_text("no image, and not named like one")
    with tarfile.open(home / "shard.tar", "w") as tar:
        for number in range(30):
            for name, data in ((f"{number:02}.png", encoded(picture(number))), (f"{number:02}.cls", b"1")):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    table = {"image": [{"bytes": encoded(picture(n)), "path": None} for n in range(30)], "id": list(range(30))}
    pyarrow.parquet.write_table(pyarrow.table(table), home / "rows.parquet", row_group_size=7)
    small_amp().save(home / "detector.kedge")
    return home


def scored(home, sources, out, detector="detector.kedge", **options):
    score_files(home / detector, list(map(str, sources)), out, **options)
    return list(read_rows(out))


def cli(home, *arguments):
    return run_cli("score", home / "detector.kedge", *arguments)


def stop(*_, **__):
    raise StopError


def stop_after(count):
    return lambda done, total: stop() if done >= count else None


def run_apart(code, target, *arguments):
    """Run a function in a process that ends with this exit code."""
    life = FRESH.Process(target=target, args=arguments)
    life.start()
    life.join(timeout=300)
    assert life.exitcode == code


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_detection_becomes_rows_with_one_schema():
    detection, expected = small_amp()(images(2, side=12)), ["name", "label", "class", "probability", "tau", "score"]
    first, second = detection.to_rows(("ant", "bee"), ["a", "b"])
    assert list(first) == list(second) == [*expected, "p_value", "is_ood", "reason"]
    assert (first["name"], first["label"], first["score"]) == ("a", int(detection.label[0]), float(detection.score[0]))
    assert first["class"] == dict(enumerate(("ant", "bee"))).get(first["label"])
    assert first["probability"] == float(detection.probability[0].max())
    assert kedge.MSP(network()).fit(images()).calibrate(images(seed=1))(images(1)).to_rows()[0]["tau"] is None
    with pytest.raises(InputError, match="names"):
        detection.to_rows(names=["a"])


def test_a_row_for_each_image_equals_the_detector_s_result(home, tmp_path):
    files = sorted(p for p in (home / "photos").rglob("*") if p.suffix in (".png", ".jpg"))
    detector, identity = kedge.load(home / "detector.kedge"), artifact.read_header(home / "detector.kedge")["sha256"]
    good = [file for file in files if file.stem not in ("broken", "empty")]
    expected = {file: detector([file]).to_rows(detector.classes, [str(file)])[0] for file in good}
    for kind, shard in zip(FORMATS, (1, 4, 512), strict=True):
        rows = scored(home, [home / "photos"], tmp_path / f"out.{kind}", shard=shard, batch=5)
        assert [row["name"] for row in rows] == list(map(str, files))
        for file, row in zip(files, rows, strict=True):
            assert (list(row), row["detector"]) == (KEYS, identity)
            if file not in expected:
                assert "cannot be read as an image" in row["error"]
                assert row["score"] is row["label"] is row["is_ood"] is None
                continue
            for key, value in expected[file].items():
                exact = not isinstance(value, float)
                assert row[key] == (value if exact else pytest.approx(value, rel=1e-4, abs=1e-6)), key  # float32
            assert row["error"] is None
        assert not (tmp_path / f"out.{kind}.parts").exists()


def write_rows(file, rows):
    """Rows as any program might write them."""
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as lines:
            csv.writer(lines).writerows([rows[0].keys(), *(row.values() for row in rows)])
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_older_files_are_read_with_the_keys_of_today(tmp_path, kind):
    old = {"path": "a.png", "label": "cat", "probability": 0.5, "score": 2.0, "temperature": 1.5, "p_value": 0.25}
    old |= {"is_ood": True, "error": None}
    broken = dict.fromkeys(old) | {"path": "c.png", "error": "broken"}
    write_rows(tmp_path / f"old.{kind}", [old, old | {"path": "b.png", "label": "7", "is_ood": False}, broken])
    first, second, third = read_rows(tmp_path / f"old.{kind}")
    values = {"probability": 0.5, "tau": 1.5, "score": 2.0, "p_value": 0.25, "error": None, "detector": None}
    values |= {"reason": None}
    assert first == {"name": "a.png", "label": None, "class": "cat", "is_ood": True} | values
    assert second == {"name": "b.png", "label": 7, "class": None, "is_ood": False} | values
    assert third == dict.fromkeys(KEYS) | {"name": "c.png", "error": "broken"}
    for newer in ({"reason"}, {"reason", "detector"}):
        write_rows(tmp_path / f"before.{kind}", [{key: second[key] for key in second if key not in newer}])
        assert list(read_rows(tmp_path / f"before.{kind}")) == [second]


FORMULAS = ["=1+1", "+1", "-1", "@a", "\tb", "\rc", "\uff1dd", "'=e", "''f", "'g", "'", "h", "i=1"]


def test_text_that_a_spreadsheet_takes_for_a_formula_is_neutralised_in_csv(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(FORMULAS):
        picture(number).save(f"{name}.png")
    with open("=broken.png", "wb") as file:
        file.write(b"broken")
    detector = small_amp()
    detector.classes = ("=cmd|' /C calc'!A0", "-2+3", "cow")
    detector.save("detector.kedge")
    given = sorted(p.name for p in tmp_path.glob("*.png"))
    for options in ({}, {"raw_cells": True}):
        score_files("detector.kedge", given, "out.csv", overwrite=True, shard=3, **options)
        with open("out.csv", newline="") as lines:
            cells = list(csv.DictReader(lines))
        text = [row[key] for row in cells for key in ("name", "class", "error")]
        assert any(cell.startswith(tuple("=+-@\t\r")) for cell in text) == bool(options)
        assert all(float(row["score"]) < 0 for row in cells if not row["error"])  # numbers stay numbers
        rows = list(read_rows("out.csv"))
        assert [row["error"][:7] for row in rows if row["error"]] == ["=broken"]
        assert {row["class"] for row in rows if not row["error"]} <= set(detector.classes)
        if not options:
            assert [row["name"] for row in rows] == given
    assert cli(tmp_path, "=1+1.png", "-o", "raw.csv", "--raw-cells", "--no-summary").exit_code == 0
    assert Path("raw.csv").read_text().splitlines()[1].startswith("=1+1.png,")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_name_of_140_000_characters_is_cut_and_ends_no_job(home, tmp_path, kind):
    (tmp_path / "list.txt").write_text("".join(f"{'x' * 140_000}{n}.png\n" for n in range(2)))
    detector = small_amp()
    detector.classes = ("a" * 140_000, "b", "c")
    detector.save(tmp_path / "long.kedge")
    sources = [tmp_path / "list.txt", home / "photos/0/03.png", "y" * 140_000]
    with pytest.raises(InputError, match="inputs must exist"):
        scored(home, sources, tmp_path / f"out.{kind}")
    rows = scored(home, sources[:2], tmp_path / f"out.{kind}", detector=tmp_path / "long.kedge")
    assert len({row["name"] for row in rows}) == 3
    assert rows[1]["name"].endswith("xxx1.png")
    assert "name too long" in rows[0]["error"]
    assert max(len(value) for row in rows for value in row.values() if isinstance(value, str)) < 4096


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_tars_and_parquet_files_give_the_rows_of_their_images(home, tmp_path):
    files = sorted((home / "photos").rglob("??.png"), key=lambda file: file.stem)
    expected = scored(home, files, tmp_path / "files.jsonl", shard=8)
    for source, first in (("shard.tar", "/00.png"), ("rows.parquet", "#0")):
        rows = scored(home, [home / source], tmp_path / f"{source}.jsonl", shard=8)
        assert rows[0]["name"] == f"{home / source}{first}"
        for row, same in zip(rows, expected, strict=True):
            assert row | {"name": ""} == same | {"name": ""}
            assert np.array(open_named(row["name"])).tolist() == np.array(open_named(same["name"])).tolist()


def test_shards_of_a_parquet_file_are_read_in_one_go_from_their_first_row(home, tmp_path, monkeypatch):
    options, read = {"shard": 4, "batch": 4}, []
    whole = scored(home, [home / "rows.parquet"], tmp_path / "whole.jsonl", **options)
    real = pyarrow.parquet.ParquetFile.iter_batches

    def watched(self, size, row_groups, **more):
        read.append(row_groups)
        return real(self, size, row_groups, **more)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", watched)
    with pytest.raises(StopError):
        scored(home, [home / "rows.parquet"], tmp_path / "out.jsonl", progress=stop_after(12), **options)
    assert read == [[0, 1, 2, 3, 4]]  # groups of seven rows
    assert scored(home, [home / "rows.parquet"], tmp_path / "out.jsonl", **options) == whole
    assert read[1] == [1, 2, 3, 4]  # from row 12 on


def names_of(inputs, **options):
    return [name for shard in plan(list(map(str, inputs)), **options) for name in shard.names()]


def test_inputs_are_files_folders_globs_and_lists_in_the_order_given(home, tmp_path):
    listed = home / "some.txt"
    listed.write_text("# two of them\nphotos/2/05.png\n\nphotos/2/02.png\n")
    given = [home / "photos/0/03.png", home / "photos/1/*.png", listed]
    ones = sorted((home / "photos/1").glob("*.png"))
    expected = [given[0], *ones, home / "photos/2/05.png", home / "photos/2/02.png"]
    assert names_of(given, shard=3) == list(map(str, expected))
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.jfif", "b.JPE", "c.png"):  # every ending that Pillow reads
        picture(1).save(folder / name, format="png" if name == "c.png" else "jpeg")
    (folder / "d.h5").write_bytes(b"no image")
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        tar.add(folder, "photos")
    for given, where in ((folder, folder), (tmp_path / "some.tar", tmp_path / "some.tar" / "photos")):
        assert sorted(names_of([given])) == [str(where / name) for name in ("a.jfif", "b.JPE", "c.png")]


def test_rows_that_were_written_among_the_images_are_no_inputs(home, tmp_path):
    folder = tmp_path / "photos"
    (folder / "spare.parts").mkdir(parents=True)
    for name in ("a.png", "spare.parts/b.png"):
        picture(1).save(folder / name)
    with pytest.raises(StopError):
        scored(home, [folder], folder / "cut.parquet", shard=1, progress=stop_after(1))
    for given, out in itertools.product((folder, folder / "*"), ("first.parquet", "second.parquet")):
        rows = scored(home, [given], folder / out, overwrite=True)
        assert [os.path.relpath(row["name"], folder) for row in rows] == ["a.png", "spare.parts/b.png"]
        (folder / out).write_bytes(b"no parquet")
        assert len(scored(home, [given], folder / out, overwrite=True)) == 2
    with pytest.raises(InputError, match="column must be"):  # named itself it is an input
        list(plan([folder / "first.parquet"]))


def test_a_column_with_another_name_must_be_named(home, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"pixels": [encoded(picture(1)), None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column must be .*pixels; it has none of image"):
        scored(home, [tmp_path / "a.parquet"], tmp_path / "out.csv")
    assert cli(home, tmp_path / "a.parquet", "--column", "pixels", "-o", tmp_path / "out.csv").exit_code == 0
    assert [bool(row["error"]) for row in read_rows(tmp_path / "out.csv")] == [False, True]
    assert len(list(check((tmp_path / "out.csv.html").read_text()).all("img"))) == 1


def test_pipes_and_devices_are_not_read(home, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a.png", "b.tar", "c.parquet", "rows.csv", "list.txt"):
        os.mkfifo(folder / name)
    (folder / "zero.png").symlink_to("/dev/zero")
    given = [folder / "a.png", folder / "zero.png", "/dev/zero", folder / "list.txt", home / "photos/0/03.png"]
    rows = scored(home, given, tmp_path / "out.jsonl")
    assert [row["error"] and "not a regular file" in row["error"] for row in rows] == [True] * 4 + [None]
    for name in ("b.tar", "c.parquet"):
        with pytest.raises(InputError, match="a pipe and not a regular file"):
            list(plan([folder / name]))
    with pytest.raises(InputError, match="a pipe and not a regular file"):
        list(read_rows(folder / "rows.csv"))


def test_an_image_that_cannot_be_scored_gets_an_error_and_leaves_the_others_alone(home, tmp_path, monkeypatch):
    names = [f"{n}.png" for n in range(5)]
    for number, name in enumerate(names):
        picture(number).save(tmp_path / name)
    Image.fromarray(np.full((12, 12), math.nan, np.float32)).save(tmp_path / "5.tif")
    (tmp_path / "6.jpg").write_bytes(encoded(picture(6), "JPEG")[:300])
    real = kedge.AMP.outputs

    def outputs(self, x):  # as a network that overflows on one image
        out = real(self, x)
        out.score[(x == torch.as_tensor(np.array(picture(2))).permute(2, 0, 1) / 255).all(dim=(1, 2, 3))] = math.inf
        return out

    whole = scored(home, [tmp_path], tmp_path / "whole.jsonl")
    assert [bool(row["error"]) for row in whole] == [False] * 5 + [True] * 2
    assert "NaN" in whole[5]["error"]
    monkeypatch.setattr(kedge.AMP, "outputs", outputs)
    rows = scored(home, [tmp_path], tmp_path / "out.jsonl")
    assert [bool(row["error"]) for row in rows] == [False, False, True, False, False, True, True]
    assert "scores must be finite" in rows[2]["error"]
    for n in (0, 1, 3, 4):
        assert rows[n]["score"] == pytest.approx(whole[n]["score"], rel=1e-4)


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(home, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("photos/1"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"inputs must be readable; .*photos/1 is not: Permission denied"):
        list(plan([home / "photos"]))


# --- what is refused, before anything is begun ----------------------------------------------------------------------


def test_what_is_wrong_is_named_and_nothing_is_left_of_the_job(home, tmp_path):
    empty = tmp_path / "empty"
    (empty / "out.csv.parts").mkdir(parents=True)
    (empty / "out.csv.parts" / "notes.md").write_text("of somebody else")
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9.png")
    kedge.AMP(network("anchored")).fit(images()).save(home / "bare.kedge")
    photos, new = [home / "photos"], tmp_path / "new" / "er" / "out.csv"
    before = sorted(tmp_path.rglob("*"))
    for sources, out, options, error, words in [
        ([], new, {}, InputError, "inputs must name at least one"),
        (["nowhere"], new, {}, InputError, "inputs must exist; nowhere"),
        (["nowhere"], empty / "out.csv", {}, InputError, "inputs must exist"),
        ([empty], new, {}, InputError, "inputs must contain images"),
        ([tmp_path / "a.tar"], new, {}, FileFormatError, r"a\.tar must be an uncompressed tar"),
        ([tmp_path / "a.parquet"], new, {}, FileFormatError, r"a\.parquet cannot be read"),
        ([tmp_path / "latin.txt"], new, {}, FileFormatError, r"latin\.txt must be a list"),
        (photos, tmp_path / "a.tar" / "out.csv", {}, InputError, "out must be writable"),
        *((photos, new, {name: 0}, InputError, f"{name} must be") for name in ("shard", "batch", "workers")),
        (photos, empty, {"kind": "csv", "overwrite": True}, InputError, "is a folder"),
        (photos, tmp_path / "out.xlsx", {}, InputError, "format must be one of parquet, csv, jsonl; got 'xlsx'"),
        (photos, new, {"detector": "none.kedge"}, InputError, r"none\.kedge must be a saved detector"),
        (photos, new, {"detector": "bare.kedge"}, NotReadyError, "has no threshold yet; run kedge calibrate"),
    ]:
        with pytest.raises(error, match=words):
            scored(home, sources, out, **options)
        assert sorted(tmp_path.rglob("*")) == before


# --- resume, locks and kills ----------------------------------------------------------------------------------------


def test_a_job_is_resumed_with_the_inputs_that_it_was_planned_with(home, tmp_path):
    for number in range(9):
        picture(number).save(tmp_path / f"{number}.png")
    given = (home, [tmp_path / "*.png"], tmp_path / "out.jsonl")
    with pytest.raises(StopError):
        scored(*given, progress=stop_after(4), shard=2)
    assert len(list((tmp_path / "out.jsonl.parts").glob("part-*"))) == 2
    with pytest.raises(InputError, match="begun with other inputs, shard"):
        scored(home, [home / "photos" / "1"], given[2], shard=5)
    reports = []
    picture(99).save(tmp_path / "0-new.png")  # after the job was planned, so it is not part of it
    rows = scored(*given, progress=lambda *report: reports.append(report), shard=2)
    assert reports == [(4, 9), (6, 9), (8, 9), (9, 9)]  # the first four are not scored again
    assert [os.path.basename(row["name"]) for row in rows] == [f"{n}.png" for n in range(9)]
    with pytest.raises(StopError):
        scored(*given, progress=stop_after(4), shard=2, overwrite=True)
    assert len(scored(home, [home / "photos" / "1"], given[2], shard=5, overwrite=True)) == 11


def test_the_last_steps_of_a_job_are_repeated_if_they_were_cut(home, tmp_path, monkeypatch):
    out, seen = tmp_path / "out.csv", []

    def cut(rows):
        seen.append(len(list(read_rows(rows))))
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(job, "read_rows", stop)
        with pytest.raises(StopError):
            scored(home, [home / "photos"], out)
    with pytest.raises(KedgeError, match="1 of 1 shards were not scored"):
        scored(home, [home / "photos" / "0"], tmp_path / "out.csv.parts" / "a.csv", engine=lambda *_: None)
    shutil.rmtree(tmp_path / "out.csv.parts" / "a.csv.parts")
    assert names_in(tmp_path) == ["out.csv.parts"]
    with pytest.raises(StopError):
        scored(home, [home / "photos"], out, finish=cut)
    scored(home, [home / "photos"], out, finish=lambda rows: seen.append(rows.name))
    assert seen == [32, "out.csv"]
    assert names_in(tmp_path) == ["out.csv"]


def score_to_the_end(home, photos, out):
    """Score, and die when only the files of the job are left to be deleted."""
    job._clear = lambda folder, *more: os.kill(os.getpid(), signal.SIGKILL) if more else None
    scored(home, [photos], out)


def test_a_job_that_is_killed_once_its_file_is_whole_is_complete_when_it_is_repeated(home, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    out = tmp_path / "out.csv"
    run_apart(-signal.SIGKILL, score_to_the_end, home, photos, out)
    before = out.read_bytes()
    assert list(tmp_path.glob("out.csv.parts/part-*"))
    for _ in range(2):
        with pytest.warns(KedgeWarning, match=r"out\.csv is complete: nothing was scored"):
            assert len(scored(home, [photos], out)) == 32
        assert names_in(tmp_path) == ["out.csv", "photos"]
    for page in (None, "of somebody else"):
        again = cli(home, photos, "-o", out)
        assert (again.exit_code, "is complete" in again.output, "32 images" in again.output) == (0, True, True)
        assert page in (None, (tmp_path / "out.csv.html").read_text())
        (tmp_path / "out.csv.html").write_text("of somebody else")
    assert out.read_bytes() == before
    with pytest.raises(InputError, match="out must not exist yet"):
        scored(home, ["nowhere"], out)
    for changed in (  # so that the file does not hold what the command would write
        lambda: out.write_bytes(before.replace(artifact.read_header(home / "detector.kedge")["sha256"].encode(), b"x")),
        lambda: out.write_bytes(before[: before.rindex(b"\n", 0, -1) + 1]),
        lambda: out.write_bytes(before[:-9]),
        lambda: (out.write_bytes(before), picture(99).save(photos / "0" / "00.png"), os.utime(out, (1, 1))),
        lambda: (os.utime(out), picture(99).save(photos / "new.png")),
    ):
        changed()
        with pytest.raises(InputError, match="out must not exist yet"):
            scored(home, [photos], out)
    assert names_in(tmp_path) == ["out.csv", "out.csv.html", "photos"]
    assert len(scored(home, [photos], out, overwrite=True)) == 33


def test_a_second_job_for_the_same_file_is_refused_and_told_who_holds_it(home, tmp_path):
    out = tmp_path / "out.csv"
    code = "import sys; from kedge.scoring import score_files; score_files(sys.argv[1], [sys.argv[2]], sys.argv[3])"

    def second(done, total):
        holder = f"pid {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(InputError, match=rf"another process \({re.escape(holder)}\) is writing"):
            scored(home, [home / "photos"], out)
        command = [sys.executable, "-c", code, home / "detector.kedge", home / "photos", out]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"another process ({holder}) is writing" in other.stderr
        raise StopError

    with pytest.raises(StopError):
        scored(home, [home / "photos"], out, progress=second)


def test_a_lock_in_a_folder_that_was_removed_meanwhile_does_not_count(home, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    real, parts = fcntl.flock, tmp_path / "out.csv.parts"

    def late(lock, how):
        real(lock, how)
        shutil.rmtree(parts, ignore_errors=True)  # by the process that held it

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InputError, match=r"another process|out must be writable"):
        scored(home, [home / "photos"], tmp_path / "out.csv")


def score_and_die(given, out, step):
    """Score, and die at the given operation on the files of the job, counted from 1; exit code 0 if there are fewer."""
    seen = itertools.count(1)

    def count(event, arguments):
        changes = event in ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir")
        if changes and str(arguments[0]).startswith(out) and next(seen) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    score_files(*given, out, shard=4)
    os._exit(0)


def die_at_each_step(given, out, kind, steps):
    """Die at each of the steps and repeat the same call, which ends with every image once and leaves nothing else."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork of a process with several would wait for those that it lacks
    whole = list(read_rows(score_files(*given, f"{out}whole.{kind}", shard=4)))
    assert len({row["name"] for row in whole}) == 11
    for step in steps:
        child = os.fork()
        if not child:
            score_and_die(given, f"{out}{step}.{kind}", step)
        ended = os.waitpid(child, 0)[1]
        assert list(read_rows(score_files(*given, f"{out}{step}.{kind}", shard=4))) == whole
        assert not Path(f"{out}{step}.{kind}.parts").exists()
        if not ended:
            break
    assert step > 40
    os._exit(17)


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_killed_at_any_step_it_ends_with_every_image_once(home, tmp_path, kind, stride):
    given = (home / "detector.kedge", [str(home / "photos" / "0")])
    run_apart(17, die_at_each_step, given, f"{tmp_path}/", kind, range(stride, 1000, stride))


# --- the summary ----------------------------------------------------------------------------------------------------


def row(name, score, is_ood, label="cat", error=None):
    return {"name": name, "label": 0, "class": label, "score": score, "is_ood": is_ood, "error": error}


def test_a_summary_counts_flags_by_class_and_keeps_the_highest_scores_and_a_fair_sample():
    rows = [row("a", 1.0, False), row("b", 9.0, True, "dog"), row("c", 5.0, True)]
    rows += [row("d", None, None, None, "broken"), row("e", 9.0, True)]
    summary = summarize_rows(rows, top=2)
    assert (summary.images, summary.errors, summary.flagged, summary.share) == (5, 1, 3, 0.75)
    assert summary.by_class == {"cat": (3, 2), "dog": (1, 1)}
    assert [r["name"] for r in summary.suspicious] == ["b", "e"]  # of equal scores the earlier first
    assert summary.scores.tolist() == [1, 9, 5, 9]
    json.dumps(summary.as_dict())
    assert summarize_rows([]).share == 0
    assert summarize_rows([row("a", 1.0, False, None)]).by_class == {"0": (1, 0)}
    many = summarize_rows(row("a", float(n), False) for n in range(150_000)).scores
    assert len(set(many)) == len(many) == 50_000
    assert many.mean() == pytest.approx(75_000, abs=3 * 43_301 / 50_000**0.5)  # three standard errors


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_few_images_are_printed_with_escapes_for_what_controls_a_terminal(home, tmp_path):
    printed = cli(home, home / "photos/0/03.png", home / "photos/0/broken.jpg")
    assert printed.exit_code == 0, printed.output
    line = r"03\.png: (ant|bee|cow) \(\d+%\), .*distribution.*, p .*\n.*broken\.jpg: "
    assert re.search(line, printed.output, re.IGNORECASE)
    assert list(json.loads(cli(home, home / "photos/0/03.png", "--json").stdout)) == KEYS
    assert cli(home, home / "photos/0/03.png", "--format", "csv").exit_code == 0
    picture(1).save(tmp_path / "a\x1b[2Jb\n.png")
    (tmp_path / "c\x9b31m.png").write_bytes(b"broken")
    printed = cli(home, tmp_path).output
    assert not {"\x1b", "\x9b"} & set(printed)
    assert "a\\x1b[2Jb\\x0a.png: " in printed
    assert "\x1b[2J" not in cli(home, tmp_path, "-o", tmp_path / "x\x1b[2J.csv").output


def test_the_command_reads_the_detector_once_and_writes_rows_a_page_and_json(home, tmp_path, monkeypatch):
    digests, real = [], artifact._digest
    monkeypatch.setattr(artifact, "_digest", lambda *given: digests.append(1) or real(*given))
    out, other = tmp_path / "out.csv", tmp_path / "b.csv"
    done = cli(home, home / "photos", "-o", out, "--json")
    assert (done.exit_code, len(digests)) == (0, 1), done.output
    result = json.loads(done.stdout)
    assert (result["images"], result["errors"], len(list(read_rows(out)))) == (32, 2, 32)
    read = check((tmp_path / "out.csv.html").read_text())
    assert sum(1 for attributes in read.all("img")) == 20
    assert "2 files could not be read" in read.text
    assert cli(home, home / "photos", "-o", other, "--fail-on-ood").exit_code == (3 if result["flagged"] else 5)
    refused = cli(home, home / "photos", home / "photos/0/03.png", "-o", other)
    assert str(refused.exception).startswith("--out must not exist yet")  # the option, not the argument


def test_a_page_that_was_cut_is_written_again_and_one_of_somebody_else_is_not_replaced(home, tmp_path, monkeypatch):
    out, page = tmp_path / "out.csv", tmp_path / "out.csv.html"
    for file in (page, tmp_path / "out.html"):
        file.write_text("of somebody else")
    with pytest.raises(InputError, match=r"summary .*out\.csv\.html"):
        raise cli(home, home / "photos", "-o", out).exception
    assert names_in(tmp_path) == ["out.csv.html", "out.html"]
    with monkeypatch.context() as patch:
        patch.setattr("kedge.scoring.page.score_page", stop)
        assert isinstance(cli(home, home / "photos", "-o", out, "--overwrite").exception, StopError)
    assert cli(home, home / "photos", "-o", out).exit_code == 0
    check(page.read_text())
    assert names_in(tmp_path) == ["out.csv", "out.csv.html", "out.html"]
    assert (tmp_path / "out.html").read_text() == "of somebody else"


def test_what_the_page_or_parquet_needs_is_looked_for_first(home, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, options, code in (("a.csv", [], 1), ("a.parquet", ["--no-summary"], 1), ("b.csv", ["--no-summary"], 0)):
        done = cli(home, home / "photos/0/03.png", "-o", tmp_path / name, *options)
        assert (done.exit_code, isinstance(done.exception, NotReadyError)) == (code, code == 1)
    assert names_in(tmp_path) == ["b.csv"]
    with pytest.raises(NotReadyError, match="needs pyarrow"):
        list(read_rows(home / "rows.parquet"))


def test_images_that_cannot_be_read_do_not_pass_for_good_ones(home, tmp_path):
    detector = kedge.load(home / "detector.kedge")
    with pytest.warns(KedgeWarning, match="too few to flag any image"):
        detector.calibrate(torch.rand(50, 3, 12, 12), alpha=0.01).save(tmp_path / "calm.kedge")
    good, bad = home / "photos/0/03.png", home / "photos/0/broken.jpg"
    for given, code in [
        ([good, "--fail-on-ood"], 0),
        ([good, bad], 0),
        ([good, bad, "--fail-on-ood"], 5),
        ([bad], 5),
        ([bad, "-o", tmp_path / "out.csv", "--fail-on-ood"], 5),
    ]:
        done = run_cli("score", tmp_path / "calm.kedge", *given)
        assert done.exit_code == code, given
        assert "kedge watch" not in done.output, given  # which has nothing to watch


def test_a_thumbnail_of_16_bits_is_as_bright_as_the_image(tmp_path):
    Image.fromarray(np.full((8, 8), 257 * 90, np.uint16)).save(tmp_path / "a.png")
    row = {
        "label": 0,
        "class": "cat",
        "probability": 0.5,
        "score": 1.0,
        "p_value": 0.01,
        "is_ood": True,
        "reason": None,
    }
    card = row_card(row | {"name": str(tmp_path / "a.png")})
    shown = card["source"].partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(shown))).convert("L").getextrema() == (90, 90)
    assert (card["verdict"], card["lines"][0]) == ("flagged", "cat (50 %)")
    gone = row_card(row | {"name": str(tmp_path / "gone.png")})
    assert (gone["source"], gone["lines"][-1]) == ("", "cannot be shown")
    assert row_card(row | {"name": str(tmp_path / "a.png")}, folder=f"{tmp_path}/")["set"] == "a.png"


def test_the_package_imports_on_systems_without_fcntl():
    code = "import sys; sys.modules['fcntl'] = None; import kedge.scoring, kedge.cli"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_small_parquet_file_whose_rows_share_a_long_value_costs_little(home, tmp_path):
    """A dictionary holds the value once; as plain values these rows would take 3 GB."""

    def column(value, count):
        zeros = pyarrow.array([0] * count, pyarrow.int32())
        return pyarrow.DictionaryArray.from_arrays(zeros, pyarrow.array([value])) if value is not None else None

    def write(columns):
        table, file = pyarrow.table(columns), tmp_path / "a.parquet"
        pyarrow.parquet.write_table(table, file, dictionary_pagesize_limit=10**9, store_schema=False)
        assert file.stat().st_size < 1_000_000
        return file

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = {"name": "a" * 2_000_000, "class": "cat", "label": 1, "is_ood": False}
    columns = {name: column(values.get(name, 0.5), 1000) for name, of in job.COLUMNS.items() if of is not str}
    columns |= {name: column(values.get(name, ""), 1000) for name, of in job.COLUMNS.items() if of is str}
    columns["is_ood"] = pyarrow.array([False] * 1000)
    assert sum(1 for _ in read_rows(write(columns))) == 1000
    (shard,) = plan([write({"image": column(bytes(10_000_000), 100)})])
    ((_, rows),) = job.score_shards(kedge.load(home / "detector.kedge"), [(0, shard)])
    assert [row["error"] is None for row in rows] == [False] * 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB
