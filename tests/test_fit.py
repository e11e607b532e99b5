"""``kedge fit`` and `kedge.protect`: a classifier that exists already, from a folder of pictures to every command."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import kedge
from helpers import colors, run_cli
from kedge.errors import InputError, KedgeWarning
from kedge.models.graph import StoredGraph

FACTORY = """
import torch, kedge

def build(classes=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(inplace=True), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, classes))

def whole():
    return kedge.Classifier(build(), mean=0.5, std=0.25)

def wide():
    return kedge.Classifier(build(5), mean=0.5, std=0.25)

class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build()

    def forward(self, x):
        return self.body(x) * (2 if x.mean() > 0.5 else 1)

def branching():
    return kedge.Classifier(Branching(), mean=0.5, std=0.25)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with pictures for training and calibration, and a module that builds a network."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 12), ("held", 20), ("fresh", 5)):
        for number, name in enumerate(("red", "green", "blue")):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 120, (14, 18, 3), np.uint8)
                pixels[..., number] += 100
                Image.fromarray(pixels).save(place / f"{i}.png")
    (tmp_path / "photo_net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "photo_net", raising=False)
    return tmp_path


def test_a_fitted_file_works_with_every_command_without_the_networks_code(folder: Path) -> None:
    fitted = run_cli(
        "fit", "photo_net:whole", "--train", "folder:train", "--held-out", "folder:held", "--size", 12, "-o", "a.kedge"
    )
    assert fitted.exit_code == 0, fitted.output
    assert "accuracy" in fitted.output
    assert "kedge serve a.kedge" in fitted.output
    sys.modules.pop("photo_net", None)
    (folder / "photo_net.py").unlink()  # nothing below needs the network's code
    detector = kedge.load("a.kedge")
    assert isinstance(detector.net.network, StoredGraph)
    assert detector.classes == ("blue", "green", "red")
    commands = [
        ("info", "a.kedge"),
        ("score", "--detector", "a.kedge", "held", "-o", "rows.csv", "--no-summary"),
        ("calibrate", "a.kedge", "folder:held", "--alpha", "0.2", "--out", "b.kedge"),
        ("evaluate", "a.kedge", "--test", "folder:fresh", "--ood", "folder:train", "--resamples", 0),
    ]
    for command in commands:
        result = run_cli(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)


def test_a_file_without_a_graph_opens_with_the_networks_own_code(folder: Path) -> None:
    fitted = run_cli(
        "fit", "photo_net:branching", "--train", "folder:train", "--held-out", "folder:held", "--size", 12,
        "-o", "a.kedge",
    )  # fmt: skip
    assert fitted.exit_code == 0
    assert "opens only with the network's own code (--model package.module:factory" in fitted.stderr
    commands: list[tuple[object, ...]] = [
        ("score", "--detector", "a.kedge", "held", "-o", "rows.csv", "--no-summary"),
        ("calibrate", "a.kedge", "folder:held", "--alpha", "0.2", "--out", "b.kedge"),
        ("evaluate", "a.kedge", "--test", "folder:fresh", "--ood", "folder:train", "--resamples", 0),
        ("export", "a.kedge", "-o", "a.onnx"),
        ("serve", "a.kedge", "--port", 0),
    ]
    for command in commands:
        result = run_cli(*command)
        assert str(result.exception).startswith("--model must be given for this file"), command
        result = run_cli(*command, "--model", "photo_net:nothing")
        assert str(result.exception).startswith("--model must be package.module:factory"), command
    for command in commands[:3]:
        result = run_cli(*command, "--model", "photo_net:branching")
        assert result.exit_code == 0, (command, result.output, result.exception)
    for command in (("watch", "rows.csv", "--detector", "a.kedge"), ("info", "a.kedge")):  # they run no network
        assert run_cli(*command).exit_code == 0, command
    assert kedge.load("a.kedge", model="photo_net:branching").classes == ("blue", "green", "red")


def test_a_factory_replaces_the_graph_only_where_it_is_named(folder: Path) -> None:
    base = ("--train", "folder:train", "--held-out", "folder:held", "--size", 12, "-o", "a.kedge")
    assert run_cli("fit", "photo_net:whole", *base).exit_code == 0
    del sys.modules["photo_net"]
    assert isinstance(kedge.load("a.kedge").net.network, StoredGraph)
    assert "photo_net" not in sys.modules
    own = kedge.load("a.kedge", model="photo_net:build")
    assert isinstance(own.net.network, nn.Sequential)
    images = torch.rand(5, 3, 12, 12)
    torch.testing.assert_close(own.score(images), kedge.load("a.kedge").score(images))
    with pytest.raises(InputError, match="model must be the Sequential that was saved"):
        kedge.load("a.kedge", model="photo_net:wide")


def test_an_existing_file_is_kept(folder: Path) -> None:
    (folder / "a.kedge").write_text("mine")
    result = run_cli("fit", "photo_net:whole", "--train", "folder:train", "--size", 12, "-o", "a.kedge")
    assert "--overwrite" in str(result.exception)
    assert (folder / "a.kedge").read_text() == "mine"


def test_bad_input_names_the_option(folder: Path) -> None:
    base = ("fit", "photo_net:whole", "--train", "folder:train", "--held-out", "folder:held", "-o", "a.kedge")
    for more, words in {
        ("--method", "knm"): "--method",
        ("--mean", "a,b"): "--mean",
        ("--weights", "none.pth"): "weights",
    }.items():
        result = run_cli(*base, *more)
        assert isinstance(result.exception, InputError)
        assert words in str(result.exception)
        assert not (folder / "a.kedge").exists()


def small_network(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, classes))


def test_protect_reports_what_held_out_images_show() -> None:
    net = kedge.Classifier(small_network(), mean=0.5, std=0.25)
    detector = kedge.protect(net, colors(90), colors(80, seed=1), k=5)
    record = detector.net.record["held_out"]
    assert (record["images"], record["judged"]) == (80, 40)
    second = colors(80, seed=1).split(0.5, seed=0)[1]
    assert record["accuracy"] == pytest.approx(float((detector(second).label == second.labels).double().mean()))
    assert detector.calibration is not None
    assert len(detector.calibration.scores) == 80


def test_protect_warns_where_the_promise_is_weaker() -> None:
    net = kedge.Classifier(small_network(), mean=0.5, std=0.25)
    with pytest.warns(KedgeWarning, match="held_out"):
        kedge.protect(net, colors(200), k=5)
    with pytest.warns(KedgeWarning, match="5 classes"):
        detector = kedge.protect(
            kedge.Classifier(small_network(5), mean=0.5, std=0.25), colors(90), colors(80, seed=1), k=5
        )
    assert detector.net.record["held_out"]["accuracy"] is None
    assert detector.classes == ()
    with pytest.raises(InputError, match="held_out"):
        kedge.protect(net, torch.rand(40, 3, 8, 8))
    with pytest.raises(InputError, match="method"):
        kedge.protect(net, colors(90), method="none")
