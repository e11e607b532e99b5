"""A config file holds any command's options; what is typed goes before it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.errors import InputError


@pytest.fixture
def detector(tmp_path):
    images = torch.rand(30, 3, 4, 4)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    kedge.MSP(net).fit(images).save(tmp_path / "a.kedge")
    return tmp_path / "a.kedge"


def run(config, *arguments, **env):
    return CliRunner(env=env).invoke(app, ["--config", str(config), *map(str, arguments)])


def test_options_come_from_the_file(tmp_path, detector):
    (tmp_path / "kedge.toml").write_text("[info]\njson = true\n")
    assert json.loads(run(tmp_path / "kedge.toml", "info", detector).output)["method"] == "msp"
    assert not CliRunner().invoke(app, ["info", str(detector)]).output.startswith("{")
    by_variable = CliRunner(env={"KEDGE_CONFIG": str(tmp_path / "kedge.toml")}).invoke(app, ["info", str(detector)])
    assert by_variable.output.startswith("{")


def test_what_is_typed_goes_before_the_file(tmp_path):
    (tmp_path / "kedge.toml").write_text('[reproduce]\nscale = "huge"\ndata-dir = "/nowhere"\n')
    assert "scale must be one of" in str(run(tmp_path / "kedge.toml", "reproduce", "ablation").exception)
    typed = run(tmp_path / "kedge.toml", "reproduce", "ablation", "--scale", "small", "--out", tmp_path)
    assert "/nowhere" in str(typed.exception)


def test_commands_within_commands_have_tables_within_tables(tmp_path):
    (tmp_path / "kedge.toml").write_text("[data.list]\njson = true\n")
    assert isinstance(json.loads(run(tmp_path / "kedge.toml", "data", "list").output), list)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nepochs = 3", "config must have a table for each command.*has 'trian'"),
        ("epochs = 3", "has 'epochs'"),
        ("[train]\nepoch = 3", r"train has the options accelerator, batch, .*; got epoch"),
        ("[train\n", "config must be TOML"),
        ("[evaluate]\nood = 'svhn'", r"ood of evaluate must be a list; got 'svhn': write ood = \['svhn'\]"),
        ("[bench]\nbatch = 3", r"batch of bench must be a list; got 3: write batch = \[3\]"),
    ],
)
def test_what_the_file_has_wrong_is_named(tmp_path, text, message):
    (tmp_path / "kedge.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        raise run(tmp_path / "kedge.toml", "data", "list").exception


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot: No such file"):
        raise run(tmp_path / "none.toml", "data", "list").exception
