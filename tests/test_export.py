"""An exported detector gives the outputs of the detector, without kedge."""

import functools
import hashlib
import json
import runpy
import subprocess
import sys
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
from kedge.export import Difference, OnnxDetector, compare_verdicts, export_onnx, quantise, recalibrate, runtime
from kedge.export import file as exported
from kedge.export.graph import Graph
from kedge.models import build
from kedge.models.ensemble import Ensemble
from kedge.seeds import seeded
from kedge.threads import sums_products_exactly

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parents[1] / "examples" / "onnx_only.py"
needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is missing: kedge[openvino]")


pixels = functools.partial(images, side=32)
labelled = functools.partial(helpers.labelled, classes=3, side=32)


def network(name, channels=3, **options):
    """A network of kedge's, or ``"small"``: what is exported in seconds where the layers do not matter."""
    with seeded(0):
        if name == "small":
            convolution = nn.Conv2d(channels, 8, 5, stride=3), nn.BatchNorm2d(8), nn.ReLU()
            return nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
        net = build(name, width=4, classes=3, channels=channels, **options)
    if name == "airbench":
        net.prepare(pixels(20, channels).float() / 255 - 0.5)
    return net


def anchored(name, channels=3):
    return kedge.anchor(network(name, channels), init="fresh", mean=[0.5] * channels, std=[0.25] * channels)


def calibrated(detector, channels=3):
    return detector.fit(labelled(20, channels=channels)).calibrate(labelled(60, channels=channels, seed=1), alpha=0.1)


def session_of(path):
    """The file in onnxruntime alone, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def assert_same(outputs, detector, images):
    """Labels, decisions and all numbers of a file are those of its detector."""
    expected = detector(images)
    close = 1e-4 * float(expected.score.abs().max())
    np.testing.assert_array_equal(outputs["label"], expected.label)
    np.testing.assert_array_equal(outputs["is_ood"], expected.is_ood)
    np.testing.assert_allclose(outputs["score"], expected.score, rtol=0, atol=close)
    np.testing.assert_allclose(outputs["probability"], expected.probability.amax(dim=1), rtol=1e-4)
    if expected.tau is not None:
        np.testing.assert_allclose(outputs["tau"], expected.tau, rtol=1e-4, atol=1e-6)


def assert_agrees(detector, path, images):
    """In onnxruntime alone, for several sizes of a batch."""
    session = session_of(path)
    names = [output.name for output in session.get_outputs()]
    expected = ["label", "probability", "score", "tau", "p_value", "is_ood"]
    assert names == [name for name in expected if name != "tau" or detector.has_tau]
    for n in (1, 3, 17):
        outputs = dict(zip(names, session.run(None, {"images": images[:n].numpy()}), strict=True))
        assert all(value.shape == (n,) for value in outputs.values())
        assert (outputs["label"].dtype, outputs["is_ood"].dtype) == (np.int64, np.bool_)
        assert_same(outputs, detector, images[:n])


def initializers(path):
    """The tensors of a file by name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.fixture(scope="module")
def parts():
    train, rest = digits().split(0.8)
    return train, *rest.split(0.5)


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
        (lambda: kedge.AMP(anchored("small", 1), shared_tau=True, score="energy"), 1),
        (lambda: kedge.AMP(anchored("small"), variant="recommended"), 3),
        (lambda: kedge.KLUniform(network("small", 1)), 1),
        (lambda: kedge.TemperatureScaling(network("small", 1)), 1),
        (lambda: kedge.KNN(anchored("small"), k=3), 3),
        (lambda: kedge.Energy(network("small", 1), shape="scale"), 1),
    ],
    ids=[
        "amp on airbench",
        "amp with shared tau",
        "amp with views",
        "kl uniform",
        "temperature scaling",
        "knn with anchors",
        "energy of shaped features",
    ],
)
def test_a_file_gives_the_outputs_of_its_detector(make, channels, tmp_path):
    detector = calibrated(make(), channels)
    export_onnx(detector, tmp_path / "a.onnx")
    assert_agrees(detector, tmp_path / "a.onnx", pixels(17, channels, seed=2))
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]  # no second file with weights


class Several(nn.Module):
    """The scores of several detectors as functions of one network's logits, so that one export tests all."""

    def __init__(self, detectors):
        super().__init__()
        self.detectors = detectors

    def forward(self, logits_k):
        logits = logits_k.mean(dim=0)
        return tuple(
            (d.of_per_anchor_logits(logits_k) if isinstance(d, kedge.AMP) else d.of_logits(logits)).score
            for d in self.detectors
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # inside torch
def test_every_score_and_option_can_be_written_in_onnx(tmp_path):
    net = kedge.anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), init="fresh")
    scores = ("kl_uniform", "msp", "max_logit", "entropy", "energy", "tau", "mutual_information")
    options = [{"score": score} for score in scores] + [{"rescale": rule} for rule in ("exp", "plain", "none")]
    detectors = [kedge.AMP(net, **chosen) for chosen in (*options, {"tau": "mean"}, {"shared_tau": True})]
    detectors[-1].global_tau = 0.7
    detectors += [kedge.AMP(net, score=lambda logits: logits.std(dim=1))]
    detectors += [kind(net) for kind in (kedge.MSP, kedge.MaxLogit, kedge.Entropy, kedge.Energy)]
    detectors += [kedge.TemperatureScaling(net, temperature=1.7)]
    logits_k = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(0))
    several = Several(detectors).eval()
    batch = {"logits_k": {1: torch.export.Dim("N")}}
    torch.onnx.export(several, (logits_k,), tmp_path / "a.onnx", dynamo=True, dynamic_shapes=batch, verbose=False)
    session = session_of(tmp_path / "a.onnx")
    for n in (1, 9):
        outputs = session.run(None, {"logits_k": logits_k[:, :n].numpy()})
        for ours, theirs in zip(several(logits_k[:, :n]), outputs, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-6)


def graph_outputs(detector, images):
    graph = Graph(detector)
    return dict(zip(graph.names, graph(images), strict=True))


class ReadsBatchSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, stride=8, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.fc(self.conv(x).relu().view(x.shape[0], -1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: kedge.Energy(anchored("compact")),
        lambda: kedge.MSP(network("compact")),
        lambda: kedge.AMP(kedge.anchor(ReadsBatchSize(), init="fresh")),
    ],
)
def test_the_graph_computes_the_detector_s_outputs(make):
    detector, images = calibrated(make()), pixels(5, seed=3)
    outputs, expected = graph_outputs(detector, images), detector(images)
    torch.testing.assert_close(outputs["logits"], expected.logits)
    torch.testing.assert_close(outputs["score"], expected.score)
    assert ("tau" in outputs) == detector.has_tau


def test_the_trained_detector_s_export_agrees_on_real_images(home, detector, parts):
    assert_agrees(detector, home / "digits.onnx", parts[2].images)
    assert compare_verdicts(detector, home / "digits.onnx").is_close
    exact, images = OnnxDetector(home / "digits.onnx", threads=1), parts[2].images[:4]
    np.testing.assert_array_equal(exact(parts[2])["label"], detector(parts[2]).label)
    for form in (images / 255, (images.double() / 255).numpy().transpose(0, 2, 3, 1)):
        np.testing.assert_array_equal(exact(form)["score"], exact(images)["score"])


def test_an_output_has_its_own_name_where_an_engine_knows_several():
    names = runtime._names([{"label"}, {"div_2", "score"}, {"score", "tau"}, {"other"}])
    assert names == ("label", "score", "tau", "other")


@needs_openvino
def test_openvino_gives_the_same_outputs(home, detector, parts):
    images = parts[2].images[:33]
    assert_same(OnnxDetector(home / "digits.onnx", engine="openvino", threads=1)(images), detector, images)
    assert "openvino_telemetry" not in {name for name, module in sys.modules.items() if module is not None}


# --- the decision ---------------------------------------------------------------------------------------------------


def test_the_p_value_is_its_definition_and_the_decision_its_consequence(home, parts):
    outputs, tensors = OnnxDetector(home / "digits.onnx")(parts[2]), initializers(home / "digits.onnx")
    counts = np.array([sum(known >= score for known in tensors["calibration.scores"]) for score in outputs["score"]])
    np.testing.assert_array_equal(outputs["p_value"], ((1 + counts) / (len(parts[1]) + 1)).astype(np.float32))
    np.testing.assert_array_equal(outputs["is_ood"], outputs["score"] > tensors["threshold"])
    np.testing.assert_array_equal(outputs["is_ood"], 1 + counts <= 0.05 * (len(parts[1]) + 1))
    assert 0 < outputs["is_ood"].sum() < len(counts)


def test_calibration_scores_that_tie_with_an_image_count(home, parts, tmp_path):
    image, options = parts[2].images[:1], {"temperature": 1.0, "alpha": 0.05, "delta": None}
    score = OnnxDetector(home / "digits.onnx")(image)["score"]
    model = exported.read_model(home / "digits.onnx")
    exported.write_calibration(model, torch.from_numpy(score).repeat(19), threshold=float(score[0]), **options)
    exported.write_model(model, tmp_path / "tied.onnx")
    outputs = OnnxDetector(tmp_path / "tied.onnx")(image)
    assert (outputs["p_value"][0], outputs["is_ood"][0]) == (1.0, False)
    with pytest.raises(InputError, match="float32"):
        exported.write_calibration(model, torch.tensor([0.1], dtype=torch.float64), threshold=0.1, **options)


def test_a_score_that_is_nan_is_flagged():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    nn.init.constant_(net[1].weight, float("nan"))
    assert bool(graph_outputs(kedge.MSP(net), torch.zeros(1, 3, 2, 2, dtype=torch.uint8))["is_ood"][0])


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_metadata_describes_the_detector_and_nothing_of_this_machine(home, detector):
    facts = session_of(home / "digits.onnx").get_modelmeta().custom_metadata_map
    assert facts["kedge.method"] == "amp"
    assert json.loads(facts["kedge.classes"]) == list("0123456789")
    assert float(facts["kedge.threshold"]) == detector.calibration.threshold
    assert (facts["kedge.alpha"], facts["kedge.delta"], facts["kedge.calibration_images"]) == ("0.05", "null", "500")
    rule = json.loads(facts["kedge.preprocess"])
    assert (rule["shape"], rule["resize"], rule["fit"]) == ([1, 28, 28], "bicubic", "crop")
    assert "bicubic" in rule["words"]
    assert facts["kedge.version"] == version("kedge")
    assert facts["kedge.detector_sha256"] == hashlib.sha256((home / "digits.kedge").read_bytes()).hexdigest()
    content = (home / "digits.onnx").read_bytes()
    assert b".py" not in content
    assert str(Path.home()).encode() not in content
    shape = onnx.load(home / "digits.onnx").graph.input[0].type.tensor_type.shape.dim
    assert (shape[0].dim_param, [dim.dim_value for dim in shape[1:]]) == ("N", [1, 28, 28])
    tensors = initializers(home / "digits.onnx")
    assert [value.shape for name, value in tensors.items() if name.endswith("anchor_maps")] == [(3, 1, 4, 28, 28)]
    assert not any("layer_c" in name for name in tensors)


def test_the_ten_lines_without_kedge_give_the_same_outputs(home, detector, parts, tmp_path):
    files = [str(tmp_path / "big.png"), str(tmp_path / "small.png")]
    big, small = (Image.fromarray(parts[2].images[i, 0].numpy()) for i in (0, 1))
    big.resize((90, 60)).convert("RGB").save(files[0])
    small.save(files[1])
    code = (
        "import json, runpy, sys\n"
        "sys.modules['kedge'] = sys.modules['torch'] = None\n"
        "outputs = runpy.run_path(sys.argv[1])['score'](sys.argv[2], sys.argv[3:])\n"
        "print(json.dumps({name: values.tolist() for name, values in outputs.items()}))\n"
    )
    for model in ("digits.onnx", "int8.onnx"):
        command = [sys.executable, "-c", code, EXAMPLE, home / model, *files]
        outputs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        ours = OnnxDetector(home / model)(files)
        assert outputs["label"] == ours["label"].tolist()
        np.testing.assert_allclose(outputs["score"], ours["score"], rtol=1e-5)
    assert_same(OnnxDetector(home / "digits.onnx")(files), detector, files)


@pytest.mark.parametrize("options", [{"crop": 0.8}, {"fit": "stretch"}, {"background": None}])
def test_the_example_without_kedge_prepares_a_picture_by_the_whole_rule(options):
    preprocess = kedge.Preprocess((3, 24, 32), **options)
    rgba = np.random.default_rng(0).integers(0, 256, (70, 50, 4), np.uint8)
    prepared = runpy.run_path(str(EXAMPLE))["prepared"](Image.fromarray(rgba), json.loads(exported.rule(preprocess)))
    np.testing.assert_array_equal(np.asarray(prepared).transpose(2, 0, 1), preprocess(Image.fromarray(rgba)))


def test_the_rule_in_words_names_the_share_that_is_cropped_and_the_background():
    words = json.loads(exported.rule(kedge.Preprocess((3, 224, 224), crop=0.875)))["words"]
    assert "covers 256 x 256 by bicubic, cut out the centre of 224 x 224" in words
    assert "transparent pixels on white" in words


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


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        y = self.fc(x.flatten(1))
        return y if float(y.sum()) > 0 else -y


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: kedge.ODIN(network("compact")).fit(labelled(20)), InputError, "got ODIN"),
        (lambda: kedge.MCDropout(network("compact", dropout=0.5)).fit(labelled(20)), InputError, "got MCDropout"),
        (lambda: kedge.AMP(anchored("compact"), variant="authors").fit(labelled(20)), InputError, "share its anchors"),
        (lambda: kedge.MSP(network("compact").double()).fit(labelled(20)), InputError, "float32"),
        (lambda: kedge.MSP(Ensemble([network("compact")])).fit(labelled(20)), InputError, "one network"),
        (lambda: kedge.MSP(nn.Linear(4, 2)).fit(torch.rand(20, 4)).calibrate(torch.rand(20, 4)), InputError, "images"),
        (lambda: kedge.MSP(network("compact")).fit(labelled(20)), NotReadyError, "calibrate"),
        (lambda: network("compact"), InputError, "detector"),
        (
            lambda: kedge.MSP(Branches()).fit(torch.rand(20, 3, 2, 2)).calibrate(torch.rand(20, 3, 2, 2)),
            ArchitectureError,
            "Branches cannot be exported",
        ),
    ],
)
def test_a_detector_that_no_file_can_hold_is_refused_with_the_reason(make, error, words, tmp_path):
    with pytest.raises(error, match=words):
        export_onnx(make(), tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_error_names_it(home, detector, tmp_path, monkeypatch):
    for missing, extra, call in (
        ("onnxscript", "onnx", lambda: export_onnx(detector, tmp_path / "a.onnx")),
        ("onnx", "onnx", lambda: export_onnx(detector, tmp_path / "a.onnx")),
        ("onnxruntime", "onnx", lambda: OnnxDetector(home / "digits.onnx")),
        ("openvino", "openvino", lambda: OnnxDetector(home / "digits.onnx", engine="openvino")),
        ("openvino", "openvino", lambda: quantise("none.onnx", "out.onnx", None, None, engine="openvino")),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(NotReadyError, match=rf"{missing}.*kedge\[{extra}\]"):
                call()


def test_other_files_and_engines_are_refused(home, tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"no model")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], [])), tmp_path / "b.onnx")
    for call, error, words in (
        (lambda: OnnxDetector(tmp_path / "a.onnx"), FileFormatError, "cannot read"),
        (lambda: recalibrate(tmp_path / "a.onnx", pixels(20)), FileFormatError, None),
        (lambda: recalibrate(tmp_path / "b.onnx", pixels(20)), FileFormatError, None),
        (lambda: recalibrate(tmp_path / "c.onnx", pixels(20)), InputError, "no file"),
        (lambda: OnnxDetector(home / "digits.onnx", engine="tensorrt"), InputError, "engine"),
        (lambda: quantise("none.onnx", "out.onnx", None, None, engine="abacus"), InputError, "'openvino'; got 'abac"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_damaged_metadata_is_an_error():
    facts = {"preprocess": exported.rule(kedge.Preprocess((3, 4, 4))), "alpha": "0.1", "delta": "null"}
    exported.checked_metadata({f"kedge.{name}": text for name, text in facts.items()}, "a.onnx")
    another = '{"shape": [3, 4, 4], "resize": "abacus", "fit": "crop"}'
    wrong = {"preprocess": ("{", "{}", another), "alpha": (None, "most"), "delta": ("{",)}
    for key, value in ((key, value) for key, values in wrong.items() for value in values):
        damaged = {f"kedge.{name}": text for name, text in (facts | {key: value}).items() if text is not None}
        with pytest.raises(FileFormatError, match=r"a\.onnx must describe .*damaged"):
            exported.checked_metadata(damaged, "a.onnx")


# --- 8 bits ---------------------------------------------------------------------------------------------------------


def test_eight_bits_keep_most_labels_in_a_smaller_file_with_its_own_threshold(home, detector, parts):
    exact, quantised = OnnxDetector(home / "digits.onnx"), OnnxDetector(home / "int8.onnx")
    outputs, expected = quantised(parts[2]), detector(parts[2])
    assert float(np.mean(outputs["label"] == expected.label.numpy())) > 0.97
    assert (home / "int8.onnx").stat().st_size < 0.6 * (home / "digits.onnx").stat().st_size
    assert 0 < np.abs(outputs["score"] - expected.score.numpy()).max() < 0.1 * float(expected.score.abs().max())
    outputs = quantised(parts[1])
    counts = (outputs["score"][:, None] <= outputs["score"]).sum(axis=1)
    np.testing.assert_allclose(outputs["p_value"], (1 + counts) / (len(parts[1]) + 1), atol=2e-3)
    np.testing.assert_array_equal(outputs["is_ood"], outputs["p_value"] <= np.float32(0.05))
    assert 0 < outputs["is_ood"].mean() <= 0.05
    assert quantised.metadata["kedge.threshold"] != exact.metadata["kedge.threshold"]
    assert (quantised.metadata["kedge.quantised"], quantised.metadata["kedge.engine"]) == ("int8", "onnxruntime")
    assert quantised.metadata["kedge.detector_sha256"] == exact.metadata["kedge.detector_sha256"]


def test_weights_have_as_many_bits_as_the_processor_can_sum(home, parts, tmp_path, monkeypatch):
    largest = {}
    for bits, exact in ((8, True), (7, False)):
        for module in ("int8", "runtime"):
            monkeypatch.setattr(f"kedge.export.{module}.sums_products_exactly", lambda exact=exact: exact)
        quantise(home / "digits.onnx", tmp_path / f"{bits}.onnx", parts[0], parts[1], images=16)
        held = initializers(tmp_path / f"{bits}.onnx")
        largest[bits] = max(np.abs(v.astype(int)).max() for v in held.values() if v.dtype == np.int8)
        assert OnnxDetector(tmp_path / f"{bits}.onnx").metadata["kedge.weight_bits"] == str(bits)
    assert largest == {8: 127, 7: 64}
    with pytest.warns(KedgeWarning, match="weight_bits=7"):  # the processor is still one without VNNI
        OnnxDetector(tmp_path / "8.onnx")
    with pytest.raises(InputError, match="weight_bits must be 7 or 8; got 4"):
        quantise(home / "digits.onnx", tmp_path / "4.onnx", parts[0], parts[1], weight_bits=4)


def test_processors_with_exact_sums_are_known_by_their_flags(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for flags, exact in (("avx2 fma", False), ("avx2 avx512_vnni", True), ("avx2 avx_vnni", True)):
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
        assert sums_products_exactly(tmp_path / "cpuinfo") is exact
    assert not sums_products_exactly(tmp_path / "missing")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert sums_products_exactly(tmp_path / "missing")


def test_only_the_middle_of_the_network_is_in_eight_bits(home):
    types = {name: value.dtype for name, value in initializers(home / "int8.onnx").items()}
    assert sum(kind == np.int8 for name, kind in types.items() if "weight" in name) >= 7  # convolutions but the first
    for part in ("anchor_maps", "calibration.scores", "threshold", "fc.weight", "prep.0.layer_x.weight"):
        assert [kind for name, kind in types.items() if name.endswith(part)] == [np.float32], part


def test_recalibration_fits_the_temperature_to_labels_and_keeps_the_guarantee_that_is_not_given(home, parts, tmp_path):
    def temperature(path):
        return float(initializers(path)["probability.temperature"])

    recalibrate(home / "digits.onnx", parts[1], out=tmp_path / "same.onnx")
    assert temperature(tmp_path / "same.onnx") == pytest.approx(temperature(home / "digits.onnx"), rel=1e-3)
    wrong = kedge.ImageSet(parts[1].images, (parts[1].labels + torch.arange(len(parts[1])) % 2) % 10)
    recalibrate(home / "digits.onnx", wrong, out=tmp_path / "unsure.onnx", alpha=0.2)
    assert temperature(tmp_path / "unsure.onnx") > 2 * temperature(home / "digits.onnx")
    assert 0.15 < OnnxDetector(tmp_path / "unsure.onnx")(parts[1])["is_ood"].mean() <= 0.2
    recalibrate(tmp_path / "unsure.onnx", parts[1].images)
    assert temperature(tmp_path / "unsure.onnx") > 2 * temperature(home / "digits.onnx")
    for options, expected in (({}, (0.05, None)), ({"delta": 0.1}, (0.05, 0.1)), ({"alpha": 0.2}, (0.2, None))):
        recalibrate(home / "digits.onnx", parts[1], out=tmp_path / "a.onnx", **options)
        assert exported.guarantee_of(OnnxDetector(tmp_path / "a.onnx").metadata) == expected


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


@needs_openvino
def test_another_engine_than_the_file_was_calibrated_for_is_a_warning(home, parts, tmp_path):
    with pytest.warns(KedgeWarning, match="calibrated on the scores of onnxruntime"):
        OnnxDetector(home / "int8.onnx", engine="openvino")
    recalibrate(home / "int8.onnx", parts[1], out=tmp_path / "a.onnx", engine="openvino")
    assert 0 < OnnxDetector(tmp_path / "a.onnx", engine="openvino")(parts[1])["is_ood"].mean() <= 0.05


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_exports_quantises_and_reports_how_well(home, tmp_path, monkeypatch):
    out = tmp_path / "a.onnx"
    sets = ["--int8", f"npz:{home / 'train.npz'}", "--calibrate", f"npz:{home / 'held.npz'}"]
    done = run("export", home / "digits.kedge", "-o", out, *sets)
    assert done.exit_code == 0, done.output
    size = f"{out.stat().st_size / 1e6:.2f} MB"
    assert all(words in done.output for words in ("largest difference of a score", "keep their label", size))
    threshold, expected = (float(OnnxDetector(p).metadata["kedge.threshold"]) for p in (out, home / "int8.onnx"))
    assert threshold == pytest.approx(expected, rel=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]
    again = (home / "digits.onnx").read_bytes()  # not exported a third time
    monkeypatch.setattr("kedge.export.export_onnx", lambda detector, path, **_: path.write_bytes(again))
    facts = json.loads(run("export", home / "digits.kedge", "-o", out, "--overwrite", "--json").stdout)
    assert (facts["file"], facts["bytes"]) == (str(out), out.stat().st_size)
    assert 0 <= facts["largest_difference"] < 1e-4 * facts["largest_score"]


def test_the_threshold_is_not_set_on_images_that_the_ranges_or_the_detector_were_fitted_to(home, tmp_path, monkeypatch):
    monkeypatch.setattr("kedge.detectors.training_images.SHARED", 0.005)
    np.savez(tmp_path / "some.npz", **{k: v[:300] for k, v in np.load(home / "test.npz").items()})
    for seen, words in ((tmp_path / "some.npz", "other images than training_images"), (home / "train.npz", "fitted")):
        sets = ["--int8", f"npz:{home / 'test.npz'}", "--calibrate", f"npz:{seen}"]
        with pytest.raises(InputError, match=f"held_out must .*{words}"):
            raise run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *sets).exception
    assert not (tmp_path / "a.onnx").exists()


def test_a_file_that_differs_is_not_kept(home, tmp_path, monkeypatch):
    monkeypatch.setattr("kedge.export.compare_verdicts", lambda *_: Difference(largest=0.1, scale=1.0, verdicts=0))
    monkeypatch.setattr("kedge.export.export_onnx", lambda detector, path, **_: path.write_bytes(b"x"))
    with pytest.raises(KedgeError, match="differs from the detector"):
        raise run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx").exception
    assert list(tmp_path.iterdir()) == []
    assert run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", "--no-check").exit_code == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [("score", lambda values: values * np.nan), ("label", lambda values: values + 1), ("is_ood", np.logical_not)],
)
def test_the_check_sees_another_detector_nan_another_label_and_another_decision(
    name, change, home, detector, parts, monkeypatch
):
    other = kedge.AMP(kedge.anchor(network("compact", 1), init="fresh")).fit(parts[1].images)
    assert not compare_verdicts(other.calibrate(parts[1].images), home / "digits.onnx").is_close

    def run_file(images, batch_size):
        detection = detector(images)
        outputs = {key: getattr(detection, key).numpy() for key in ("score", "label", "is_ood")}
        return outputs | ({name: change(outputs[name])} if batch_size == changed_at else {})

    monkeypatch.setattr("kedge.export.runtime.OnnxDetector", lambda path: run_file)
    for changed_at in (None, 1):  # 1: not in the batch of all
        assert compare_verdicts(detector, "a.onnx").is_close == (changed_at is None)


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
def test_options_without_a_guarantee_are_refused(options, words, home, tmp_path):
    with pytest.raises(InputError, match=words):
        raise run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *options).exception
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_reading_images_is_not_reported_as_one_of_writing(home, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise PermissionError("images")

    monkeypatch.setattr("kedge.data.sources.load_dataset", fails)
    sets = ["--int8", "folder:a", "--calibrate", "folder:b", "--no-check"]
    with pytest.raises(PermissionError, match="images"):
        raise run("export", home / "digits.kedge", "-o", tmp_path / "a.onnx", *sets).exception


def test_an_opset_that_cannot_be_written_is_refused_and_another_than_was_requested_not_kept(tmp_path, monkeypatch):
    detector, real = calibrated(kedge.MSP(network("compact"))), torch.onnx.export
    for opset in (17, 26, 99):
        with pytest.raises(InputError, match=r"opset must be a whole number .*; got"):
            export_onnx(detector, tmp_path / "a.onnx", opset=opset)
        done = run("export", "cifar10", "-o", "a.onnx", "--opset", opset)
        assert done.exit_code == 2
        assert "Invalid value for '--opset'" in done.output
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **options: real(*a, **options | {"opset_version": 18}))
    with pytest.raises(InputError, match="20 gave a file of opset 18"):
        export_onnx(detector, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
