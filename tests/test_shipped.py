"""The detectors that come with kedge: by name, small, calibrated, with a card each, and right about their classes."""

import json

import pytest
import torch
from PIL import Image, ImageDraw

import kedge
from helpers import images, network, run_cli
from kedge.errors import InputError
from kedge.io import artifact

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.mark.parametrize("name", artifact.shipped())
def test_each_is_small_and_calibrated_and_has_a_card(name):
    assert (artifact.SHIPPED / f"{name}.kedge").stat().st_size <= 8_000_000
    card = (artifact.SHIPPED / f"{name}.md").read_text()
    for part in ("## Data", "## Training", "## Accuracy and detection", "## Limits", "## Licence"):
        assert part in card
    calibration = kedge.load(name).calibration
    assert (calibration.alpha, len(calibration.scores)) == (0.05, 2500)
    assert 0.045 < (calibration.scores > calibration.threshold).double().mean() <= 0.05


def test_cifar10_records_its_classes_and_its_training():
    detector = kedge.load("cifar10")
    assert detector.classes == CLASSES
    record = detector.net.record
    assert record["data"]["name"].startswith("cifar10")
    assert record["made with"]["commit"]
    assert record["network"]["spec"]["name"] == "airbench"
    info = json.loads(run_cli("info", "cifar10", "--json").output)
    assert (info["method"], info["classes"], info["calibration_images"]) == ("amp", list(CLASSES), 2500)


def test_noise_and_a_scribble_are_out_of_distribution(tmp_path):
    scribble = Image.new("RGB", (320, 320), "white")
    for step in range(0, 320, 40):
        ImageDraw.Draw(scribble).line((0, step, 320, 320 - step), fill="black", width=6)
    scribble.save(tmp_path / "scribble.png")
    detector = kedge.load("cifar10")
    assert detector(images(20, side=32)).is_ood.double().mean() > 0.5
    assert bool(detector([scribble]).is_ood[0])
    done = run_cli("score", "cifar10", tmp_path / "scribble.png")
    assert done.exit_code == 0, done.output
    assert "OUT OF DISTRIBUTION" in done.output


def test_a_file_of_the_same_name_goes_first_and_a_folder_does_not_hide_it(tmp_path, monkeypatch):
    other = kedge.MSP(network()).fit(images()).calibrate(torch.rand(30, 3, 8, 8))
    for place, make in (("file", other.save), ("folder", lambda path: kedge.hub.save_pretrained(other, path))):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        make("cifar10")
        assert kedge.from_pretrained("cifar10").name == "msp"
        assert kedge.load("cifar10").name == ("msp" if place == "file" else "amp")
        assert kedge.load(artifact.SHIPPED / "cifar10.kedge").name == "amp"


def test_a_shipped_detector_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    before = (artifact.SHIPPED / "cifar10.kedge").read_bytes()
    with pytest.raises(InputError, match="--out must name a file to write"):
        raise run_cli("calibrate", "cifar10", f"folder:{tmp_path}").exception
    assert (artifact.SHIPPED / "cifar10.kedge").read_bytes() == before
