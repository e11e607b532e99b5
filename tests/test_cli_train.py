"""``kedge train``: from a data set to a calibrated detector."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

import kedge
from helpers import colors, run_cli
from kedge.errors import InputError
from kedge.models.graph import StoredGraph

needs_fabric = pytest.mark.skipif(
    find_spec("lightning_fabric") is None, reason="lightning_fabric is missing: kedge[fabric]"
)


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
    done = run_cli(*arguments(images, tmp_path / "run", "--seed", "3", "--tensorboard"))
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


def test_an_unanchored_network_gets_the_kl_to_uniform_score(images, tmp_path):
    done = run_cli(*arguments(images, tmp_path / "r[u]n", "--no-anchor", "--synthetic-outliers", "0.3", "--half"))
    assert done.exit_code == 0, done.output
    assert "r[u]n/detector.kedge" in done.output.replace("\n", "")  # a path is text, not markup
    detector = kedge.load(tmp_path / "r[u]n" / "detector.kedge")
    assert isinstance(detector, kedge.KLUniform)
    assert not isinstance(detector.net, kedge.Anchored)
    assert detector.net.record["loss"]["share"] == 0.3
    assert all(p.equal(p.half().float()) for p in detector.net.parameters())


def test_a_loss_and_an_augmentation_are_chosen_by_name(images, tmp_path):
    done = run_cli(*arguments(images, tmp_path / "run", "--no-anchor", "--loss", "t2fnorm", "--pixmix"))
    assert done.exit_code == 0, done.output
    record = kedge.load(tmp_path / "run" / "detector.kedge").net.record
    assert record["loss"]["name"] == "t2fnorm"
    assert record["recipe"]["pixmix"] is True


@needs_fabric
@pytest.mark.slow  # test_distributed.py runs the command in two processes that are there already
def test_two_devices_on_this_machine(images, tmp_path):
    short = ("--no-anchor", "--epochs", "1", "--devices", "2", "--accelerator", "cpu")
    command = [sys.executable, "-m", "kedge", *arguments(images, tmp_path / "run", *short)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert kedge.load(tmp_path / "run" / "detector.kedge").net.record["processes"] == 2


def test_a_variant_sets_training_and_scoring(images, tmp_path):
    done = run_cli(*arguments(images, tmp_path / "run", "--variant", "recommended"))
    assert done.exit_code == 0, done.output
    detector = kedge.load(tmp_path / "run" / "detector.kedge")
    options = detector.net.options
    assert (options.per_sample, options.mask, options.synthetic_outliers) == (True, 0.0, 0.2)
    assert detector.net.record["loss"]["name"] == "synthetic outliers"
    assert (detector.variant, detector.tta, detector.tau) == ("recommended", 6, "mean")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hold-out", "1.5"), r"--hold-out must lie in \(0, 1\); got 1.5"),
        (("--hold-out", "nan"), r"--hold-out must lie in \(0, 1\); got nan"),
        (("--variant", "none"), "variant must be one of"),
        (("--recipe", "none"), "recipe must be"),
        (("--loss", "logit norm"), "--loss must be one of 'cross-entropy', 'logit-norm', 't2fnorm'"),
        (("--loss", "t2fnorm", "--variant", "recommended"), "--loss t2fnorm must come without synthetic outliers"),
        (("--freeze", "--pixmix"), "--pixmix must come without --freeze"),
        (("--freeze", "--recipe", "fast", "--lr", "0.1"), "--recipe, --batch, --lr must come without --freeze"),
        (("--no-anchor", "--no-per-sample", "--mask", "0.1"), "--per-sample, --mask must come with --anchor"),
    ],
)
def test_options_are_checked_before_training(images, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        raise run_cli(*arguments(images, tmp_path / "run", *options)).exception
    assert not (tmp_path / "run").exists()


def test_images_on_disk_need_a_size_and_damaged_ones_are_skipped(tmp_path):
    for number in range(24):
        folder = tmp_path / "photos" / ("dark" if number % 2 else "light")
        folder.mkdir(exist_ok=True, parents=True)
        color = (20, 30, 40) if number % 2 else (220, 210, 200)
        Image.new("RGB", (20 + number, 30), color).save(folder / f"{number}.png")
    command = ["train", f"folder:{tmp_path}/photos", "--epochs", "1", "--batch", "8", "--out", tmp_path / "run"]
    assert "--size" in str(run_cli(*command).exception)
    done = run_cli(*command, "--size", "16", "--workers", "0")
    assert done.exit_code == 0, done.output
    assert kedge.load(tmp_path / "run" / "detector.kedge").preprocess.shape == (3, 16, 16)
    if "on_error" in kedge.data.StreamedSet.__dataclass_fields__:
        for number in (5, 6, 7, 12):
            (tmp_path / "photos" / ("dark" if number % 2 else "light") / f"{number}.png").write_bytes(b"no image")
        done = run_cli(*command, "--size", "16", "--workers", "2", "--overwrite")
        assert done.exit_code == 0, done.output
        skipped = kedge.load(tmp_path / "run" / "detector.kedge").net.record["skipped"]
        assert all(f"{reason.split()[0].split('/')[1]}" in done.output for reason in skipped)
        assert 1 <= len(skipped) <= 4  # the others were held out


@needs_fabric
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--accelerator", "foo", "invalid accelerator name"),
        ("--precision", "foo", "Precision 'foo' is invalid"),
        ("--accelerator", "tpu", "torch_xla"),
    ],
)
def test_what_fabric_does_not_have_is_an_input_error(images, tmp_path, option, value, reason):
    with pytest.raises(InputError, match=f"must be available to Fabric on this machine; got .*{reason}"):
        raise run_cli(*arguments(images, tmp_path / "run", option, value)).exception


def test_a_network_of_timm_is_trained_by_name_and_its_head_alone(tmp_path):
    """Weights come from a file; the file of the detector opens without timm."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    save_file(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "a.safetensors")
    data = colors(150, side=32)
    np.savez(tmp_path / "colors.npz", x=data.images.permute(0, 2, 3, 1).numpy(), y=data.labels.numpy())
    weights = ("--network", "timm:test_resnet", "--weights", tmp_path / "a.safetensors")
    common = ["train", f"npz:{tmp_path / 'colors.npz'}", *weights]
    frozen = run_cli(*common, "--freeze", "--hold-out", 0.4, "--out", tmp_path / "frozen")
    assert frozen.exit_code == 0, frozen.exception
    detector = kedge.load(tmp_path / "frozen" / "detector.kedge")
    assert isinstance(detector.net.network, StoredGraph)
    assert float((detector(data.images).label == data.labels).double().mean()) > 0.9
    tuned = run_cli(*common, "--anchor", "--epochs", 1, "--hold-out", 0.4, "--out", tmp_path / "tuned")
    assert tuned.exit_code == 0, tuned.exception
    assert kedge.load(tmp_path / "tuned" / "detector.kedge").name == "amp"
