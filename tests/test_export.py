"""An exported detector says what the detector says, without kedge."""

import hashlib
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import helpers
import kedge
from helpers import images
from helpers import run_cli as run
from kedge.data.digits import digits
from kedge.errors import ArchitectureError, FileFormatError, InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.export import Difference, OnnxDetector, compare, export_onnx, quantise, recalibrate, runtime
from kedge.export import file as exported
from kedge.export.graph import Graph
from kedge.models import build
from kedge.seeds import seeded

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parents[1] / "examples" / "onnx_only.py"
needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is missing: kedge[openvino]")


def pixels(n, channels=3, side=32, seed=0):
    return images(n, channels, side, seed)


def labelled(n, channels=3, side=32, seed=0):
    return helpers.labelled(n, 3, channels=channels, side=side, seed=seed)


def network(name, channels=3, **options):
    with seeded(0):
        net = build(name, width=4, classes=3, channels=channels, **options)
    if name == "airbench":
        net.prepare(pixels(20, channels).float() / 255 - 0.5)
    return net


def anchored(name, channels=3):
    return kedge.anchor(network(name, channels), init="fresh", mean=[0.5] * channels, std=[0.25] * channels)


def calibrated(detector, channels=3):
    return detector.fit(labelled(20, channels)).calibrate(labelled(60, channels, seed=1), alpha=0.1)


def session_of(path):
    """The file in onnxruntime alone, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def assert_says_the_same(detector, path, images):
    """Labels, decisions and all numbers, for several sizes of a batch."""
    session = session_of(path)
    names = [output.name for output in session.get_outputs()]
    expected = ["label", "probability", "score", "tau", "p_value", "is_ood"]
    assert names == [name for name in expected if name != "tau" or detector.has_tau]
    for n in (1, 3, 17):
        said = detector(images[:n])
        found = dict(zip(names, session.run(None, {"images": images[:n].numpy()}), strict=True))
        close = 1e-4 * float(said.score.abs().max())
        assert all(value.shape == (n,) for value in found.values())
        assert found["label"].dtype == np.int64
        assert found["is_ood"].dtype == np.bool_
        np.testing.assert_array_equal(found["label"], said.label)
        np.testing.assert_array_equal(found["is_ood"], said.is_ood)
        np.testing.assert_allclose(found["score"], said.score, rtol=0, atol=close)
        np.testing.assert_allclose(found["probability"], said.probability.amax(dim=1), rtol=1e-4)
        if said.tau is not None:
            np.testing.assert_allclose(found["tau"], said.tau, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def parts():
    train, rest = digits().split(0.8)
    return train, *rest.split(0.5)


@pytest.fixture(scope="module")
def held(parts):
    return parts[1]


@pytest.fixture(scope="module")
def test_set(parts):
    return parts[2]


@pytest.fixture(scope="module")
def home(parts, tmp_path_factory):
    """A trained detector of digits, its file and its exports."""
    folder = tmp_path_factory.mktemp("exported")
    train, held, test = parts
    with seeded(0):
        net = kedge.anchor(build("compact", width=4, channels=1))
    kedge.train(net, train, kedge.training.recipe("demo", epochs=1), seed=0)
    detector = kedge.AMP(net, k=3).fit(train).calibrate(held)
    detector.save(folder / "digits.kedge")
    export_onnx(detector, folder / "digits.onnx")
    quantise(folder / "digits.onnx", folder / "int8.onnx", train, held)
    for name, part in (("train", train), ("held", held), ("test", test)):
        np.savez(folder / f"{name}.npz", x=part.images[:, 0].numpy(), y=part.labels.numpy())
    return folder


@pytest.fixture(scope="module")
def detector(home):
    return kedge.load(home / "digits.kedge")


# --- parity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "channels"),
    [
        (lambda: kedge.AMP(anchored("airbench"), k=4, rescale="plain", tau="mean"), 3),
        (lambda: kedge.AMP(anchored("compact", 1), shared_tau=True, score="energy"), 1),
        (lambda: kedge.AMP(anchored("compact"), variant="recommended"), 3),
        (lambda: kedge.KLUniform(network("compact", 1)), 1),
        (lambda: kedge.TemperatureScaling(network("airbench", 1)), 1),
    ],
    ids=["amp on airbench", "amp with one temperature", "amp with views", "centred energy", "temperature scaling"],
)
def test_a_file_says_what_its_detector_says(make, channels, tmp_path):
    detector = calibrated(make(), channels)
    export_onnx(detector, tmp_path / "a.onnx")
    assert_says_the_same(detector, tmp_path / "a.onnx", pixels(17, channels, seed=2))
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]  # no weights beside it


class Several(nn.Module):
    """The scores of several detectors as functions of what one network says, so that one export tests all."""

    def __init__(self, detectors):
        super().__init__()
        self.detectors = detectors

    def forward(self, hypotheses):
        amps = (d for d in self.detectors if isinstance(d, kedge.AMP))
        others = (d for d in self.detectors if not isinstance(d, kedge.AMP))
        logits = hypotheses.mean(dim=0)
        return (*(d.of_per_anchor_logits(hypotheses).score for d in amps), *(d.of_logits(logits).score for d in others))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # inside torch
def test_every_score_and_option_is_an_operation_of_onnx(tmp_path):
    net = kedge.anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), init="fresh")
    scores = ("kl_uniform", "msp", "max_logit", "entropy", "energy", "tau", "mutual_information")
    options = [{"score": score} for score in scores] + [{"rescale": rule} for rule in ("exp", "plain", "none")]
    detectors = [kedge.AMP(net, **chosen) for chosen in (*options, {"tau": "mean"}, {"shared_tau": True})]
    detectors[-1].global_tau = 0.7
    detectors += [kedge.AMP(net, score=lambda logits: logits.std(dim=1))]
    detectors += [kind(net) for kind in (kedge.MSP, kedge.MaxLogit, kedge.Entropy, kedge.Energy)]
    detectors += [kedge.TemperatureScaling(net, temperature=1.7)]
    hypotheses = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(0))
    several = Several(detectors).eval()
    batch = {"hypotheses": {1: torch.export.Dim("N")}}
    program = torch.onnx.export(several, (hypotheses,), dynamo=True, dynamic_shapes=batch, verbose=False)
    program.save(tmp_path / "a.onnx")
    session = session_of(tmp_path / "a.onnx")
    for n in (1, 9):
        found = session.run(None, {"hypotheses": hypotheses[:, :n].numpy()})
        for ours, theirs in zip(several(hypotheses[:, :n]), found, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-6)


def said_by_the_graph(detector, images):
    graph = Graph(detector)
    return dict(zip(graph.names, graph(images), strict=True))


@pytest.mark.parametrize("make", [lambda: kedge.Energy(anchored("compact")), lambda: kedge.MSP(network("compact"))])
def test_what_is_exported_is_the_detector(make):
    detector, images = calibrated(make()), pixels(5, seed=3)
    found, said = said_by_the_graph(detector, images), detector(images)
    torch.testing.assert_close(found["logits"], said.logits)
    torch.testing.assert_close(found["score"], said.score)
    assert "tau" not in found


def test_a_network_may_read_the_number_of_its_images():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Linear(4 * 64, 3)

        def forward(self, x):
            n = x.shape[0]
            return self.fc(self.conv(x).relu().view(n, -1))

    train = labelled(20, side=16)
    detector = kedge.AMP(kedge.anchor(Reads(), init="fresh")).fit(train).calibrate(train)
    images = pixels(5, side=16, seed=3)
    found, said = said_by_the_graph(detector, images), detector(images)
    torch.testing.assert_close(found["logits"], said.logits)
    torch.testing.assert_close(found["score"], said.score)


def test_the_trained_detector_s_export_agrees_on_real_images(home, detector, test_set):
    assert_says_the_same(detector, home / "digits.onnx", test_set.images)
    found, said = OnnxDetector(home / "digits.onnx", threads=1)(test_set), detector(test_set)
    np.testing.assert_array_equal(found["label"], said.label)
    assert compare(detector, home / "digits.onnx").is_close


def test_floating_point_images_are_scored_as_the_8_bits_that_they_are(home, test_set):
    exact, images = OnnxDetector(home / "digits.onnx", threads=1), test_set.images[:4]
    for form in (images / 255, (images.double() / 255).numpy().transpose(0, 2, 3, 1)):
        np.testing.assert_array_equal(exact(form)["score"], exact(images)["score"])


def test_an_output_has_its_own_name_where_an_engine_knows_several():
    assert runtime._names([{"label"}, {"div_2", "score"}, {"score", "tau"}, {"other"}]) == (
        "label",
        "score",
        "tau",
        "other",
    )


@needs_openvino
def test_openvino_says_the_same(home, detector, test_set):
    found, said = (
        OnnxDetector(home / "digits.onnx", engine="openvino", threads=1)(test_set.images[:33]),
        detector(test_set.images[:33]),
    )
    np.testing.assert_allclose(found["score"], said.score, rtol=0, atol=1e-4 * float(said.score.abs().max()))
    np.testing.assert_array_equal(found["label"], said.label)
    assert "openvino_telemetry" not in {name for name, module in sys.modules.items() if module is not None}


# --- the decision ---------------------------------------------------------------------------------------------------


def test_the_p_value_is_its_definition_and_the_decision_its_consequence(home, held, test_set):
    found = OnnxDetector(home / "digits.onnx")(test_set)
    tensors = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(home / "digits.onnx").graph.initializer
    }
    scores, threshold = tensors["calibration.scores"], tensors["threshold"]
    counts = np.array([sum(known >= score for known in scores) for score in found["score"]])
    np.testing.assert_array_equal(found["p_value"], ((1 + counts) / (len(held) + 1)).astype(np.float32))
    np.testing.assert_array_equal(found["is_ood"], found["score"] > threshold)
    np.testing.assert_array_equal(found["is_ood"], 1 + counts <= 0.05 * (len(held) + 1))
    assert 0 < found["is_ood"].sum() < len(counts)


def test_calibration_scores_that_tie_with_an_image_count(home, test_set, tmp_path):
    image = test_set.images[:1]
    score = OnnxDetector(home / "digits.onnx")(image)["score"]
    model = exported.read_model(home / "digits.onnx")
    known = torch.from_numpy(score).repeat(19)
    exported.write_calibration(model, known, threshold=float(score[0]), temperature=1.0, alpha=0.05, delta=None)
    exported.write_model(model, tmp_path / "tied.onnx")
    found = OnnxDetector(tmp_path / "tied.onnx")(image)
    assert (found["p_value"][0], found["is_ood"][0]) == (1.0, False)


def test_a_score_that_is_no_number_is_flagged():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    nn.init.constant_(net[1].weight, float("nan"))
    found = said_by_the_graph(kedge.MSP(net), torch.zeros(1, 3, 2, 2, dtype=torch.uint8))
    assert bool(found["is_ood"][0])


def test_scores_beyond_float32_are_refused(home):
    model = exported.read_model(home / "digits.onnx")
    scores = torch.tensor([0.1], dtype=torch.float64)
    with pytest.raises(InputError, match="float32"):
        exported.write_calibration(model, scores, threshold=0.1, temperature=1.0, alpha=0.5, delta=None)


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_metadata_tells_what_the_file_is(home, detector):
    told = session_of(home / "digits.onnx").get_modelmeta().custom_metadata_map
    assert told["kedge.method"] == "amp"
    assert json.loads(told["kedge.classes"]) == list("0123456789")
    assert float(told["kedge.threshold"]) == detector.calibration.threshold
    assert (told["kedge.alpha"], told["kedge.delta"], told["kedge.calibration_images"]) == ("0.05", "null", "500")
    rule = json.loads(told["kedge.preprocess"])
    assert (rule["shape"], rule["resize"], rule["fit"]) == ([1, 28, 28], "bicubic", "crop")
    assert "bicubic" in rule["words"]
    assert told["kedge.version"] == version("kedge")


def test_the_sha_is_that_of_the_saved_detector(home):
    told = OnnxDetector(home / "digits.onnx").metadata["kedge.detector_sha256"]
    assert told == hashlib.sha256((home / "digits.kedge").read_bytes()).hexdigest()


def test_nothing_of_this_machine_is_in_the_file(home):
    content = (home / "digits.onnx").read_bytes()
    assert b".py" not in content
    assert str(Path.home()).encode() not in content


def test_the_number_of_images_is_open_and_the_anchor_s_half_of_the_weights_is_gone(home, detector):
    model = onnx.load(home / "digits.onnx")
    shape = model.graph.input[0].type.tensor_type.shape.dim
    assert (shape[0].dim_param, [dim.dim_value for dim in shape[1:]]) == ("N", [1, 28, 28])
    tensors = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    (maps,) = [dims for name, dims in tensors.items() if name.endswith("anchor_maps")]
    assert maps == [3, 1, 4, 28, 28]
    assert not any("layer_c" in name for name in tensors)


def test_the_ten_lines_without_kedge_say_the_same(home, detector, test_set, tmp_path):
    big = Image.fromarray(test_set.images[0, 0].numpy()).resize((90, 60)).convert("RGB")
    small = Image.fromarray(test_set.images[1, 0].numpy())
    for name, image in (("big", big), ("small", small)):
        image.save(tmp_path / f"{name}.png")
    files = [str(tmp_path / "big.png"), str(tmp_path / "small.png")]
    code = (
        "import json, runpy, sys\n"
        "sys.modules['kedge'] = sys.modules['torch'] = None\n"
        "said = runpy.run_path(sys.argv[1])['score'](sys.argv[2], sys.argv[3:])\n"
        "print(json.dumps({name: values.tolist() for name, values in said.items()}))\n"
    )
    for model in ("digits.onnx", "int8.onnx"):
        done = subprocess.run(
            [sys.executable, "-c", code, EXAMPLE, home / model, *files], capture_output=True, text=True, check=True
        )
        said, ours = json.loads(done.stdout), OnnxDetector(home / model)(files)
        assert said["label"] == ours["label"].tolist()
        np.testing.assert_allclose(said["score"], ours["score"], rtol=1e-5)
    np.testing.assert_allclose(OnnxDetector(home / "digits.onnx")(files)["score"], detector(files).score, rtol=1e-4)


def test_the_ten_lines_of_the_docs_are_those_of_the_example():
    text = (EXAMPLE.parents[1] / "docs" / "deploy.md").read_text()
    (block,) = (part for part in text.split("```python\n")[1:] if part.startswith("session = "))
    body = "".join(f"    {line}\n" for line in block.split("\n```")[0].splitlines())
    assert body in EXAMPLE.read_text()


def test_files_of_older_versions_give_their_results_under_the_names_of_today():
    folder = Path(__file__).parent / "legacy"
    expected = json.loads((folder / "expected.json").read_text())
    images = load_file(folder / "images.safetensors")["test"]
    for name in ("amp", "msp", "amp-auto"):
        detector = OnnxDetector(folder / f"{name}.onnx", threads=1)
        assert exported.guarantee_of(detector.metadata) == (0.05, None)
        assert ("tau" in detector.outputs) == (name != "msp")
        outputs = detector(images)
        if name == "amp-auto":  # its decisions are those of its own calibration
            continue
        for key, value in expected[name].items():
            if key in ("is_ood", "p_value", "score", "tau") and value is not None:
                np.testing.assert_allclose(outputs[key], value, rtol=1e-5, atol=1e-5)
    recalibrated = exported.read_model(folder / "amp.onnx")
    assert "kedge.tpr" not in exported.metadata(recalibrated)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kedge.ODIN(network("compact")), "got ODIN"),
        (lambda: kedge.MCDropout(network("compact", dropout=0.5)), "got MCDropout"),
        (lambda: kedge.AMP(anchored("compact"), variant="authors"), "share its anchors"),
        (lambda: kedge.MSP(network("compact").double()), "float32"),
        (lambda: kedge.MSP(kedge.models.ensemble.Ensemble([network("compact")])), "one network"),
    ],
)
def test_a_detector_that_no_file_can_hold_is_refused_with_the_reason(make, words, tmp_path):
    detector = make().fit(labelled(20))
    with pytest.raises(InputError, match=words):
        export_onnx(detector, tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_detector_of_vectors_is_refused(tmp_path):
    detector = kedge.MSP(nn.Linear(4, 2)).fit(torch.rand(20, 4)).calibrate(torch.rand(20, 4))
    with pytest.raises(InputError, match="images"):
        export_onnx(detector, tmp_path / "a.onnx")


def test_a_detector_without_a_threshold_is_not_ready(tmp_path):
    with pytest.raises(NotReadyError, match="calibrate"):
        export_onnx(kedge.MSP(network("compact")).fit(labelled(20)), tmp_path / "a.onnx")
    with pytest.raises(InputError, match="detector"):
        export_onnx(network("compact"), tmp_path / "a.onnx")


def test_a_network_that_is_no_graph_is_refused_with_the_reason(tmp_path):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, 2)

        def forward(self, x):
            y = self.fc(x.flatten(1))
            return y if float(y.sum()) > 0 else -y

    train = torch.rand(20, 3, 2, 2)
    detector = kedge.MSP(Branches()).fit(train).calibrate(train)
    with pytest.raises(ArchitectureError, match="Branches cannot be exported"):
        export_onnx(detector, tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["onnxscript", "onnx"])
def test_without_the_extra_the_error_names_it(missing, detector, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(NotReadyError, match=rf"{missing}.*kedge\[onnx\]"):
        export_onnx(detector, tmp_path / "a.onnx")


def test_without_an_engine_the_error_names_its_extra(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(NotReadyError, match=r"kedge\[onnx\]"):
        OnnxDetector(home / "digits.onnx")
    with pytest.raises(NotReadyError, match=r"kedge\[openvino\]"):
        OnnxDetector(home / "digits.onnx", engine="openvino")


def test_other_files_are_refused(home, tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"no model")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], [])), tmp_path / "b.onnx")
    with pytest.raises(FileFormatError, match="cannot read"):
        OnnxDetector(tmp_path / "a.onnx")
    for name in ("a.onnx", "b.onnx"):
        with pytest.raises(FileFormatError):
            recalibrate(tmp_path / name, pixels(20))
    with pytest.raises(InputError, match="no file"):
        recalibrate(tmp_path / "c.onnx", pixels(20))
    with pytest.raises(InputError, match="engine"):
        OnnxDetector(home / "digits.onnx", engine="tensorrt")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preprocess", "{"),
        ("preprocess", "{}"),
        ("preprocess", '{"shape": [3, 4, 4], "resize": "abacus", "fit": "crop"}'),
        ("alpha", None),
        ("alpha", "most"),
        ("delta", "{"),
    ],
)
def test_damaged_metadata_is_told(key, value):
    told = {"preprocess": exported.rule(kedge.Preprocess((3, 4, 4))), "alpha": "0.1", "delta": "null"}
    exported.checked_metadata({f"kedge.{name}": text for name, text in told.items()}, "a.onnx")
    damaged = {f"kedge.{name}": text for name, text in (told | {key: value}).items() if text is not None}
    with pytest.raises(FileFormatError, match=r"a\.onnx must describe .*; its metadata is damaged: .*kedge export"):
        exported.checked_metadata(damaged, "a.onnx")


# --- 8 bits ---------------------------------------------------------------------------------------------------------


def test_eight_bits_keep_most_labels_in_a_smaller_file(home, detector, test_set):
    found, said = OnnxDetector(home / "int8.onnx")(test_set), detector(test_set)
    assert float(np.mean(found["label"] == said.label.numpy())) > 0.97
    assert (home / "int8.onnx").stat().st_size < 0.6 * (home / "digits.onnx").stat().st_size
    assert 0 < np.abs(found["score"] - said.score.numpy()).max() < 0.1 * float(said.score.abs().max())


def test_eight_bits_have_a_threshold_of_their_own(home, detector, held):
    exact, found = OnnxDetector(home / "digits.onnx"), OnnxDetector(home / "int8.onnx")
    said = found(held)
    counts = (said["score"][:, None] <= said["score"]).sum(axis=1)
    np.testing.assert_allclose(said["p_value"], (1 + counts) / (len(held) + 1), atol=2e-3)
    np.testing.assert_array_equal(said["is_ood"], said["p_value"] <= np.float32(0.05))
    assert 0 < said["is_ood"].mean() <= 0.05
    assert found.metadata["kedge.threshold"] != exact.metadata["kedge.threshold"]
    assert (found.metadata["kedge.quantised"], found.metadata["kedge.engine"]) == ("int8", "onnxruntime")
    assert found.metadata["kedge.detector_sha256"] == exact.metadata["kedge.detector_sha256"]


def test_only_the_middle_of_the_network_is_in_eight_bits(home):
    model = onnx.load(home / "int8.onnx")
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    eight, float32 = onnx.TensorProto.INT8, onnx.TensorProto.FLOAT
    assert sum(kind == eight for kind in types.values()) >= 7  # the convolutions behind the first
    for part in ("anchor_maps", "calibration.scores", "threshold", "fc.weight"):
        assert [kind for name, kind in types.items() if name.endswith(part)] == [float32], part
    assert any(name.endswith("prep.0.weight") and kind == float32 for name, kind in types.items())


def test_recalibration_fits_the_temperature_where_there_are_labels(home, held, tmp_path):
    def temperature(path):
        held = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
        return float(onnx.numpy_helper.to_array(held["probability.temperature"]))

    recalibrate(home / "digits.onnx", held, out=tmp_path / "same.onnx")
    assert temperature(tmp_path / "same.onnx") == pytest.approx(temperature(home / "digits.onnx"), rel=1e-3)
    wrong = kedge.ImageSet(held.images, (held.labels + torch.arange(len(held)) % 2) % 10)
    recalibrate(home / "digits.onnx", wrong, out=tmp_path / "unsure.onnx", alpha=0.2)
    assert temperature(tmp_path / "unsure.onnx") > 2 * temperature(home / "digits.onnx")
    found = OnnxDetector(tmp_path / "unsure.onnx")
    assert found.metadata["kedge.alpha"] == "0.2"
    assert 0.15 < found(held)["is_ood"].mean() <= 0.2
    recalibrate(tmp_path / "unsure.onnx", held.images)
    assert temperature(tmp_path / "unsure.onnx") > 2 * temperature(home / "digits.onnx")


def test_recalibration_keeps_of_the_promise_what_is_not_given(home, held, tmp_path):
    def promised(**given):
        recalibrate(home / "digits.onnx", held, out=tmp_path / "a.onnx", **given)
        return exported.guarantee_of(OnnxDetector(tmp_path / "a.onnx").metadata)

    assert promised() == (0.05, None)
    assert promised(delta=0.1) == (0.05, 0.1)
    assert promised(alpha=0.2) == (0.2, None)


def test_a_network_without_a_middle_is_not_quantised(tmp_path):
    train, float32 = labelled(20, side=4), onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Flatten", ["x"], ["y"]), onnx.helper.make_node("MatMul", ["y", "w"], ["logits"])]
    tensors = [onnx.helper.make_tensor_value_info(name, float32, [None, None]) for name in ("x", "w", "logits")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "linear", tensors[:2], tensors[2:]))
    rule = exported.rule(kedge.Preprocess((3, 4, 4)))
    exported.set_metadata(model, {"kedge.preprocess": rule, "kedge.alpha": "0.1", "kedge.delta": "null"})
    exported.write_model(model, tmp_path / "a.onnx")
    with pytest.raises(InputError, match="between its first and its last"):
        quantise(tmp_path / "a.onnx", tmp_path / "b.onnx", train, train)


def test_an_engine_that_is_not_there_is_told_before_any_work(monkeypatch):
    with pytest.raises(InputError, match="engine must be one of 'onnxruntime', 'openvino'; got 'abacus'"):
        quantise("nowhere.onnx", "out.onnx", None, None, engine="abacus")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(NotReadyError, match=r"kedge\[openvino\]"):
        quantise("nowhere.onnx", "out.onnx", None, None, engine="openvino")


@needs_openvino
def test_another_engine_than_the_file_was_calibrated_for_is_a_warning(home, held, tmp_path):
    with pytest.warns(KedgeWarning, match="calibrated on the scores of onnxruntime"):
        OnnxDetector(home / "int8.onnx", engine="openvino")
    recalibrate(home / "int8.onnx", held, out=tmp_path / "a.onnx", engine="openvino")
    said = OnnxDetector(tmp_path / "a.onnx", engine="openvino")(held)
    assert 0 < said["is_ood"].mean() <= 0.05


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_exports_quantises_and_says_how_well(home, tmp_path):
    sets = ["--int8", f"npz:{home / 'train.npz'}", "--calibrate", f"npz:{home / 'held.npz'}"]
    done = run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *sets)
    assert done.exit_code == 0, done.output
    assert "largest difference of a score" in done.output
    assert "keep their label" in done.output
    assert f"{(tmp_path / 'a.onnx').stat().st_size / 1e6:.2f} MB" in done.output
    found, ours = OnnxDetector(tmp_path / "a.onnx"), OnnxDetector(home / "int8.onnx")
    assert float(found.metadata["kedge.threshold"]) == pytest.approx(float(ours.metadata["kedge.threshold"]), rel=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]


def test_the_command_tells_programs_in_json(home, tmp_path):
    said = json.loads(run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", "--json").stdout)
    assert (said["file"], said["bytes"]) == (str(tmp_path / "a.onnx"), (tmp_path / "a.onnx").stat().st_size)
    assert 0 <= said["largest_difference"] < 1e-4 * said["largest_score"]


def test_a_threshold_is_not_set_on_images_that_the_ranges_were_taken_of_whatever_they_are_called(home, tmp_path):
    np.savez(tmp_path / "some.npz", **{k: v[:300] for k, v in np.load(home / "train.npz").items()})
    sets = ["--int8", f"npz:{home / 'train.npz'}", "--calibrate", f"npz:{tmp_path / 'some.npz'}"]
    with pytest.raises(InputError, match="held_out must be other images than training_images; some are in both"):
        raise run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *sets).exception
    assert not (tmp_path / "a.onnx").exists()


def test_a_file_that_differs_is_not_kept(home, detector, tmp_path, monkeypatch):
    command = import_module("kedge.cli.export")
    monkeypatch.setattr(command, "compare", lambda *_: Difference(largest=0.1, scale=1.0, verdicts=0))
    monkeypatch.setattr(command, "export_onnx", lambda detector, path, **_: path.write_bytes(b"x"))
    done = run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx")
    with pytest.raises(KedgeError, match="differs from the detector"):
        raise done.exception
    assert list(tmp_path.iterdir()) == []
    assert run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", "--no-check").exit_code == 0


def test_the_check_sees_another_detector(home, held):
    other = kedge.AMP(kedge.anchor(network("compact", 1), init="fresh")).fit(held.images).calibrate(held.images)
    assert not compare(other, home / "digits.onnx").is_close


@pytest.mark.parametrize(
    ("name", "change"),
    [("score", lambda values: values * np.nan), ("label", lambda values: values + 1), ("is_ood", np.logical_not)],
)
def test_the_check_sees_what_is_no_number_another_label_or_another_decision(name, change, detector, monkeypatch):
    def said(images, batch_size):
        verdict = detector(images)
        found = {key: getattr(verdict, key).numpy() for key in ("score", "label", "is_ood")}
        return found | ({name: change(found[name])} if batch_size == changed_at else {})

    monkeypatch.setattr("kedge.export.check.OnnxDetector", lambda path: said)
    changed_at = None
    assert compare(detector, "a.onnx").is_close
    changed_at = 1  # not in the batch of all
    assert not compare(detector, "a.onnx").is_close


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "openvino"], "--engine must come with --int8"),
        (["--int8-split", "train", "--engine", "openvino"], "--int8-split, --engine must"),
        (["--calibrate-split", "test"], "--calibrate-split must come with --calibrate"),
        (["--early-exit"], "--early-exit must come with --calibrate"),
        (["--int8", "folder:a", "--calibrate", "folder:b", "--engine", "abacus"], "engine must be one of"),
        (["--int8", "folder:a"], "old threshold does not hold"),
        (["--calibrate", "folder:a"], "kedge calibrate"),
    ],
)
def test_options_that_would_give_no_promise_are_refused(options, words, home, tmp_path):
    done = run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *options)
    with pytest.raises(InputError, match=words):
        raise done.exception
    assert list(tmp_path.iterdir()) == []


def test_images_that_cannot_be_read_are_not_told_as_a_file_that_cannot_be_written(home, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise PermissionError("images")

    command = import_module("kedge.cli.export")
    monkeypatch.setattr(command, "export_onnx", lambda detector, path, **_: path.write_bytes(b"x"))
    monkeypatch.setattr(command.sources, "load", fails)
    sets = ["--int8", "folder:a", "--calibrate", "folder:b", "--no-check"]
    done = run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *sets)
    with pytest.raises(PermissionError, match="images"):
        raise done.exception


@pytest.mark.parametrize("opset", [17, 26, 99])
def test_an_opset_that_cannot_be_written_is_refused(tmp_path, opset):
    detector = calibrated(kedge.MSP(network("compact")))
    with pytest.raises(InputError, match=r"opset must be a whole number .*; got"):
        export_onnx(detector, tmp_path / "a.onnx", opset=opset)
    done = run("export", "cifar10", "-o", "a.onnx", "--opset", opset)
    assert done.exit_code == 2
    assert "Invalid value for '--opset'" in done.output


def test_a_file_of_another_opset_than_was_asked_for_is_not_kept(tmp_path, monkeypatch):
    detector, real = calibrated(kedge.MSP(network("compact"))), torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **options: real(*a, **options | {"opset_version": 18}))
    with pytest.raises(InputError, match=r"onnxscript knows; 20 gave a file of opset 18: pass 20"):
        export_onnx(detector, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
