"""What a command cannot write, or lacks to write it, is refused before the work."""

import sys

import pytest

from helpers import run_cli
from kedge.errors import InputError, NotReadyError
from kedge.files import check_target

FOLDERS = [
    ["demo", "--out"],
    ["bench", "none.kedge", "-o"],
    ["train", "npz:none.npz", "--out"],
    ["reproduce", "ntk", "--out"],
    ["reproduce", "methods", "--networks"],
    ["distill", "none.kedge", "--train", "none", "-o", "student.kedge", "--directory"],
    ["extract", "none.kedge", "--data", "none", "-o"],
    ["compare", "none.kedge", "--train", "none", "--held-out", "none", "-o"],
]
FILES = [
    ["distill", "none.kedge", "--train", "none", "-o"],
    ["evaluate", "none.kedge", "--test", "none", "--ood", "none", "--report"],
    ["export", "none.kedge", "-o"],
    ["calibrate", "none.kedge", "npz:none.npz", "--out"],
    ["data", "show", "npz:none.npz", "-o"],
    ["watch", "none.kedge", "none.csv", "-o"],
]


def test_a_target_that_can_be_written_is_not_created_yet(tmp_path):
    check_target("--out", tmp_path / "a" / "b.txt")
    check_target("--out", tmp_path / "a", folder=True)
    check_target("--out", tmp_path, folder=True)
    check_target("--out", "b.txt")
    assert not list(tmp_path.iterdir())


def test_a_target_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("of somebody else")
    for below in ("", "a", "a/b"):
        with pytest.raises(InputError, match=r"--out must be a folder to write to; got .*, but .*file is no folder"):
            check_target("--out", tmp_path / "file" / below, folder=True)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(InputError, match=r"--out must be a file to write; got .*a\.txt, but .* may not be written to"):
        check_target("--out", tmp_path / "new" / "a.txt")


def test_every_command_checks_its_target_first(tmp_path):
    (tmp_path / "file").write_text("of somebody else")
    for commands, target, words in (
        (FOLDERS, tmp_path / "file", r"must be a folder to write to; got .*file is no folder"),
        (FILES, tmp_path, r"must be a file to write; .* is a folder: add a file name"),
    ):
        for command in commands:
            with pytest.raises(InputError, match=words):
                raise run_cli(*command, target).exception


@pytest.mark.parametrize("command", [FOLDERS[0], ["reproduce", "methods", "--out"], FILES[1]], ids=lambda c: c[0])
def test_what_a_report_needs_is_looked_for_first(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotReadyError, match=r"matplotlib\.figure"):
        raise run_cli(*command, tmp_path / "out").exception
    assert not list(tmp_path.iterdir())


def test_no_command_replaces_a_file_unless_it_is_told_to(tmp_path):
    (tmp_path / "file").write_text("of somebody else")
    (tmp_path / "detector.kedge").write_text("a finished run")
    (tmp_path / "bench.json").write_text("{}")
    (tmp_path / "report.html").write_text("of a study")
    (tmp_path / "metrics.json").write_text("{}")
    fit = ["fit", "compact", "--train", "none", "-o"]
    commands = [[*command, tmp_path / "file"] for command in (*FILES, fit)] + [
        [*c, tmp_path] for c in (*FOLDERS[:4], FOLDERS[-1])
    ]
    for command in commands:
        with pytest.raises(InputError, match=r"must not exist yet; .* does: choose another name, or use --overwrite"):
            raise run_cli(*command).exception
        if command[0] not in ("demo", "reproduce"):  # which have nothing else to refuse
            assert "must not exist" not in str(run_cli(*command, "--overwrite").exception), command
    with pytest.raises(InputError, match=r"--out must name a file to write; to replace .* itself, use --overwrite"):
        raise run_cli("calibrate", "none.kedge", "npz:none.npz").exception
    assert (tmp_path / "file").read_text() == "of somebody else"
