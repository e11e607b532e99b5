"""Progress bars: in a terminal by default, in Python as on the command line; nothing in a pipe."""

import threading

import pytest
from PIL import Image

import kedge
from helpers import images, labelled, network, run_cli
from kedge import progress
from kedge.data import ImageSet
from kedge.progress import progress_bar
from kedge.training import recipe


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Standard error as if it were a terminal, and bars without the moment of waiting."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(progress, "MOMENT", -1)
    return monkeypatch


def work() -> None:
    with progress_bar("outer", 10) as outer:
        outer(3)
        with progress_bar("inner", 10) as inner:
            inner(5)
        outer(10)


def test_a_bar_shows_what_is_done_and_hides_those_inside_it(terminal, capsys):
    work()
    out, err = capsys.readouterr()
    assert "outer" in err
    assert "10 of 10 images" in err
    assert "inner" not in err
    assert out == ""


def test_a_new_label_begins_again_and_a_note_replaces_the_count(terminal, capsys):
    with progress_bar("first", 10) as update:
        update(9)
        update(2, 4, label="[second]", note="half way")
    err = capsys.readouterr().err
    assert "9 of 10 images" in err
    assert "[second]" in err
    assert "half way" in err


def test_nothing_is_shown_in_a_pipe_or_if_switched_off_or_in_other_threads(terminal, capsys):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    terminal.setenv("KEDGE_PROGRESS", "0")
    work()
    terminal.delenv("KEDGE_PROGRESS")
    terminal.setenv("TTY_COMPATIBLE", "0")
    work()
    assert capsys.readouterr() == ("", "")


def test_short_work_shows_nothing(terminal, capsys):
    terminal.setattr(progress, "MOMENT", 60)
    work()
    terminal.setattr(progress, "MOMENT", -1)
    with progress_bar("at once", 1) as update:
        update(1)
    assert capsys.readouterr().err == ""


def test_a_bar_ends_with_the_error_that_ends_its_block(terminal, capsys):
    with pytest.raises(ZeroDivisionError), progress_bar("broken", 10) as update:
        update(1 // 0)
    work()
    assert "outer" in capsys.readouterr().err


def test_every_verb_shows_its_progress(terminal, capsys):
    train, held, fresh, other = (ImageSet(images(600, seed=i), name=str(i)) for i in range(4))
    detector = kedge.KNN(network(), k=5)
    verbs = {
        "fitting": lambda: detector.fit(train),
        "calibrating": lambda: detector.calibrate(held),
        "scoring": lambda: detector(fresh),
        "evaluating": lambda: kedge.evaluate({"knn": detector}, fresh, [other]),
        "training": lambda: kedge.train(network(), labelled(), recipe("demo", epochs=2, batch=8)),
        "reading": lambda: kedge.protect(network(), train, list(fresh.images), method="knn", k=5),
    }
    for label, verb in verbs.items():
        verb()
        assert label in capsys.readouterr().err, label
    assert detector.score(fresh, progress=lambda done: None).shape == (600,)
    assert capsys.readouterr().err == ""  # a callback takes the place of the bar


def test_commands_show_the_same_bars_on_standard_error(terminal, tmp_path):
    kedge.MSP(network()).fit(labelled()).calibrate(images(seed=1)).save(tmp_path / "a.kedge")
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, pixels in enumerate(images(6, seed=2).permute(0, 2, 3, 1).numpy()):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    command = ("score", tmp_path / "a.kedge", folder, "--shard", 2)
    done = run_cli(*command, TTY_COMPATIBLE="1")
    assert "scoring" in done.stderr
    assert "scoring" not in done.stdout
    assert run_cli(*command, TTY_COMPATIBLE="0").stderr == ""
