"""What a command cannot write, or lacks to write it, is told before the work."""

import sys

import pytest
from typer.testing import CliRunner

from kedge.cli import app
from kedge.errors import InputError, NotReadyError
from kedge.files import check_target


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def test_a_target_that_can_be_written_is_not_made_yet(tmp_path):
    check_target("--out", tmp_path / "a" / "b.txt")
    check_target("--out", tmp_path / "a", folder=True)
    check_target("--out", tmp_path, folder=True)
    check_target("--out", "b.txt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, below):
    (tmp_path / "file").write_text("of somebody else")
    with pytest.raises(InputError, match=r"--out must be a folder to write to; got .*, but .*file is no folder"):
        check_target("--out", tmp_path / "file" / below, folder=True)


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(InputError, match=r"--out must be a file to write; got .*a\.txt, but .* may not be written to"):
        check_target("--out", tmp_path / "new" / "a.txt")


FOLDERS = {
    "demo": ["demo", "--out"],
    "bench": ["bench", "none.kedge", "-o"],
    "train": ["train", "npz:none.npz", "--out"],
    "reproduce": ["reproduce", "ntk", "--out"],
    "networks": ["reproduce", "methods", "--networks"],
    "distill": ["distill", "none.kedge", "--train", "none", "-o", "student.kedge", "--directory"],
}
FILES = {
    "distill": ["distill", "none.kedge", "--train", "none", "-o"],
    "evaluate": ["evaluate", "none.kedge", "--test", "none", "--ood", "none", "--report"],
    "export": ["export", "none.kedge", "-o"],
    "calibrate": ["calibrate", "none.kedge", "npz:none.npz", "--out"],
    "show": ["data", "show", "npz:none.npz", "-o"],
    "watch": ["watch", "none.csv", "--detector", "none.kedge", "-o"],
}


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_to_write_to_is_looked_at_first(tmp_path, command):
    (tmp_path / "file").write_text("of somebody else")
    with pytest.raises(InputError, match=r"must be a folder to write to; got .*file is no folder"):
        raise run(*FOLDERS[command], tmp_path / "file").exception


@pytest.mark.parametrize("command", FILES)
def test_a_file_to_write_is_looked_at_first(tmp_path, command):
    with pytest.raises(InputError, match=r"must be a file to write; .* is a folder: add a file name"):
        raise run(*FILES[command], tmp_path).exception


@pytest.mark.parametrize(
    "command",
    [["demo", "--out"], ["reproduce", "methods", "--out"], [*FILES["evaluate"]]],
    ids=lambda command: command[0],
)
def test_what_a_report_needs_is_looked_for_first(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotReadyError, match=r"the report needs matplotlib\.figure, which is missing"):
        raise run(*command, tmp_path / "out").exception
    assert not list(tmp_path.iterdir())


def test_what_parquet_needs_is_looked_for_before_a_job_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(NotReadyError, match="a parquet file needs"):
        raise run("score", "--detector", "cifar10", tmp_path, "-o", tmp_path / "out.parquet").exception
    assert not list(tmp_path.iterdir())
