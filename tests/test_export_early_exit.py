"""An exported detector with early exit: one file that runs all anchors only for the images that need it."""

import copy
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import kedge
from helpers import run_cli
from kedge.data.digits import digits
from kedge.data.leakage import halves
from kedge.errors import InputError
from kedge.export import OnnxDetector, compare_verdicts, export_onnx, quantise, recalibrate
from kedge.models import build
from kedge.seeds import seeded

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
from kedge.export import cascade  # noqa: E402 -- after what it needs
from kedge.export.file import read_model, set_tensors, write_model  # noqa: E402

ENGINES = ["onnxruntime", *(["openvino"] if find_spec("openvino") else [])]


@pytest.fixture(scope="module")
def parts():
    train, rest = digits().split(0.7)
    return train, *rest.split(0.6)


@pytest.fixture(scope="module")
def net(parts):
    with seeded(0):
        net = kedge.anchor(build("compact", width=4, channels=1))
    kedge.train(net, parts[0], kedge.training.recipe("demo", epochs=1), seed=0)
    return net


@pytest.fixture(scope="module")
def detector(net, parts):
    return kedge.EarlyExit(net, k=4).fit(parts[0]).calibrate(parts[1])


@pytest.fixture(scope="module")
def home(detector, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive")
    export_onnx(detector, folder / "auto.onnx")
    quantise(folder / "auto.onnx", folder / "int8.onnx", parts[0], parts[1])
    return folder


def tensor(path, name):
    """A number in a file."""
    return float(onnx.numpy_helper.to_array({t.name: t for t in onnx.load(path).graph.initializer}[name]))


@pytest.fixture(scope="module")
def mixed(parts):
    """Images of which some exit early and some do not."""
    with seeded(1):
        noise = torch.randint(0, 256, (40, *parts[2].images.shape[1:]), dtype=torch.uint8)
        return torch.cat([parts[2].images[:80], noise])[torch.randperm(120)]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_gives_the_detector_s_outputs_in_as_many_passes(home, detector, mixed, engine):
    expected = detector(mixed)
    for batch in (1, 7, 120):
        outputs = OnnxDetector(home / "auto.onnx", engine=engine)(mixed, batch_size=batch)
        assert set(outputs["passes"].tolist()) == {2, 4}
        assert outputs["passes"].mean() == pytest.approx(detector.mean_passes(mixed))
        np.testing.assert_array_equal(outputs["label"], expected.label)
        np.testing.assert_array_equal(outputs["is_ood"], expected.is_ood)
        np.testing.assert_allclose(outputs["score"], expected.score, atol=1e-4 * float(expected.score.abs().max()))
        np.testing.assert_allclose(outputs["tau"], expected.tau, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outputs["probability"], expected.probability.amax(dim=1), rtol=1e-4)
    assert compare_verdicts(detector, home / "auto.onnx").is_close


@pytest.mark.parametrize("variant", ["paper", "recommended"])
def test_an_image_has_the_score_of_as_many_anchors_as_were_used(home, net, parts, mixed, variant, tmp_path):
    """Compared with AMP on two anchors, or all; the recommended variant pairs them with views of the image."""
    full, auto = (
        kind(copy.deepcopy(net), k=4, variant=variant).fit(parts[0]).calibrate(parts[1])
        for kind in (kedge.AMP, kedge.EarlyExit)
    )
    assert torch.equal(full.net.anchors, auto.net.anchors)
    if variant == "recommended":  # the file of the other is there
        export_onnx(auto, tmp_path / "auto.onnx")
    logits_k = full.net.per_anchor_logits(full.as_input(mixed), tta=full.tta).detach()
    model = read_model((home if variant == "paper" else tmp_path) / "auto.onnx")
    for bound, passes in ((np.inf, 2), (-np.inf, 4)):
        set_tensors(model, {"settled": np.float32(bound)})
        write_model(model, tmp_path / "bound.onnx")
        outputs = OnnxDetector(tmp_path / "bound.onnx")(mixed)
        scores = full.of_per_anchor_logits(logits_k[:passes]).score.numpy()
        np.testing.assert_allclose(outputs["score"], scores, atol=1e-4 * np.abs(scores).max())
        assert set(outputs["passes"].tolist()) == {passes}


def test_a_file_splits_into_the_graphs_that_were_joined(home):
    model = read_model(home / "auto.onnx")
    few, rest, passes = cascade.parts(model)
    for one in (few, rest):
        onnx.checker.check_model(one)
    assert passes == (2, 4)
    assert [value.name for value in rest.graph.input] == ["images", "known"]
    again = cascade.join(few, rest, passes)
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in model.graph.node]
    assert cascade.parts(few) is None


def test_eight_bits_get_their_own_exit_threshold_and_keep_the_guarantee(home, parts):
    held, test = parts[1], parts[2]
    float32, int8 = OnnxDetector(home / "auto.onnx"), OnnxDetector(home / "int8.onnx")
    exact, outputs = float32(test), int8(test)
    assert (home / "int8.onnx").stat().st_size < 0.6 * (home / "auto.onnx").stat().st_size
    assert float(np.mean(exact["label"] == outputs["label"])) > 0.97
    assert 2 < outputs["passes"].mean() < 4
    assert outputs["is_ood"].mean() <= 0.1
    first, _ = halves(held, int8.preprocess, "the test needs them")
    bound, scores, model = tensor(home / "int8.onnx", "settled"), [], read_model(home / "int8.onnx")
    for extreme in (np.inf, -np.inf):
        set_tensors(model, {"settled": np.float32(extreme)})
        write_model(model, home / "extreme.onnx")
        scores.append(OnnxDetector(home / "extreme.onnx")(first.images)["score"].astype(np.float64))
    two, all_ = scores
    assert bound == pytest.approx(np.quantile(all_, 0.95) - (all_ - two).max(), abs=1e-5)
    assert int(int8.metadata["kedge.calibration_images"]) < 0.6 * len(held), "half of them set the bound"


def test_recalibration_gives_the_thresholds_of_the_detector(home, detector, parts, tmp_path):
    path, calibration = tmp_path / "again.onnx", detector.calibration
    recalibrate(home / "auto.onnx", parts[1], out=path)
    close = 1e-4 * float(calibration.scores.abs().max())
    assert tensor(path, "settled") == pytest.approx(detector.exit_threshold, abs=2 * close)
    assert tensor(path, "threshold") == pytest.approx(calibration.threshold, abs=close)


def test_a_score_that_is_nan_takes_all_anchors_and_is_flagged(home):
    few, rest, passes = cascade.parts(read_model(home / "auto.onnx"))
    for value in (*few.graph.initializer, *rest.graph.initializer):
        if value.name.endswith("anchor_maps"):
            broken = np.full_like(onnx.numpy_helper.to_array(value), np.nan)
            value.CopyFrom(onnx.numpy_helper.from_array(broken, value.name))
    again = cascade.join(few, rest, passes)
    set_tensors(again, {"settled": np.float32(np.inf)})
    session = onnxruntime.InferenceSession(again.SerializeToString())
    image = np.zeros((1, *(dim.dim_value for dim in again.graph.input[0].type.tensor_type.shape.dim[1:])), np.uint8)
    assert [value.tolist() for value in session.run(["passes", "is_ood"], {"images": image})] == [[4], [True]]


def test_the_command_writes_such_a_file_for_any_amp_detector(net, parts, tmp_path):
    train, held, test = parts
    kedge.AMP(copy.deepcopy(net), k=4).fit(train).calibrate(held, alpha=0.1).save(tmp_path / "whole.kedge")
    kedge.MSP(copy.deepcopy(net)).fit(train).calibrate(held).save(tmp_path / "msp.kedge")
    for name, part in (("train", train), ("held", held)):
        np.savez(tmp_path / f"{name}.npz", x=part.images[:, 0].numpy(), y=part.labels.numpy())
    int8, new = ["--int8", f"npz:{tmp_path}/train.npz"], ["--calibrate", f"npz:{tmp_path}/held.npz"]
    options = ["-o", tmp_path / "auto.onnx", "--early-exit", *new]
    done = run_cli("export", tmp_path / "whole.kedge", *options, *int8)
    assert done.exit_code == 0, done.output
    exported = OnnxDetector(tmp_path / "auto.onnx")
    assert (exported.metadata["kedge.alpha"], exported.metadata["kedge.method"]) == ("0.1", "early_exit")
    assert 2 <= exported(test)["passes"].mean() < 4
    assert json.loads(exported.metadata["kedge.options"])["min_anchors"] == 2
    with pytest.raises(InputError, match="--early-exit is for AMP"):
        raise run_cli("export", tmp_path / "msp.kedge", *options, "--overwrite").exception


def test_two_anchors_in_all_are_a_file_like_any_other(net, parts, tmp_path):
    detector = kedge.EarlyExit(copy.deepcopy(net), k=2).fit(parts[0]).calibrate(parts[1])
    export_onnx(detector, tmp_path / "two.onnx")
    found = OnnxDetector(tmp_path / "two.onnx")
    assert "passes" not in found.outputs
    np.testing.assert_array_equal(found(parts[2])["is_ood"], detector(parts[2]).is_ood)
