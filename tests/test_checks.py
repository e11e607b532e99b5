"""Helpers: checks of arguments, whose errors say what was expected and what came; atomic files; seeds."""

import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from kedge.checks import at_least, between, finite, one_of, resolve, shape_of
from kedge.errors import ArchitectureError, FileFormatError, InputError, KedgeError, NotReadyError
from kedge.files import atomic, remove_leftovers
from kedge.io import artifact
from kedge.seeds import mix_seed

INF, NAN = math.inf, math.nan


def test_a_valid_value_is_returned():
    assert one_of("init", "fresh", ("preserve", "fresh")) == "fresh"
    assert resolve("score", max, {}) is max
    assert resolve("score", "largest", {"largest": max}) is max
    assert at_least("k", 2, 2) == 2
    for values in (torch.arange(3), torch.tensor([2**60]), torch.empty(0)):
        assert finite("x", values, "") is values


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_of("init", "none", ("preserve", "fresh")), "init must be one of 'preserve', 'fresh'; got 'none'"),
        (lambda: resolve("score", "mpp", {"msp": max}), "score must be a function or one of 'msp'; got 'mpp'"),
        (lambda: resolve("score", None, {"msp": max}), "score must be a function or one of 'msp'; got None"),
        (lambda: between("alpha", 1.5, 0, 1), "alpha must lie in [0, 1]; got 1.5"),
        (lambda: between("alpha", 1, 0, 1, open_ends=True), "alpha must lie in (0, 1); got 1"),
        (lambda: between("alpha", NAN, 0, 1), "alpha must lie in [0, 1]; got nan"),
        (lambda: at_least("k", 1, 2), "k must be a whole number of at least 2; got 1"),
        (lambda: at_least("k", 2.0, 2), "k must be a whole number of at least 2; got 2.0"),
        (lambda: at_least("k", True, 1), "k must be a whole number of at least 1; got True"),
        (lambda: at_least("k", "3", 2), "k must be a whole number of at least 2; got '3'"),
        (
            lambda: finite("x", torch.tensor([1.0, NAN, INF, -INF]), "drop them"),
            "x must be finite; 3 of 4 values are NaN or infinite: drop them",
        ),
    ],
)
def test_an_error_says_what_was_expected_and_what_came(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message


def test_shapes_and_types_in_messages():
    values = [torch.zeros(2, 3), np.zeros((4,)), torch.tensor(1.0), [1, 2], None]
    assert [shape_of(v) for v in values] == ["(2, 3)", "(4,)", "()", "list", "NoneType"]


def test_every_error_is_a_kedge_error_and_what_python_users_expect():
    for error, also in (
        (InputError, ValueError),
        (ArchitectureError, ValueError),
        (FileFormatError, ValueError),
        (NotReadyError, RuntimeError),
    ):
        assert issubclass(error, KedgeError)
        assert issubclass(error, also)


def test_derived_seeds_differ_and_do_not_overflow():
    seeds = {mix_seed(*values) for values in ((0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**70, 3))}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


# Files.


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("name", ["a.txt", "new/folder/a.txt"])
def test_a_file_appears_whole_and_nothing_else_does(tmp_path, name):
    with atomic(str(tmp_path / name)) as temporary:
        assert temporary.parent == (tmp_path / name).parent  # so that renaming it is atomic
        temporary.write_text("new")
        assert not (tmp_path / name).exists()
    assert names((tmp_path / name).parent) == ["a.txt"]
    assert (tmp_path / name).read_text() == "new"


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, error):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(error), atomic(tmp_path / "a.txt") as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise error
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic(tmp_path / "a.txt") as temporary:
            temporary.write_text("x")
        artifact.write(tmp_path / "b.kedge", {}, {})
        assert os.umask(0o027) == 0o027  # unchanged
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize("path", ["file/a.txt", "file/more/a.txt", "."])
def test_a_path_that_cannot_be_written_is_an_error_before_the_block(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"path must be (writable|a file to write); "), atomic(tmp_path / path):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["file"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".a.txt.x1.part").write_text("half")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []
