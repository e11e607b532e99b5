"""An exported detector with early exit: one file that runs all anchors only for the images that need it."""

import copy
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.data.digits import digits
from kedge.data.leakage import halves
from kedge.errors import InputError
from kedge.export import OnnxDetector, compare, export_onnx, quantise, recalibrate
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


@pytest.fixture(scope="module")
def mixed(parts):
    """Images of which some are settled and some are not."""
    with seeded(1):
        noise = torch.randint(0, 256, (40, *parts[2].images.shape[1:]), dtype=torch.uint8)
        return torch.cat([parts[2].images[:80], noise])[torch.randperm(120)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch", [1, 7, 120])
def test_the_file_says_what_the_detector_says_and_asks_as_often(home, detector, mixed, engine, batch):
    found = OnnxDetector(home / "auto.onnx", engine=engine)(mixed, batch_size=batch)
    said = detector(mixed)
    assert set(found["passes"].tolist()) == {2, 4}
    assert found["passes"].mean() == pytest.approx(detector.mean_passes(mixed))
    np.testing.assert_array_equal(found["label"], said.label)
    np.testing.assert_array_equal(found["is_ood"], said.is_ood)
    np.testing.assert_allclose(found["score"], said.score, atol=1e-4 * float(said.score.abs().max()))
    np.testing.assert_allclose(found["tau"], said.tau, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["probability"], said.probability.amax(dim=1), rtol=1e-4)
    assert compare(detector, home / "auto.onnx").is_close


@pytest.mark.parametrize("variant", ["paper", "recommended"])
def test_settled_or_not_an_image_has_the_score_of_as_many_anchors(net, parts, mixed, variant, tmp_path):
    """Beside detectors that have two anchors, or all; the recommended one shows them other views of the image."""
    full = kedge.AMP(copy.deepcopy(net), k=4, variant=variant).fit(parts[0]).calibrate(parts[1])
    auto = kedge.EarlyExit(copy.deepcopy(net), k=4, variant=variant).fit(parts[0]).calibrate(parts[1])
    assert torch.equal(full.net.anchors, auto.net.anchors)
    export_onnx(auto, tmp_path / "auto.onnx")
    expected = full.net.per_anchor_logits(full.as_input(mixed), tta=full.tta)
    for bound, scores, passes in (
        (np.inf, full.of_per_anchor_logits(expected[:2]).score, 2),
        (-np.inf, full.of_per_anchor_logits(expected).score, 4),
    ):
        model = read_model(tmp_path / "auto.onnx")
        set_tensors(model, {"settled": np.float32(bound)})
        write_model(model, tmp_path / "bound.onnx")
        found = OnnxDetector(tmp_path / "bound.onnx")(mixed)
        scores = scores.detach().numpy()
        np.testing.assert_allclose(found["score"], scores, atol=1e-4 * np.abs(scores).max())
        assert set(found["passes"].tolist()) == {passes}


def test_a_file_comes_apart_into_the_graphs_that_it_was_made_of(home):
    model = read_model(home / "auto.onnx")
    few, rest, passes = cascade.parts(model)
    for one in (few, rest):
        onnx.checker.check_model(one)
    assert passes == (2, 4)
    assert [value.name for value in rest.graph.input] == ["images", "known"]
    again = cascade.join(few, rest, passes)
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in model.graph.node]
    assert cascade.parts(few) is None


def test_eight_bits_learn_anew_what_two_anchors_settle_and_keep_the_promise(home, parts):
    held, test = parts[1], parts[2]
    float32, int8 = OnnxDetector(home / "auto.onnx"), OnnxDetector(home / "int8.onnx")
    exact, found = float32(test), int8(test)
    assert (home / "int8.onnx").stat().st_size < 0.6 * (home / "auto.onnx").stat().st_size
    assert float(np.mean(exact["label"] == found["label"])) > 0.97
    assert 2 < found["passes"].mean() < 4
    assert found["is_ood"].mean() <= 0.1
    model = read_model(home / "int8.onnx")
    bound = float(onnx.numpy_helper.to_array({t.name: t for t in model.graph.initializer}["settled"]))
    mine, _ = halves(held, int8.preprocess, "the test needs them")
    scores = []
    for extreme in (np.inf, -np.inf):
        set_tensors(model, {"settled": np.float32(extreme)})
        write_model(model, home / "extreme.onnx")
        scores.append(OnnxDetector(home / "extreme.onnx")(mine.images)["score"].astype(np.float64))
    two, all_ = scores
    assert bound == pytest.approx(np.quantile(all_, 0.95) - (all_ - two).max(), abs=1e-5)
    assert int(int8.metadata["kedge.calibration_images"]) < 0.6 * len(held), "half of them set the bound"


def test_recalibration_finds_the_bound_and_the_threshold_of_the_detector(home, detector, parts, tmp_path):
    recalibrate(home / "auto.onnx", parts[1], out=tmp_path / "again.onnx")
    held = {tensor.name: tensor for tensor in onnx.load(tmp_path / "again.onnx").graph.initializer}
    close = 1e-4 * float(detector.calibration.scores.abs().max())
    assert float(onnx.numpy_helper.to_array(held["settled"])) == pytest.approx(detector.exit_threshold, abs=2 * close)
    assert float(onnx.numpy_helper.to_array(held["threshold"])) == pytest.approx(
        detector.calibration.threshold, abs=close
    )


def test_an_image_that_is_no_number_is_flagged(home):
    """A score that is no number is not settled, whatever the bound."""
    model = read_model(home / "auto.onnx")
    few, rest, passes = cascade.parts(model)
    for one in (few, rest):
        for tensor in one.graph.initializer:
            if tensor.name.endswith("anchor_maps"):
                broken = np.full_like(onnx.numpy_helper.to_array(tensor), np.nan)
                tensor.CopyFrom(onnx.numpy_helper.from_array(broken, tensor.name))
    again = cascade.join(few, rest, passes)
    set_tensors(again, {"settled": np.float32(np.inf)})
    session = onnxruntime.InferenceSession(again.SerializeToString())
    image = np.zeros((1, *(dim.dim_value for dim in again.graph.input[0].type.tensor_type.shape.dim[1:])), np.uint8)
    passes, flagged = session.run(["passes", "is_ood"], {"images": image})
    assert passes.tolist() == [4]
    assert flagged.tolist() == [True]


def test_the_command_makes_such_a_file_of_any_amp_detector(net, parts, tmp_path):
    train, held, test = parts
    whole = kedge.AMP(copy.deepcopy(net), k=4).fit(train).calibrate(held, alpha=0.1)
    whole.save(tmp_path / "whole.kedge")
    for name, images in (("train", train), ("held", held)):
        np.savez(tmp_path / f"{name}.npz", x=images.images[:, 0].numpy(), y=images.labels.numpy())
    sets = ["--int8", f"npz:{tmp_path}/train.npz", "--calibrate", f"npz:{tmp_path}/held.npz"]
    command = ["export", str(tmp_path / "whole.kedge"), "-o", str(tmp_path / "auto.onnx"), "--early-exit"]
    for options in (sets[2:], sets):
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
        found = OnnxDetector(tmp_path / "auto.onnx")
        assert found.metadata["kedge.alpha"] == "0.1"
        assert found.metadata["kedge.method"] == "early_exit"
        assert 2 <= found(test)["passes"].mean() < 4
        assert json.loads(found.metadata["kedge.options"])["min_anchors"] == 2
    kedge.MSP(copy.deepcopy(net)).fit(train).calibrate(held).save(tmp_path / "msp.kedge")
    refused = CliRunner().invoke(app, ["export", str(tmp_path / "msp.kedge"), *command[2:], *sets])
    with pytest.raises(InputError, match="--early-exit is for AMP"):
        raise refused.exception


def test_two_anchors_in_all_are_a_file_like_any_other(net, parts, tmp_path):
    detector = kedge.EarlyExit(copy.deepcopy(net), k=2).fit(parts[0]).calibrate(parts[1])
    export_onnx(detector, tmp_path / "two.onnx")
    found = OnnxDetector(tmp_path / "two.onnx")
    assert "passes" not in found.outputs
    np.testing.assert_array_equal(found(parts[2])["is_ood"], detector(parts[2]).is_ood)
