"""The command line itself: config files, plugins, warnings, and errors that name the option."""

import json

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
    odd = ["score", tmp_path, "--detector", "cifar10", "--out", tmp_path / "a", "--format", "x"]
    assert str(run_cli(*odd).exception).startswith("--format must be one of")


class Plugin:
    value = "package:function"

    def __init__(self, name, load):
        self.name, self.load = name, load


def greet(name: str = "world"):
    """Say hello."""
    typer.echo(f"hello {name}")


def odd(values: int | str):
    """Have a parameter that cannot be an option."""


def broken():
    raise ImportError("no such module")


def test_a_plugin_adds_a_command_and_a_broken_one_is_reported_in_a_line(monkeypatch, capsys):
    plugins = [Plugin("greet", lambda: greet), Plugin("odd", lambda: odd), Plugin("late", broken)]
    plugins.append(Plugin("score", lambda: greet))
    monkeypatch.setattr(cli, "entry_points", lambda group: plugins)
    app = typer.Typer()
    app.command()(cli.score)
    cli.add_plugins(app)
    assert set(typer.main.get_command(app).commands) == {"score", "greet"}
    lines = "".join(capsys.readouterr().err.split("\n"))
    assert lines.count("warning: the command") == 3
    assert "late (package:function) cannot be loaded: no such module" in lines


def test_the_studies_add_their_commands_and_help_shows_brackets():
    text = run_cli("--help").output
    assert all(f" {name} " in text for name in ("demo", "reproduce", "bench", "train", "score"))
    assert "[train]" in text
    assert run_cli("--version").output.strip() == kedge.__version__


def test_no_help_text_is_a_fragment():
    def texts(command):
        yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
        for each in getattr(command, "commands", {}).values():
            yield from texts(each)

    own = [
        typer.main.get_command(app) for app in map(only, (cli.calibrate, cli.export, cli.info, cli.score, cli.serve))
    ]
    assert not [text for command in own for text in texts(command) if text.startswith(("Of ", "In "))]


def only(function):
    app = typer.Typer()
    app.command()(function)
    return app
