"""The detectors that come with kedge: by name, small, calibrated, with a card each, and right about what they know."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.errors import InputError
from kedge.io import artifact

NAMES = artifact.shipped()
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def test_cifar10_is_among_them():
    assert "cifar10" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_is_at_most_eight_megabytes_and_has_a_card(name):
    assert (artifact.SHIPPED / f"{name}.kedge").stat().st_size <= 8_000_000
    card = (artifact.SHIPPED / f"{name}.md").read_text()
    for part in ("## Data", "## Training", "## Accuracy and detection", "## Limits", "## Licence"):
        assert part in card


@pytest.mark.parametrize("name", NAMES)
def test_each_loads_by_name_calibrated(name):
    detector = kedge.load(name)
    assert detector.calibration.alpha == 0.05
    assert len(detector.calibration.scores) == 2500
    share = (detector.calibration.scores > detector.calibration.threshold).double().mean()
    assert 0.045 < share <= 0.05


def test_cifar10_knows_its_classes_and_says_how_it_was_made():
    detector = kedge.load("cifar10")
    assert detector.classes == CLASSES
    record = detector.net.record
    assert record["data"]["name"].startswith("cifar10")
    assert record["made with"]["commit"]
    assert record["network"]["spec"]["name"] == "airbench"


def scribble() -> Image.Image:
    """Black strokes on white, like nothing in CIFAR-10."""
    image = Image.new("RGB", (320, 320), "white")
    pen = ImageDraw.Draw(image)
    for step in range(0, 320, 40):
        pen.line((0, step, 320, 320 - step), fill="black", width=6)
    return image


def test_noise_and_a_scribble_are_out_of_distribution():
    noise = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    detector = kedge.load("cifar10")
    assert detector(noise).is_ood.double().mean() > 0.5
    assert bool(detector([scribble()]).is_ood[0])


def test_a_picture_is_scored_by_name_from_the_command_line(tmp_path):
    scribble().save(tmp_path / "scribble.png")
    done = run("score", "--detector", "cifar10", tmp_path / "scribble.png")
    assert done.exit_code == 0, done.output
    assert "OUT OF DISTRIBUTION" in done.output


def test_info_tells_of_it_by_name():
    told = json.loads(run("info", "cifar10", "--json").output)
    assert (told["method"], told["classes"], told["calibration_images"]) == ("amp", list(CLASSES), 2500)


def test_a_file_of_the_same_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = torch.rand(30, 3, 16, 16)
    kedge.MSP(kedge.models.build("compact", width=4)).fit(images).calibrate(images).save(tmp_path / "cifar10")
    assert kedge.load("cifar10").name == "msp"
    assert kedge.load(Path(artifact.SHIPPED) / "cifar10.kedge").name == "amp"


def test_a_folder_of_the_same_name_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    assert kedge.load("cifar10").name == kedge.from_pretrained("cifar10").name == "amp"
    with pytest.raises(InputError, match="--out must say where to write"):
        raise run("calibrate", "cifar10", f"folder:{tmp_path}").exception
    kedge.hub.save_pretrained(
        kedge.MSP(kedge.models.build("compact", width=4)).fit(torch.rand(9, 3, 16, 16)), "cifar10"
    )
    assert kedge.from_pretrained("cifar10").name == "msp"


def test_a_shipped_detector_is_not_written_over(tmp_path):
    before = (artifact.SHIPPED / "cifar10.kedge").read_bytes()
    with pytest.raises(InputError, match="--out must say where to write"):
        raise run("calibrate", "cifar10", f"folder:{tmp_path}").exception
    assert (artifact.SHIPPED / "cifar10.kedge").read_bytes() == before
