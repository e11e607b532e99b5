"""Checks of arguments, each of whose errors names the argument, what it must be and what came; and whole files."""

import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.checks import at_least, between, finite, one_of, resolve, shape_of
from kedge.errors import ArchitectureError, FileFormatError, InputError, KedgeError, NotReadyError
from kedge.files import atomic

INF, NAN = math.inf, math.nan
quick = settings(max_examples=100, derandomize=True, deadline=None)

# Checks.


def test_what_passes_is_returned_as_it_came():
    assert one_of("init", "fresh", ("preserve", "fresh")) == "fresh"
    assert resolve("score", max, {}) is max
    assert resolve("score", "largest", {"largest": max}) is max
    assert at_least("k", 2, 2) == 2
    values = torch.arange(3)
    assert finite("x", values, "") is values


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: one_of("init", "freesh", ("preserve", "fresh")),
            "init must be one of 'preserve', 'fresh'; got 'freesh'",
        ),
        (lambda: resolve("score", "mpp", {"msp": max}), "score must be a function or one of 'msp'; got 'mpp'"),
        (lambda: resolve("score", None, {"msp": max}), "score must be a function or one of 'msp'; got None"),
        (lambda: between("alpha", 1.5, 0, 1), "tpr must lie in [0, 1]; got 1.5"),
        (lambda: between("alpha", 1, 0, 1, open_ends=True), "tpr must lie in (0, 1); got 1"),
        (lambda: between("alpha", NAN, 0, 1), "tpr must lie in [0, 1]; got nan"),
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
def test_what_does_not_is_named_with_what_was_expected_and_what_came(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message


@given(value=st.floats(), low=st.floats(-10, 10), high=st.floats(-10, 10), open_ends=st.booleans())
@quick
def test_between_is_the_comparison_and_refuses_nan(value, low, high, open_ends):
    inside = low < value < high if open_ends else low <= value <= high
    if inside:
        assert between("x", value, low, high, open_ends=open_ends) == value
    else:
        with pytest.raises(InputError):
            between("x", value, low, high, open_ends=open_ends)


def test_whole_numbers_are_finite():
    assert finite("x", torch.tensor([2**60]), "") is not None
    assert finite("x", torch.empty(0), "") is not None


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


# Files.


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_appears_whole_and_nothing_else_does(tmp_path):
    with atomic(tmp_path / "a.txt") as temporary:
        assert temporary.parent == tmp_path  # beside it, so that taking its name is one step
        temporary.write_text("new")
        assert not (tmp_path / "a.txt").exists()
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(KeyError), atomic(tmp_path / "a.txt") as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyError
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_an_interruption_is_a_failure_too(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic(tmp_path / "a.txt"):
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_string_will_do_and_missing_folders_are_made(tmp_path):
    with atomic(str(tmp_path / "new" / "folder" / "a.txt")) as temporary:
        temporary.write_bytes(b"x")
    assert (tmp_path / "new" / "folder" / "a.txt").read_bytes() == b"x"


def test_the_file_has_the_rights_that_any_new_file_has(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic(tmp_path / "a.txt") as temporary:
            temporary.write_text("x")
        assert os.umask(0o027) == 0o027  # put back
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize("below", ["a.txt", "more/a.txt"])
def test_a_path_below_a_file_cannot_be_written(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"path must be writable; .*a\.txt is not"), atomic(tmp_path / "file" / below):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["file"]


def test_a_directory_is_no_file_to_write(tmp_path):
    with pytest.raises(InputError, match=r"path must be a file to write; .* is a directory"), atomic(tmp_path):
        pytest.fail("the block must not run")
    assert names(tmp_path) == []


def test_a_written_file_is_as_readable_as_any_other(tmp_path):
    from kedge.io import artifact

    (tmp_path / "plain").write_text("")
    with atomic(tmp_path / "a") as temporary:
        temporary.write_text("")
    artifact.write(tmp_path / "b", {}, {})
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
