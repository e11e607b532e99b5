"""Names of files, classes and sets cannot control the terminal, and lines in a pipe stay whole."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import kedge
from helpers import images, network, run_cli

EVIL = "e\x1b]0;title\x07\x1b[2J\x9b31m\u202e:cat:[red]"  # sets the title, clears the screen, turns the text around
SHOWN = r"e\x1b]0;title\x07\x1b[2J\x9b31m\u202e:cat:[red]"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A detector whose classes have such names, and folders of images under such names."""
    home = tmp_path_factory.mktemp("terminal")
    train = kedge.ImageSet(images(), torch.arange(40) % 4, EVIL, (EVIL, "b\nc", "d", "e"))
    kedge.MSP(network()).fit(train).calibrate(images(seed=1)).save(home / "msp.kedge")
    for place in (EVIL, f"strange {EVIL}"):
        (home / place / EVIL).mkdir(parents=True)
        for number, pixels in enumerate(images(6, seed=len(place)).permute(0, 2, 3, 1).numpy()):
            Image.fromarray(pixels).save(home / place / EVIL / f"{EVIL}{number}.png")
    (home / "bad\udcff\n.png").write_bytes(b"no image")
    return home


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_names_cannot_control_the_terminal(home, tmp_path, terminal):
    files = [home / EVIL / EVIL / f"{EVIL}{number}.png" for number in range(6)]
    sets = ["--test", f"folder:{home / EVIL}", "--ood", f"folder:{home / f'strange {EVIL}'}", "--resamples", "0"]
    commands = [
        ["info", home / "msp.kedge"],
        ["score", home / "msp.kedge", *files, home / "bad\udcff\n.png"],
        ["score", home / "msp.kedge", *files, "-o", tmp_path / f"{EVIL}.csv"],
        ["watch", home / "msp.kedge", tmp_path / f"{EVIL}.csv", "--window", "20"],
        ["data", "show", f"folder:{home / EVIL}", "-o", tmp_path / f"{EVIL}.png"],
        ["evaluate", home / "msp.kedge", *sets],
        ["calibrate", home / "msp.kedge", f"folder:{home / EVIL}", "--out", tmp_path / f"{EVIL}.kedge"],
    ]
    for command in commands:
        done = run_cli(*command, columns=1000, TTY_COMPATIBLE=terminal, NO_COLOR="1")
        assert done.exit_code == 0, (command, done.output)
        for raw in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e", "\udcff"):
            assert raw not in done.output + done.stderr, command
        assert SHOWN in done.output, command
    assert r"bad\xff\x0a.png: " in run_cli(*commands[1]).output  # one line per image


def test_a_pipe_gets_whole_lines(home, tmp_path):
    name, detector = "n" * 200, home / "msp.kedge"
    long = tmp_path / f"{name}.npz"
    np.savez(long, x=images(20, seed=9).permute(0, 2, 3, 1).numpy())

    def lines(output):
        return [line.strip() for line in output.splitlines() if name in line]

    command = ["evaluate", detector, "--test", f"npz:{long}", "--ood", f"folder:{home / EVIL}", "--resamples", "0"]
    environment = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"} | {"COLUMNS": "80"}
    command = [sys.executable, "-m", "kedge", *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    caption, of_sets = lines(done.stdout)
    assert not [line for line in done.stdout.splitlines() if line.endswith(" ")]
    assert of_sets.startswith("By OOD set, in %.")
    assert caption.startswith(f"In distribution: {name}. In %")
    assert caption.endswith("on this machine.")
    wrote, following = lines(run_cli("calibrate", detector, f"npz:{long}", "--out", tmp_path / f"{name}.kedge").output)
    assert following.startswith("next")
    assert wrote.endswith(f"{tmp_path / name}.kedge")
    *shown, following = lines(run_cli("data", "show", f"npz:{long}", "-o", tmp_path / f"{name}.png").output)
    assert following.startswith("next")
    assert [line.split() for line in shown] == [["name", name], ["sheet", f"{tmp_path / name}.png"]]
