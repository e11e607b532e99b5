"""The command line itself: config files, plugins, warnings, and errors that name the option."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import typer

import kedge
from helpers import flat, images, run_cli
from kedge import cli
from kedge.errors import InputError


@pytest.fixture
def detector(tmp_path):
    kedge.MSP(flat()).fit(images()).save(tmp_path / "a.kedge")
    return tmp_path / "a.kedge"


def configured(folder, text, *arguments):
    (folder / "kedge.toml").write_text(text)
    return run_cli("--config", folder / "kedge.toml", *arguments)


def test_options_come_from_the_file(tmp_path, detector):
    text = "[info]\njson = true\n[data.list]\njson = true\n"
    assert json.loads(configured(tmp_path, text, "info", detector).output)["method"] == "msp"
    assert isinstance(json.loads(configured(tmp_path, text, "data", "list").output), list)
    assert not run_cli("info", detector).output.startswith("{")
    assert run_cli("info", detector, KEDGE_CONFIG=str(tmp_path / "kedge.toml")).output.startswith("{")


def test_what_is_typed_goes_before_the_file(tmp_path):
    text = '[reproduce]\nscale = "huge"\ndata-dir = "/nowhere"\n'
    assert "scale must be one of" in str(configured(tmp_path, text, "reproduce", "ablation").exception)
    typed = configured(tmp_path, text, "reproduce", "ablation", "--scale", "small", "--out", tmp_path)
    assert "/nowhere" in str(typed.exception)


def test_what_is_wrong_in_the_file_is_named(tmp_path):
    for text, message in [
        ("[trian]\nepochs = 3", "--config must have tables named after commands.*has 'trian'"),
        ("epochs = 3", "has 'epochs'"),
        ("[train]\nepoch = 3", r"train has the options accelerator, anchor, .*; got epoch"),
        ("[train\n", "--config must be TOML"),
        ("[evaluate]\nood = 'svhn'", r"ood of evaluate must be a list; got 'svhn': write ood = \['svhn'\]"),
    ]:
        with pytest.raises(InputError, match=message):
            raise configured(tmp_path, text, "data", "list").exception
    with pytest.raises(InputError, match="No such file"):
        raise run_cli("--config", tmp_path / "none.toml", "data", "list").exception


def test_an_error_names_the_option_and_not_the_argument(tmp_path, detector):
    np.savez(tmp_path / "a.npz", x=images().permute(0, 2, 3, 1).numpy())
    fresh = ["calibrate", "cifar10", f"npz:{tmp_path / 'a.npz'}", "--out", tmp_path / "b", "--alpha", "2"]
    assert str(run_cli(*fresh).exception).startswith("--alpha must lie in (0, 1); got 2")
    odd = ["score", "cifar10", tmp_path, "--out", tmp_path / "a", "--format", "x"]
    assert str(run_cli(*odd).exception).startswith("--format must be one of")
    missing = ["calibrate", "cifar10", f"folder:{tmp_path / 'none'}", "--out", tmp_path / "b"]
    assert str(run_cli(*missing).exception).startswith(f"IMAGES folder:{tmp_path / 'none'}: ")
    missing = ["evaluate", "cifar10", "--test", "npz:none.npz", "--ood", "cifar10"]
    assert str(run_cli(*missing).exception).startswith("--test npz:none.npz: ")


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(monkeypatch, tmp_path, detector):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kedge.io.facts.facts", interrupted)
    done = run_cli("info", detector)
    assert (done.exit_code, "stopped: nothing was written" in done.stderr) == (130, True)
    monkeypatch.setattr("kedge.data.sources.load_dataset", interrupted)
    command = "compare", "cifar10", "--train", "cifar10", "--held-out", "cifar10", "--out", tmp_path
    done = run_cli(*command)
    assert (done.exit_code, "stopped: nothing was written" in done.stderr) == (130, True)
    (tmp_path / "features").mkdir()
    done = run_cli(*command)
    words = f"{tmp_path / 'features'} is kept, and the same command goes on from there"
    assert f"resuming  {tmp_path / 'features'}" in done.output
    assert (done.exit_code, words in done.stderr) == (130, True)


def test_the_detector_comes_first_and_is_asked_for(tmp_path, detector):
    for command in ("score", "watch"):
        with pytest.raises(InputError, match="must follow the detector"):
            raise run_cli(command, detector).exception


class Plugin:
    def __init__(self, name, value):
        self.name, self.value = name, value


def test_a_plugin_adds_a_command_and_a_broken_one_is_reported_in_a_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "greetings.py").write_text(
        '"""Greetings."""\n\nimport typer\n\n\ndef greet(name: str = "world"):\n    """Say hello."""\n'
        '    typer.echo(f"hello {name}")\n\n\ndef odd(values: int | str):\n    """Take a number or a word."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = {"greet": "greetings:greet", "odd": "greetings:odd", "late": "no_module:greet", "score": "greetings:greet"}
    monkeypatch.setattr(cli, "entry_points", lambda group: [Plugin(*pair) for pair in values.items()])
    commands = typer.main.get_command(cli.app).commands
    assert commands["greet"].help == "Say hello."
    assert commands["score"].target == "kedge.cli.score:score"
    assert "late" not in commands
    lines = "".join(capsys.readouterr().err.split("\n"))
    assert lines.count("warning: the command") == 2
    assert "late (no_module:greet) cannot be loaded: there is no module no_module" in lines
    assert run_cli("greet", "--name", "you").output == "hello you\n"
    assert "the command odd (greetings:odd) cannot be loaded" in str(run_cli("odd").exception)


def test_help_and_completion_of_commands_import_no_torch():
    code = """
import contextlib, io, json, sys
from kedge.cli import app
for arguments, expected in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        app(arguments.split(), prog_name="kedge")
    assert expected in shown.getvalue(), (arguments, shown.getvalue())
    assert "torch" not in sys.modules, arguments"""
    commands = (*cli.COMMANDS, "data list", "demo", "reproduce", "bench")
    shown = [("--help", "Classify images"), *((f"{name} --help", "Usage: kedge") for name in commands)]
    completion = {"_KEDGE_COMPLETE": "complete_bash", "COMP_WORDS": "kedge tr", "COMP_CWORD": "1"}
    for pairs, more in ((shown, {}), ([("", "train")], completion)):
        command = [sys.executable, "-c", code, json.dumps(pairs)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_studies_add_their_commands():
    text = run_cli("--help").output
    assert all(f" {name} " in text for name in ("demo", "reproduce", "bench", "train", "score"))
    assert "train.epochs = 8" in text
    assert run_cli("--version").output.strip() == kedge.__version__


def test_help_texts_are_no_fragments_and_flags_have_no_type():
    def parameters(command):
        yield from (getattr(command, "loaded", command)).params
        for each in getattr(getattr(command, "loaded", command), "commands", {}).values():
            yield from parameters(each)

    shown = [getattr(parameter, "help", None) or "" for parameter in parameters(typer.main.get_command(cli.app))]
    assert not [text for text in shown if text and (text[0].islower() or text.startswith(("Of ", "In ")))]
    types = "<bool>", "<str>", "<path>", "<list"
    for command in ("score", "evaluate", "reproduce"):
        assert not [word for word in types if word in run_cli(command, "--help").output]


def test_help_in_a_pipe_wraps_nothing():
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    command = [sys.executable, "-m", "kedge", "fit", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60).stdout
    example = "kedge fit timm:resnet50 --train folder:photos/train --held-out folder:photos/val -o birds.kedge"
    assert f"  {example}\n" in help_text
    assert "  --seed N  " in help_text


@pytest.mark.parametrize("command", ["fit", "compare", "calibrate", "distill", "watch", "train"])
def test_help_fits_a_terminal_of_eighty_columns(command):
    lines = run_cli(command, "--help", columns=80).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]  # no option is cut off
    assert not [line for line in lines if line.strip() == "one"]  # paragraphs are broken by the terminal alone
    usage = next(line.rstrip() for line in lines if "Usage:" in line)
    assert usage.split("]")[1] in (
        " NETWORK",
        " DATA",
        " DETECTOR IMAGES",
        " DETECTOR",
        " DETECTOR ROWS...",
    )
