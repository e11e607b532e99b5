"""Thousands of damaged and hostile inputs for every parser; `make fuzz` runs more of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzzing import TARGETS, fuzz
from kedge.errors import InputError

CASES = {
    "image": 2000, "multipart": 1000, "json": 1000, "http": 400, "kedge": 250, "checkpoint": 75, "list": 750,
    "archive": 300, "arrays": 750, "rows": 300, "score": 125,
}  # fmt: skip
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_gives_a_correct_result_or_an_error_of_kedge(name):
    result = fuzz(name, cases=CASES[name])
    assert 0.02 < result.accepted / result.cases < 0.98  # both outcomes occurred


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("load.py", "--minutes", "0.35"), ("chaos.py", "--minutes", "3", "--seed", "0")])
def test_load_and_kills_in_short(arguments):
    finished = subprocess.run([sys.executable, BENCHMARKS / arguments[0], *arguments[1:]], stdout=subprocess.PIPE)
    assert finished.returncode == 0, finished.stdout.decode()


def test_a_case_depends_on_its_number_alone(monkeypatch):
    drawn = []
    monkeypatch.setattr("fuzzing.images.decode", lambda data, *_: drawn.append(data) or 1 / 0)
    for first, cases in ((0, 3), (2, 1)):
        fuzz("image", cases=cases, first=first, failed=lambda line, error: None)
    assert drawn[2] == drawn[3]
    with pytest.raises(AssertionError, match="--target image --seed 7 --case 5"):
        fuzz("image", cases=1, seed=7, first=5)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda folder: (folder.parent / "x").write_text("x"), "/x'"),
        (lambda folder: (folder / "link").symlink_to("../secret") or (folder / "link").write_text("x"), "/link'"),
        (lambda folder: (folder / "hard").hardlink_to(folder.parent / "secret"), "os.link|hard|== 1"),
        (lambda folder: subprocess.run(["true"]), "subprocess.Popen"),
        (lambda folder: len(b"1" * 400_000_000), r"it took \d+ MB"),
        (lambda folder: sum(range(20_000_000)), "it took .* seconds"),
        (lambda folder: 1 / 0, "division by zero"),
    ],
)
def test_what_a_case_must_not_do_is_noticed(act, reason, monkeypatch):
    def decode(folder, *_):
        act(folder)
        raise InputError("no image")

    monkeypatch.setattr("fuzzing.images.decode", decode)
    monkeypatch.setattr("fuzzing.images.damaged_image", lambda rng: Path.cwd() / "inside")
    monkeypatch.setattr("fuzzing.images.RULE", None)
    if "seconds" in reason:
        monkeypatch.setattr("fuzzing.engine.SECONDS", 0.1)
    with pytest.raises(AssertionError, match="repeat with") as caught:
        fuzz("image", cases=1)
    assert re.search(reason, str(caught.value.__cause__))
