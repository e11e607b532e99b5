"""``kedge train``: from a data set to a calibrated detector in one command."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from typer.testing import CliRunner

import kedge
from kedge.cli import app, main


@pytest.fixture
def images(tmp_path):
    """Three classes that differ in brightness, as a file."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = rng.integers(0, 60, (240, 12, 12, 3)) + 80 * y[:, None, None, None]
    np.savez(tmp_path / "toy.npz", x=x.astype(np.uint8), y=y)
    return tmp_path / "toy.npz"


def arguments(images, out, *more):
    common = ["--network", "compact", "--epochs", "2", "--batch", "24", "--hold-out", "0.2", "--out", str(out)]
    return ["train", f"npz:{images}", *common, *more]


def test_it_writes_a_calibrated_detector_a_history_and_a_record(images, tmp_path):
    done = CliRunner().invoke(app, arguments(images, tmp_path / "run", "--seed", "3", "--tensorboard"))
    assert done.exit_code == 0, done.output
    detector = kedge.load(tmp_path / "run" / "detector.kedge")
    assert isinstance(detector, kedge.AMP)
    assert len(detector.calibration.scores) == 48
    assert detector.net.record["seed"] == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert json.loads((tmp_path / "run" / "record.json").read_text())["recipe"]["epochs"] == 2
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert "held-out accuracy" in done.output


def test_a_plain_network_gets_the_energy_score(images, tmp_path):
    done = CliRunner().invoke(app, arguments(images, tmp_path / "r[u]n", "--plain"))
    assert done.exit_code == 0, done.output
    assert "r[u]n/detector.kedge" in done.output.replace("\n", "")  # a path is text and no markup
    detector = kedge.load(tmp_path / "r[u]n" / "detector.kedge")
    assert isinstance(detector, kedge.Energy)
    assert detector.centred
    assert not isinstance(detector.net, kedge.Anchored)


@pytest.mark.skipif(find_spec("lightning_fabric") is None, reason="lightning_fabric is missing: kedge[fabric]")
def test_two_devices_on_this_machine(images, tmp_path):
    short = ("--plain", "--epochs", "1", "--devices", "2", "--accelerator", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "kedge", *arguments(images, tmp_path / "run", *short)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert kedge.load(tmp_path / "run" / "detector.kedge").net.record["processes"] == 2


def test_an_unforeseen_recipe_is_told_in_one_line_with_exit_code_2(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kedge", *arguments(images, tmp_path / "run", "--recipe", "none")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: recipe must be")


def test_one_name_says_how_to_train_and_how_to_read(images, tmp_path):
    done = CliRunner().invoke(app, arguments(images, tmp_path / "run", "--variant", "recommended"))
    assert done.exit_code == 0, done.output
    detector = kedge.load(tmp_path / "run" / "detector.kedge")
    options = detector.net.options
    assert (options.per_sample, options.mask, options.made) == (True, 0.0, 0.2)
    assert detector.net.record["loss"]["name"] == "made outliers"
    assert (detector.variant, detector.views, detector.tau) == ("recommended", 6, "mean")


@pytest.mark.parametrize("share", ["1.5", "0", "nan"])
def test_a_share_to_hold_out_is_named_as_it_was_given(images, tmp_path, share):
    done = CliRunner().invoke(app, arguments(images, tmp_path / "run", "--hold-out", share))
    with pytest.raises(kedge.errors.InputError, match=rf"--hold-out must lie in \(0, 1\); got {float(share)}"):
        raise done.exception


def test_options_of_anchors_do_not_go_with_a_plain_network(images, tmp_path):
    done = CliRunner().invoke(app, arguments(images, tmp_path / "run", "--plain", "--no-spread", "--mask", "0.1"))
    with pytest.raises(kedge.errors.InputError, match="--per-sample, --mask must not come with --plain"):
        raise done.exception


@pytest.mark.skipif(find_spec("lightning_fabric") is None, reason="lightning_fabric is missing: kedge[fabric]")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--accelerator", "foo"), "invalid accelerator name"),
        (("--precision", "foo"), "Precision 'foo' is invalid"),
        (("--accelerator", "mps"), "accelerator is not available"),
        (("--accelerator", "tpu"), "torch_xla"),
    ],
)
def test_what_fabric_has_not_is_told_in_a_line(images, tmp_path, options, reason):
    done = CliRunner().invoke(app, arguments(images, tmp_path / "run", *options))
    with pytest.raises(kedge.errors.InputError, match=f"must be what Fabric has on this machine; got .*{reason}"):
        raise done.exception
