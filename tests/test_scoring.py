"""Scoring files: every input exactly once, in order, whatever is broken and however often the job is killed."""

import base64
import csv
import fcntl
import io
import json
import os
import re
import shutil
import signal
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.errors import FileFormatError, InputError, KedgeWarning, NotReadyError
from kedge.models import build
from kedge.scoring import RayEngine, plan, read_rows, score_files, summarise
from kedge.scoring.inputs import open_named
from kedge.scoring.page import _thumbnail
from kedge.seeds import seeded
from processes import FRESH, die_in
from test_report import check

KINDS = ("parquet", "csv", "jsonl")


def picture(seed, side=12):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def encoded(seed):
    target = io.BytesIO()
    picture(seed).save(target, format="png")
    return target.getvalue()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Thirty images in folders, two files that are none, the same images in a tar and in a parquet file; a detector."""
    import pyarrow
    import pyarrow.parquet

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
            for name, data in ((f"{number:02}.png", encoded(number)), (f"{number:02}.cls", b"1")):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    table = {"image": [{"bytes": encoded(number), "path": None} for number in range(30)], "id": list(range(30))}
    pyarrow.parquet.write_table(pyarrow.table(table), home / "rows.parquet", row_group_size=7)
    train = kedge.ImageSet(torch.randint(0, 256, (40, 3, 12, 12), dtype=torch.uint8), torch.arange(40) % 3)
    with seeded(0):
        net = kedge.anchor(build("compact", width=4, classes=3), init="fresh", seed=0)
    kedge.AMP(net, k=3).fit(train).calibrate(torch.rand(50, 3, 12, 12)).save(home / "detector.kedge")
    return home


def scored(home, sources, out, **options):
    score_files(home / "detector.kedge", list(map(str, sources)), out, **options)
    return list(read_rows(out))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [1, 4, 512])
def test_a_row_for_each_image_says_what_the_detector_says(home, tmp_path, kind, shard):
    rows = scored(home, [home / "photos"], tmp_path / f"out.{kind}", shard=shard, batch=5)
    files = sorted(p for p in (home / "photos").rglob("*") if p.suffix in (".png", ".jpg"))
    assert [row["path"] for row in rows] == list(map(str, files))
    detector = kedge.load(home / "detector.kedge")
    for file, row in zip(files, rows, strict=True):
        if file.stem in ("broken", "empty"):
            assert "cannot be read as an image" in row["error"]
            assert row["score"] is row["label"] is row["is_ood"] is None
            continue
        said = detector([file])
        assert row["error"] is None
        assert row["label"] == str(int(said.label[0]))
        for name in ("score", "temperature", "p_value"):
            assert row[name] == pytest.approx(float(getattr(said, name)[0]), rel=1e-4, abs=1e-6)  # float32 logits
        assert row["probability"] == pytest.approx(float(said.probability[0].max()), rel=1e-4)
        assert row["is_ood"] == bool(said.is_ood[0])
    assert not (tmp_path / f"out.{kind}.parts").exists()


@pytest.mark.parametrize("source", ["shard.tar", "rows.parquet"])
def test_tars_and_parquet_files_give_the_rows_of_their_images(home, tmp_path, source):
    files = sorted(p for p in (home / "photos").rglob("??.png"))
    by_number = {int(p.stem): p for p in files}
    expected = scored(home, [by_number[n] for n in range(30)], tmp_path / "files.jsonl", shard=8)
    rows = scored(home, [home / source], tmp_path / "out.jsonl", shard=8)
    assert len(rows) == 30
    separator = "/00.png" if source == "shard.tar" else "#0"
    assert rows[0]["path"] == f"{home / source}{separator}"
    for row, same in zip(rows, expected, strict=True):
        assert row | {"path": ""} == same | {"path": ""}
        assert np.array(open_named(row["path"])).tolist() == np.array(open_named(same["path"])).tolist()


def test_shards_of_a_parquet_file_are_read_in_one_go_from_the_row_that_is_asked_for(home, tmp_path, monkeypatch):
    import pyarrow.parquet

    given, asked = {"shard": 4, "batch": 4}, []
    whole = scored(home, [home / "rows.parquet"], tmp_path / "whole.jsonl", **given)
    real = pyarrow.parquet.ParquetFile.iter_batches

    def watched(self, size, row_groups, **options):
        asked.append(row_groups)
        return real(self, size, row_groups, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", watched)
    with pytest.raises(Stopped):
        scored(home, [home / "rows.parquet"], tmp_path / "out.jsonl", progress=stop_after(12), **given)
    assert asked == [[0, 1, 2, 3, 4]]  # groups of seven rows
    assert scored(home, [home / "rows.parquet"], tmp_path / "out.jsonl", **given) == whole
    assert asked[1] == [1, 2, 3, 4]  # from row 12 on


def test_inputs_are_files_folders_globs_and_lists_in_the_order_given(home):
    listed = home / "some.txt"
    listed.write_text("# two of them\nphotos/2/05.png\n\nphotos/2/02.png\n")
    given = [home / "photos" / "0" / "03.png", home / "photos" / "1" / "*.png", listed]
    names = [name for shard in plan(list(map(str, given)), shard=3) for name in shard.names()]
    ones = sorted(str(p) for p in (home / "photos" / "1").glob("*.png"))
    assert names == [str(given[0]), *ones, str(home / "photos/2/05.png"), str(home / "photos/2/02.png")]


def test_every_file_that_pillow_reads_is_an_input_of_a_folder_and_of_a_tar(home, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.jfif", "b.JPE", "c.png"):
        picture(1).save(folder / name, format="png" if name == "c.png" else "jpeg")
    (folder / "d.h5").write_bytes(b"no image")
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        tar.add(folder, "photos")
    for given, where in ((folder, folder), (tmp_path / "some.tar", tmp_path / "some.tar" / "photos")):
        names = [name for shard in plan([given]) for name in shard.names()]
        assert sorted(names) == [str(where / name) for name in ("a.jfif", "b.JPE", "c.png")]


@pytest.mark.parametrize("given", ["photos", "photos/*"])
def test_rows_that_were_written_among_the_images_are_no_images(home, tmp_path, given):
    folder = tmp_path / "photos"
    (folder / "spare.parts").mkdir(parents=True)
    for name in ("a.png", "spare.parts/b.png"):
        picture(1).save(folder / name)
    options = {"shard": 1, "progress": stop_after(1)}
    with pytest.raises(Stopped):
        scored(home, [folder], folder / "cut.parquet", **options)
    for out in ("first.parquet", "second.parquet"):
        rows = scored(home, [tmp_path / given], folder / out)
        assert [os.path.relpath(row["path"], folder) for row in rows] == ["a.png", "spare.parts/b.png"]
    (folder / "first.parquet").write_bytes(b"no parquet")
    assert len(scored(home, [tmp_path / given], folder / "first.parquet", overwrite=True)) == 2
    with pytest.raises(InputError, match="column must be one of"):  # named itself it is an input
        list(plan([folder / "first.parquet"]))


def test_a_column_of_another_name_is_asked_for(home, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"pixels": [encoded(1), None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column must be one of .*, pixels; none of image, .* is there: name it"):
        scored(home, [tmp_path / "a.parquet"], tmp_path / "out.csv")
    rows = scored(home, [tmp_path / "a.parquet"], tmp_path / "out2.csv", column="pixels")
    assert [bool(row["error"]) for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "inputs must name at least one"),
        (["nowhere"], "inputs must be there; nowhere is not"),
        (["empty"], "inputs must hold images; none was found in .*empty"),
    ],
)
def test_without_images_there_is_nothing_to_do(home, tmp_path, sources, message):
    (tmp_path / "empty").mkdir()
    given = [tmp_path / name if name == "empty" else name for name in sources]
    with pytest.raises(InputError, match=message):
        scored(home, given, tmp_path / "new" / "er" / "out.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_compressed_or_broken_tar_is_named(home, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(FileFormatError, match=r"a\.tar must be an uncompressed tar"):
        scored(home, [tmp_path / "a.tar"], tmp_path / "out.csv")


def test_a_cluster_from_outside_is_refused_at_once():
    with pytest.raises(InputError, match=r"address must be 'auto', 'host:port' or 'local'.*got 'ray://a:1': start the"):
        RayEngine("ray://a:1")


@pytest.mark.parametrize("name", ["shard", "batch", "workers"])
def test_sizes_are_checked_before_anything_is_done(home, tmp_path, name):
    with pytest.raises(InputError, match=f"{name} must be a whole number of at least 1; got 0"):
        scored(home, [home / "photos"], tmp_path / "out.csv", **{name: 0})
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_the_rows_is_named(home, tmp_path):
    (tmp_path / "out.csv").mkdir()
    with pytest.raises(InputError, match=r"out must be a file to write; .*out\.csv is a folder"):
        scored(home, [home / "photos"], tmp_path / "out.csv", overwrite=True)


def test_what_is_there_is_not_written_over_unless_asked_for(home, tmp_path):
    out = tmp_path / "out.csv"
    scored(home, [home / "photos" / "0"], out)
    before = out.read_bytes()
    with pytest.raises(InputError, match="out must not be there yet"):
        scored(home, [home / "photos" / "1"], out)
    assert out.read_bytes() == before
    assert len(scored(home, [home / "photos" / "1"], out, overwrite=True)) == 11
    with pytest.raises(InputError, match="format must be one of parquet, csv, jsonl; got 'xlsx'"):
        scored(home, [home / "photos"], tmp_path / "out.xlsx")


def test_a_broken_parquet_file_and_a_missing_detector_are_named(home, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(FileFormatError, match=r"a\.parquet cannot be read as a parquet file"):
        scored(home, [tmp_path / "a.parquet"], tmp_path / "out.csv")
    (tmp_path / "out.csv").write_text("of somebody else")  # what the failed job left must not open the way to it
    with pytest.raises(InputError, match="out must not be there yet"):
        scored(home, [home / "photos"], tmp_path / "out.csv")
    with pytest.raises(InputError, match="detector must be a readable file"):
        score_files(tmp_path / "none.kedge", [str(home / "photos")], tmp_path / "out2.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "out.csv"]


def test_a_detector_without_a_threshold_is_an_error(home, tmp_path):
    net = kedge.anchor(build("compact", width=4, classes=3))
    kedge.AMP(net).fit(torch.rand(20, 3, 12, 12)).save(tmp_path / "bare.kedge")
    with pytest.raises(NotReadyError, match="has no threshold yet; run kedge calibrate"):
        score_files(tmp_path / "bare.kedge", [str(home / "photos")], tmp_path / "out.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["bare.kedge"]


class Stopped(Exception):  # noqa: N818
    pass


def stop_after(images):
    def stop(done, total):
        if done >= images:
            raise Stopped

    return stop


def test_a_job_goes_on_where_it_was_with_the_inputs_that_it_was_planned_with(home, tmp_path):
    for number in range(9):
        picture(number).save(tmp_path / f"{number}.png")
    out, options = tmp_path / "out.jsonl", {"shard": 2}
    with pytest.raises(Stopped):
        scored(home, [tmp_path / "*.png"], out, progress=stop_after(4), **options)
    assert len(list((tmp_path / "out.jsonl.parts").glob("part-*"))) == 2
    reports = []
    picture(99).save(tmp_path / "0-new.png")  # after the job was planned, so it is not part of it
    rows = scored(
        home, [tmp_path / "*.png"], out, progress=lambda done, total: reports.append((done, total)), **options
    )
    assert reports == [(4, 9), (6, 9), (8, 9), (9, 9)]  # the first four are not scored again
    assert [os.path.basename(row["path"]) for row in rows] == [f"{n}.png" for n in range(9)]


def test_the_last_part_of_a_job_is_done_again_where_it_was_cut(home, tmp_path):
    out, seen = tmp_path / "out.csv", []

    def cut(rows):
        seen.append(len(list(read_rows(rows))))
        with pytest.raises(InputError, match="another process is writing"):
            scored(home, [home / "photos"], out)
        raise Stopped

    with pytest.raises(Stopped):
        scored(home, [home / "photos"], out, finish=cut)
    scored(home, [home / "photos"], out, finish=lambda rows: seen.append(rows.name))
    assert seen == [32, "out.csv"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_a_job_that_is_killed_while_it_puts_its_shards_together_leaves_nothing_beside(home, tmp_path, monkeypatch):
    out, seen = tmp_path / "out.csv", []

    def killed(*_):
        seen.extend(path.name for path in tmp_path.iterdir())
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("kedge.scoring.job.cut", killed)
        with pytest.raises(Stopped):
            scored(home, [home / "photos"], out)
    assert seen == ["out.csv.parts"]
    assert len(scored(home, [home / "photos"], out)) == 32


def test_a_lock_on_a_folder_that_was_removed_meanwhile_is_no_lock(home, tmp_path, monkeypatch):
    out, real = tmp_path / "out.csv", fcntl.flock

    def late(lock, how):
        real(lock, how)
        shutil.rmtree(tmp_path / "out.csv.parts")  # by the process that had it

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InputError, match="another process is writing"):
        scored(home, [home / "photos"], out)


def test_files_of_others_in_the_folder_of_a_job_that_fails_at_once_stay(home, tmp_path):
    (tmp_path / "out.csv.parts").mkdir()
    (tmp_path / "out.csv.parts" / "notes.md").write_text("of somebody else")
    with pytest.raises(InputError, match="inputs must be there"):
        scored(home, ["nowhere"], tmp_path / "out.csv")
    assert [path.name for path in (tmp_path / "out.csv.parts").iterdir()] == ["notes.md"]


def test_a_job_begun_with_other_arguments_is_not_mixed_with_this_one(home, tmp_path):
    out = tmp_path / "out.csv"
    with pytest.raises(Stopped):
        scored(home, [home / "photos"], out, progress=stop_after(4), shard=4)
    with pytest.raises(InputError, match="begun with other inputs, shard"):
        scored(home, [home / "photos" / "1"], out, shard=5)
    assert len(scored(home, [home / "photos" / "1"], out, shard=5, overwrite=True)) == 11


def test_two_processes_do_not_write_one_file(home, tmp_path):
    out = tmp_path / "out.csv"

    def second(done, total):
        with pytest.raises(InputError, match="another process is writing"):
            scored(home, [home / "photos"], out)
        raise Stopped

    with pytest.raises(Stopped):
        scored(home, [home / "photos"], out, progress=second)


def score_until(home, many, out, images, seconds):
    """Score, and die a moment after so many images."""

    def progress(done, total):
        if done >= images:
            die_in(seconds)

    score_files(home / "detector.kedge", [str(many)], out, shard=16, progress=progress)


def test_killed_again_and_again_it_ends_with_every_image_once(home, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for number in range(400):
        picture(number).save(many / f"{number:03}.png")
    (many / "150-broken.png").write_bytes(b"broken")
    whole = scored(home, [many], tmp_path / "whole.parquet", shard=16)
    out = tmp_path / "out.parquet"
    for images, moment in ((0, 0.0), (0, 0.02), (64, 0.002), (160, 0.005), (240, 0.01)):
        life = FRESH.Process(target=score_until, args=(home, many, out, images, moment))
        life.start()
        life.join(timeout=60)
        assert life.exitcode == -signal.SIGALRM
        assert not out.exists()
    assert run("score", "--detector", home / "detector.kedge", many, "-o", out, "--shard", 16).exit_code == 0
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.parquet", "out.parquet.html"]
    rows = list(read_rows(out))
    assert [row["path"] for row in rows] == [row["path"] for row in whole]
    assert len({row["path"] for row in rows}) == 401
    assert rows == whole


# The summary.


def row(label, score, is_ood, path="a.png", error=None):
    return {"path": path, "label": label, "score": score, "is_ood": is_ood, "error": error}


def test_a_summary_counts_flags_by_class_and_keeps_the_highest_scores():
    rows = [row("cat", 1.0, False), row("dog", 9.0, True, "b.png"), row("cat", 5.0, True, "c.png")]
    rows += [row(None, None, None, "d.png", "broken"), row("cat", 9.0, True, "e.png")]
    found = summarise(rows, top=2)
    assert (found.images, found.errors, found.flagged, found.share) == (5, 1, 3, 0.75)
    assert found.by_class == {"cat": (3, 2), "dog": (1, 1)}
    assert [r["path"] for r in found.suspicious] == ["b.png", "e.png"]  # of equal scores the earlier first
    assert found.scores.tolist() == [1, 9, 5, 9]
    assert found.is_ood.tolist() == [False, True, True, True]
    json.dumps(found.as_dict())
    assert summarise([]).share == 0


def test_of_very_many_scores_the_plot_gets_a_fair_sample():
    found = summarise(row("cat", float(n), False) for n in range(150_000))
    assert len(found.scores) == 50_000
    assert len(set(found.scores)) == 50_000
    assert found.scores.mean() == pytest.approx(75_000, abs=3 * 43_301 / 50_000**0.5)  # three standard errors


# The command.


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def test_a_few_images_are_told_at_once(home):
    done = run("score", "--detector", home / "detector.kedge", home / "photos/0/03.png", home / "photos/0/broken.jpg")
    assert done.exit_code == 0, done.output
    assert "03.png: " in done.output
    assert "distribution, p " in done.output
    assert "broken.jpg: " in done.output
    assert (
        run("score", "--detector", home / "detector.kedge", home / "photos/0/03.png", "--format", "csv").exit_code == 0
    )


def test_the_command_writes_rows_and_a_page(home, tmp_path):
    out = tmp_path / "out.csv"
    done = run("score", "--detector", home / "detector.kedge", home / "photos", "-o", out)
    assert done.exit_code == 0, done.output
    with out.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 32
    read = check((tmp_path / "out.csv.html").read_text())
    assert sum(1 for attributes in read.all("img")) == 20
    assert "2 files could not be read" in read.text


def test_a_page_that_was_cut_is_written_when_the_command_goes_on(home, tmp_path, monkeypatch):
    command = ["score", "--detector", home / "detector.kedge", home / "photos", "-o", tmp_path / "out.csv"]

    def killed(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["kedge.cli.score"], "page", killed)
        assert isinstance(run(*command).exception, Stopped)
    (tmp_path / "out.csv.html").write_text("of the life before")
    done = run(*command)
    assert done.exit_code == 0, done.output
    check((tmp_path / "out.csv.html").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.csv.html"]


def test_a_page_of_somebody_else_is_not_written_over(home, tmp_path):
    command = ["score", "--detector", home / "detector.kedge", home / "photos/0/03.png", "-o", tmp_path / "index.csv"]
    for name in ("index.html", "index.csv.html"):
        (tmp_path / name).write_text("of somebody else")
    with pytest.raises(InputError, match=r"the summary must not be there yet; .*index\.csv\.html is: move it"):
        raise run(*command).exception
    assert not (tmp_path / "index.csv").exists()
    assert run(*command, "--overwrite").exit_code == 0
    check((tmp_path / "index.csv.html").read_text())
    assert (tmp_path / "index.html").read_text() == "of somebody else"


def test_without_matplotlib_nothing_is_scored_for_a_page_that_cannot_be_drawn(home, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["score", "--detector", home / "detector.kedge", home / "photos/0/03.png", "-o", tmp_path / "out.csv"]
    assert isinstance(run(*command).exception, NotReadyError)
    assert not list(tmp_path.iterdir())
    assert run(*command, "--no-summary").exit_code == 0


def test_the_page_shows_images_of_a_column_with_another_name(home, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"pixels": [encoded(1), encoded(2)]}), tmp_path / "a.parquet")
    command = ["score", "--detector", home / "detector.kedge", tmp_path / "a.parquet", "--column", "pixels"]
    assert run(*command, "-o", tmp_path / "out.csv").exit_code == 0
    assert len(list(check((tmp_path / "out.csv.html").read_text()).all("img"))) == 2


def test_exit_codes_and_json_are_for_programs(home, tmp_path):
    base = ["score", "--detector", home / "detector.kedge", home / "photos", "-o"]
    told = json.loads(run(*base, tmp_path / "a.jsonl", "--json", "--no-summary").stdout)
    assert (told["images"], told["errors"]) == (32, 2)
    code = run(*base, tmp_path / "b.jsonl", "--fail-on-ood").exit_code
    assert code == (3 if told["flagged"] else 5)
    assert run(*base, tmp_path / "b.jsonl").exit_code == 1  # the file is there


def test_images_that_cannot_be_read_do_not_pass_for_good_ones(home, tmp_path):
    detector = kedge.load(home / "detector.kedge")
    with pytest.warns(KedgeWarning, match="too few to flag any image"):
        detector.calibrate(torch.rand(50, 3, 12, 12), alpha=0.01).save(tmp_path / "calm.kedge")
    good, bad, base = home / "photos/0/03.png", home / "photos/0/broken.jpg", ["score", "--detector"]
    calm = [*base, tmp_path / "calm.kedge"]
    assert run(*calm, good, "--fail-on-ood").exit_code == 0
    assert run(*calm, good, bad).exit_code == 0
    assert run(*calm, good, bad, "--fail-on-ood").exit_code == 5
    assert run(*calm, bad).exit_code == 5
    assert run(*calm, bad, "-o", tmp_path / "out.csv", "--fail-on-ood").exit_code == 5


def test_a_thumbnail_of_16_bits_is_as_bright_as_the_image(tmp_path):
    Image.fromarray(np.full((8, 8), 257 * 90, np.uint16)).save(tmp_path / "a.png")
    shown = re.search(r"base64,([^\"]+)", str(_thumbnail(str(tmp_path / "a.png"), None)))[1]
    assert Image.open(io.BytesIO(base64.b64decode(shown))).convert("L").getextrema() == (90, 90)
