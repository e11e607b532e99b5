"""``kedge info``, ``kedge calibrate`` and ``kedge evaluate``: what is done with a saved detector."""

import json
import re

import click
import numpy as np
import pytest
import torch
from PIL import Image

import kedge
from helpers import run_cli as run
from kedge.errors import FileFormatError, InputError
from kedge.models import build
from kedge.seeds import seeded
from test_report import check


def greys(level, seed, n=60):
    rng = np.random.default_rng(seed)
    return np.clip(rng.normal(level, 25, (n, 10, 10, 3)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Detectors, and sets of images as files."""
    home = tmp_path_factory.mktemp("detectors")
    for name, level, seed in (("held", 100, 1), ("fresh", 100, 2), ("test", 100, 3), ("bright", 220, 4)):
        np.savez(home / f"{name}.npz", x=greys(level, seed), y=np.arange(60) % 3)
    train = kedge.ImageSet.from_arrays(greys(100, 0), np.arange(60) % 3, name="greys", classes=("ant", "bee", "cow"))
    held = kedge.ImageSet.from_arrays(greys(100, 1), np.arange(60) % 3)
    with seeded(0):
        net = build("compact", width=4, classes=3)
    anchored = kedge.train(kedge.anchor(net), train, kedge.training.Recipe(epochs=1, batch=20, lr=0.01, crop=0), seed=5)
    kedge.AMP(anchored, k=4).fit(train).calibrate(held, alpha=0.1).save(home / "amp.kedge")
    kedge.MSP(net).fit(train).calibrate(held).save(home / "msp.kedge")
    return home


def test_info_tells_what_a_detector_is(folder):
    facts = json.loads(run("info", folder / "amp.kedge", "--json").output)
    detector = kedge.load(folder / "amp.kedge")
    assert facts["method"] == "amp"
    assert (facts["network"], facts["anchors"], facts["input"]) == ("compact", 4, "3 x 10 x 10")
    assert facts["classes"] == ["ant", "bee", "cow"]
    assert (facts["alpha"], facts["calibration_images"]) == (0.1, 60)
    assert facts["threshold"] == detector.calibration.threshold
    assert (facts["trained_on"], facts["training_images"], facts["epochs"], facts["seed"]) == ("greys", 60, 1, 5)
    assert facts["bytes"] == (folder / "amp.kedge").stat().st_size
    plain = json.loads(run("info", folder / "msp.kedge", "--json").output)
    assert (plain["method"], plain["anchors"], plain["epochs"]) == ("msp", None, None)


@pytest.mark.filterwarnings("ignore::kedge.errors.KedgeWarning")
def test_info_of_a_detector_that_can_flag_nothing_is_valid_json_and_says_so(folder, tmp_path):
    detector = kedge.load(folder / "msp.kedge").calibrate(torch.rand(5, 3, 10, 10))
    detector.save(tmp_path / "few.kedge")
    assert (
        json.loads(run("info", tmp_path / "few.kedge", "--json").output, parse_constant=pytest.fail)["threshold"]
        is None
    )
    assert "too few calibration images" in run("info", tmp_path / "few.kedge").output


def test_info_is_readable_too(folder):
    text = run("info", folder / "amp.kedge").output
    assert re.search(r"method\s+amp", text)
    assert re.search(r"classes\s+ant, bee, cow", text)


def test_what_a_file_says_is_text_and_no_markup(folder, tmp_path):
    header, tensors = kedge.io.artifact.read(folder / "amp.kedge")
    header["classes"] = ["[/b]", "[red]bee", "cow"]
    header["network"]["spec"]["arguments"]["pool"] = "max"
    kedge.io.artifact.write(tmp_path / "[/b].kedge", header, tensors)
    done = run("info", tmp_path / "[/b].kedge")
    assert done.exit_code == 0, done.output
    assert re.search(r"classes\s+\[/b\], \[red\]bee, cow", done.output)
    assert "pool max" in done.output


def test_a_path_is_text_and_no_markup(folder, tmp_path):
    home = tmp_path / "[red]"
    done = run("calibrate", folder / "msp.kedge", f"npz:{folder / 'fresh.npz'}", "--out", home / "a.kedge")
    assert "[red]/a.kedge" in done.output.replace("\n", "")
    Image.new("RGB", (10, 10)).save(tmp_path / "a.png")
    done = run("score", folder / "msp.kedge", tmp_path / "a.png", "-o", home / "a.csv")
    assert "[red]/a.csv.html" in done.output.replace("\n", "")
    done = run("watch", folder / "msp.kedge", home / "a.csv")
    assert "[red]/a-drift.html" in done.output.replace("\n", "")


def test_info_needs_no_network_that_is_not_kedge_s_own(tmp_path):
    images = torch.rand(30, 3, 4, 4)
    kedge.MSP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))).fit(images).save(tmp_path / "a.kedge")
    facts = json.loads(run("info", tmp_path / "a.kedge", "--json").output)
    assert (facts["network"], facts["threshold"]) == ("Sequential", None)


def test_info_of_another_file_is_an_error_that_says_so(tmp_path):
    (tmp_path / "a.kedge").write_bytes(b"no detector")
    assert isinstance(run("info", tmp_path / "a.kedge").exception, FileFormatError)
    kedge.io.artifact.write(tmp_path / "b.kedge", {"something": "else"}, {})
    with pytest.raises(FileFormatError, match=r"header must have the keys .*detector"):
        raise run("info", tmp_path / "b.kedge").exception


def test_calibrate_sets_the_threshold_anew(folder, tmp_path):
    done = run(
        "calibrate", folder / "amp.kedge", f"npz:{folder / 'fresh.npz'}", "--alpha", "0.2", "--out", tmp_path / "b"
    )
    assert done.exit_code == 0, done.output
    before, after = kedge.load(folder / "amp.kedge"), kedge.load(tmp_path / "b")
    fresh = kedge.ImageSet.from_arrays(greys(100, 2), np.arange(60) % 3)
    assert after.calibration.threshold == before.calibrate(fresh, alpha=0.2).calibration.threshold
    assert kedge.load(folder / "amp.kedge").calibration.alpha == 0.1  # the first file is as it was
    text = json.loads(
        run(
            "calibrate", tmp_path / "b", f"npz:{folder / 'fresh.npz'}", "--alpha", "0.2", "--overwrite", "--json"
        ).stdout
    )
    expected = {"file": str(tmp_path / "b"), "threshold": after.calibration.threshold, "images": 60}
    assert text == expected | {"alpha": 0.2, "delta": None}


def test_evaluate_prints_what_the_function_gives(folder, tmp_path):
    sets = ["--test", f"npz:{folder / 'test.npz'}", "--ood", f"npz:{folder / 'bright.npz'}"]
    files = [folder / "amp.kedge", folder / "msp.kedge"]
    options = ["--controls", "--resamples", 20, "--json", "--report", tmp_path / "report.html"]
    train = ["--train", f"npz:{folder / 'fresh.npz'}"]
    done = run("evaluate", *files, *sets, *options, *train)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert list(facts["results"]) == ["amp", "amp, tau permuted", "msp"]
    test, bright = (kedge.data.load_dataset(f"npz:{folder / name}") for name in ("test.npz", "bright.npz"))
    again = kedge.evaluate({"msp": kedge.load(folder / "msp.kedge")}, test, [bright], resamples=20)
    assert facts["results"]["msp"]["metrics"] == json.loads(json.dumps(again.as_dict()))["results"]["msp"]["metrics"]
    assert "nearest training images" in check((tmp_path / "report.html").read_text()).text
    with pytest.raises(InputError, match="--train must come with --report"):
        raise run("evaluate", *files, *sets, *train).exception


def test_evaluate_refuses_images_that_a_detector_was_calibrated_on(folder):
    sets = ["--test", f"npz:{folder / 'held.npz'}", "--ood", f"npz:{folder / 'bright.npz'}"]
    done = run("evaluate", folder / "msp.kedge", *sets)
    assert isinstance(done.exception, InputError)
    assert "calibration image" in str(done.exception)
    with pytest.raises(InputError, match="DETECTOR must be different detectors"):
        raise run("evaluate", folder / "msp.kedge", folder / "msp.kedge", *sets).exception


@pytest.mark.parametrize("label", [1000, 2**40])
def test_evaluate_refuses_classes_that_are_not_the_detector_s(folder, tmp_path, label):
    labels = np.arange(20) % 3
    labels[3] = label
    np.savez(tmp_path / "test.npz", x=greys(100, 3, 20), y=labels)
    sets = ["--test", f"npz:{tmp_path / 'test.npz'}", "--ood", f"npz:{folder / 'bright.npz'}"]
    words = "^--test must show the classes of 'msp', .* ant, bee, cow; 'test' has 1000"
    words = words if label == 1000 else "^--test .*: labels must"
    with pytest.raises(InputError, match=words):
        raise run("evaluate", folder / "msp.kedge", *sets).exception


def test_sets_of_one_name_are_called_by_their_paths(folder, tmp_path):
    for name in ("known", "strange"):
        (tmp_path / name / "test").mkdir(parents=True)
        for number, pixels in enumerate(greys(100 if name == "known" else 220, 7, 20)):
            Image.fromarray(pixels).save(tmp_path / name / "test" / f"{number}.png")
    known, strange = (f"{tmp_path / name / 'test'}" for name in ("known", "strange"))
    sets = ["--test", f"folder:{known}", "--ood", f"folder:{strange}", "--ood", f"npz:{folder / 'bright.npz'}"]
    done = run("evaluate", folder / "msp.kedge", *sets, "--resamples", 0, "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["results"]["msp"]["metrics"]) == [strange, "bright"]


@pytest.mark.parametrize(("columns", "tables"), [("80", 2), ("160", 1)])
def test_evaluate_shows_all_metrics_in_a_narrow_terminal_too(folder, columns, tables):
    sets = ["--test", f"npz:{folder / 'test.npz'}", "--ood", f"npz:{folder / 'bright.npz'}", "--resamples", "0"]
    done = run("evaluate", folder / "msp.kedge", *sets, columns=columns, TTY_COMPATIBLE="1")
    assert done.exit_code == 0, done.output
    shown = click.unstyle(done.output)
    assert "…" not in shown
    assert shown.count("method") == tables + 1
    assert re.search(r"msp +bright +[\d.]+ +[\d.]+ +[\d.]+", shown)  # a row for the set
    assert all(re.search(rf"\b{head} [↑↓]", shown) for head in ("Accuracy", "AUROC", "FPR95", "ECE", "AURC"))


def test_evaluate_shows_the_metrics_that_are_named(folder):
    sets = ["--test", f"npz:{folder / 'test.npz'}", "--ood", f"npz:{folder / 'bright.npz'}", "--resamples", "0"]
    done = run("evaluate", folder / "msp.kedge", *sets, "--metric", "oscr", "--metric", "nll")
    assert done.exit_code == 0, done.output
    shown = click.unstyle(done.output)
    assert re.search(r"method +OSCR ↑ +NLL ↓ +passes +ms", shown)
    assert "AUROC" not in shown
    with pytest.raises(InputError, match=r"--metric must be one of 'accuracy', .*'oscr'.*; got 'oscar'"):
        raise run("evaluate", folder / "msp.kedge", *sets, "--metric", "oscar").exception


def test_warnings_are_told_in_a_line(folder, tmp_path):
    np.savez(tmp_path / "few.npz", x=greys(100, 2, 5))
    done = run("calibrate", folder / "msp.kedge", f"npz:{tmp_path / 'few.npz'}", "--out", tmp_path / "a.kedge")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("warning: ")
    assert "KedgeWarning" not in done.stderr
