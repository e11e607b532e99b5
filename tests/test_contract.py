"""The contract that every registered detector keeps, on unanchored and on anchored networks.

A new detector is tested here without a line of its own; a test file of a method holds what is particular to it: its
formula against an oracle, its options and their errors.
"""

import copy
import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import kedge
from helpers import same_weights
from kedge.detectors import Detector, registered
from kedge.detectors.registry import named_methods
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.io import artifact
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, train

METHODS = registered()
RECIPE = Recipe(epochs=1, batch=16, lr=0.02, crop=0, flip=False)
PREPARE = {"udg": {"groups": 6}}  # options of `prepare` and `loss` that go with so few images
MEMBERS = {"ensemble": 2}  # methods that are built of several networks

OPTIONS = {  # further cases: options that change how a method computes, learns or saves
    "amp, authors": ("amp", {"variant": "authors"}),
    "amp, recommended": ("amp", {"variant": "recommended", "score": "energy"}),
    "amp, shared tau": ("amp", {"shared_tau": True, "rescale": "plain"}),
    "amp, mutual information": ("amp", {"score": "mutual_information"}),
    "adascale, l": ("adascale", {"scale": "logits", "percentile": (0.3, 0.7)}),
    "combined, one pass": (
        "combined",
        {"parts": ["knn", "vim", "energy"], "rule": "copula", "standardise": "quantiles"},
    ),
    "combined, images": ("combined", {"parts": ["odin", "temperature_scaling", "mds"], "rule": "learned"}),
    "energy, ash-s": ("energy", {"shape": "ash"}),
    "nac, layers": ("nac", {"layers": ["stage1", "fc:in"], "alpha": (50, 200.0), "bins": 20, "full": 3}),
    "msp, vra": ("msp", {"shape": "vra"}),
    "kl_uniform, lts": ("kl_uniform", {"shape": "lts", "percentile": 0.7}),
    "gram, normalised": ("gram", {"layers": ["stage1", "fc:in"], "powers": (1, 3), "normalise": True}),
    "mahalanobis, moved": ("mahalanobis", {"epsilon": 0.01, "layers": ["stage2", "fc:in"]}),
    "temperature scaling, given": ("temperature_scaling", {"temperature": 3.0}),
    **{name: (kind.name, options) for name, (kind, options) in named_methods().items() if name in kind.variants},
}
NEED_ANCHORS = {name for name, method in METHODS.items() if method.reads == "per_anchor_logits"}
PREPARED = [name for name, method in METHODS.items() if hasattr(method, "prepare")]  # they change the network
CASES = [(name, "unanchored") for name in METHODS if name not in NEED_ANCHORS]
CASES += [(name, "anchored") for name in METHODS if name not in PREPARED]
CASES += [(case, "anchored" if name in NEED_ANCHORS else "unanchored") for case, (name, _) in OPTIONS.items()]
SVI = ("svi", "svi_avuc")  # a draw of their weights is in the network that they share
MEANS = ("mc_dropout", "tta", "amp, recommended", *SVI)  # their logits are means over passes of their own
every_detector = pytest.mark.parametrize(("name", "kind"), CASES)


def images(n=48, seed=0, name="images") -> kedge.ImageSet:
    """Three classes by their brightest third, under noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 150, (n, 1, 12, 12), dtype=torch.uint8, generator=generator)
    labels = torch.arange(n) % 3
    for label in range(3):
        pixels[labels == label, :, :, 4 * label : 4 * label + 4] += 100
    return kedge.ImageSet(pixels, labels, name=name, classes=("left", "middle", "right"))


def network(kind="unanchored", dtype=torch.float32, seed=0) -> kedge.Classifier:
    with seeded(seed):
        net = build("compact", width=4, classes=3, channels=1, dropout=0.3)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(5)
    statistics = {"mean": 0.5, "std": 0.25}
    if kind == "anchored":
        return kedge.anchor(net.to(dtype), init="fresh", seed=seed, **statistics).eval()
    return kedge.Classifier(net.to(dtype), **statistics).eval()


def built(case: str, kind="unanchored", dtype=torch.float32, trained=True) -> Detector:
    """A detector before `fit`, on a network that its method can use."""
    name, arguments = OPTIONS.get(case, (case, {}))
    method, options = METHODS[name], PREPARE.get(name, {})
    members = [network(kind, dtype, seed) for seed in range(MEMBERS.get(name, 1))]
    net = members if name in MEMBERS else members[0]
    if name in PREPARED:
        net = method.prepare(net, **options)
    if trained and hasattr(method, "loss"):
        loss = method.loss(**options)
        outliers = images(32, seed=9, name="outliers") if loss.outliers_per_image else None
        net = train(net, images(), RECIPE, loss=loss, outliers=outliers)
    return method(net, **arguments)


@functools.cache
def ready(name: str, kind="unanchored", dtype=torch.float32) -> Detector:
    """Fitted and calibrated, once for all tests: one that changes it takes a copy."""
    return built(name, kind, dtype).fit(images()).calibrate(images(80, seed=1))


def same(one: kedge.Detection, other: kedge.Detection) -> bool:
    """Whether two detections are bitwise the same."""
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def tolerances(detection: kedge.Detection, relative: float) -> dict[str, float]:
    """How far scores may differ by rounding: relative to the scores, or to the logits that small ones are made of."""
    scores, logits = float(detection.score.abs().max()), float(detection.logits.abs().max())
    return {"rtol": relative, "atol": relative * (scores if scores > 1e-3 else logits)}


def everything(detector: Detector) -> dict[str, torch.Tensor]:
    """All that a detector consists of: weights, buffers, what it learned, its threshold."""
    tensors = {f"net.{key}": value for key, value in detector.net.state_dict().items()}
    tensors |= {f"state.{key}": value for key, value in detector.state().items()}
    tensors["scores"] = detector.calibration.scores
    return {key: value.clone() for key, value in tensors.items()}


# The verbs.


def test_every_method_is_registered_by_its_name_and_public():
    assert all(name == method.name for name, method in METHODS.items())
    assert all(getattr(kedge, method.__name__) is method for method in METHODS.values())
    assert {"amp", "msp", "energy", "kl_uniform", "mahalanobis", "odin", "gram", "ensemble", "student"} <= set(METHODS)
    with pytest.raises(InputError, match="msp"):
        kedge.detectors.register(type("Other", (kedge.MSP,), {}))
    assert registered()["msp"] is kedge.MSP


@every_detector
def test_a_detection_is_complete_and_consistent(name, kind):
    detector = ready(name, kind)
    detection = detector(images(10, seed=2))
    assert len(detection) == 10
    assert "; forward passes for an image: " in detector.summary
    assert detection.logits.shape == detection.probability.shape == (10, 3)
    assert detection.score.shape == detection.p_value.shape == detection.is_ood.shape == (10,)
    assert detection.score.isfinite().all()
    assert len(detection.score.unique()) > 1
    assert torch.equal(detection.score, detector.score(images(10, seed=2)))
    assert torch.equal(detection.label, detection.logits.argmax(dim=1))
    torch.testing.assert_close(detection.probability.sum(dim=1), torch.ones(10))
    assert (detection.tau is not None) == detector.has_tau
    assert torch.equal(detection.is_ood, detection.score.double() > detector.calibration.threshold)
    assert torch.equal(detection.is_ood, detection.p_value <= 0.05)
    order = detection.score.argsort()
    assert (detection.p_value[order].diff() <= 0).all()  # a larger score is further out
    assert isinstance(detector.cost.forward, int)
    double = ready(name, kind, torch.float64)(images(6, seed=2))
    assert double.logits.dtype == double.score.dtype == torch.float64
    assert detection.logits.dtype == torch.float32


@every_detector
def test_a_saved_detector_gives_identical_verdicts(name, kind, tmp_path):
    detector, path, again_path = ready(name, kind), tmp_path / "a.kedge", tmp_path / "b.kedge"
    detector.save(path)
    again = kedge.load(path)
    assert type(again) is type(detector)
    assert same(again(images(10, seed=2)), detector(images(10, seed=2)))
    for attribute in ("preprocess", "classes", "cost"):
        assert getattr(again, attribute) == getattr(detector, attribute)
    assert again.config() == detector.config()
    assert again.classes == ("left", "middle", "right")
    assert (again.outliers is None) == (detector.outliers is None)
    assert not again.net.training
    again.save(again_path)
    assert path.read_bytes() == again_path.read_bytes()
    if detector.state() and not detector.learns_held_out and name != "temperature scaling, given":
        header, tensors = artifact.read(path)  # without what the method learned in `fit`
        artifact.write(path, header, {key: value for key, value in tensors.items() if not key.startswith("detector.")})
        with pytest.raises(FileFormatError):
            kedge.load(path)


@every_detector
def test_a_fitted_detector_is_saved_without_a_threshold(name, kind, tmp_path):
    detector = copy.deepcopy(ready(name, kind)).fit(images())
    detector.save(tmp_path / "a.kedge")
    again = kedge.load(tmp_path / "a.kedge")
    assert again.calibration is None
    if not detector.learns_held_out:
        assert torch.equal(again.score(images(10, seed=2)), detector.score(images(10, seed=2)))
    detections = [each.calibrate(images(80, seed=1))(images(10, seed=2)) for each in (detector, again)]
    assert same(*detections)


@every_detector
def test_fit_undoes_a_calibration_learns_anew_and_leaves_a_network_in_training_mode_as_it_was(name, kind):
    detector, some = copy.deepcopy(ready(name, kind)), images(10, seed=2)
    detector.fit(images(48, seed=5)).calibrate(images(80, seed=6))
    detector.net.train()
    before, random = copy.deepcopy(detector.net.state_dict()), torch.get_rng_state()
    assert detector.fit(images()) is detector
    assert all(module.training for module in detector.net.modules())
    assert all(torch.equal(before[key], value) for key, value in detector.net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(value.requires_grad for value in detector.state().values())
    detector.net.eval()
    assert detector.calibration is None
    with pytest.raises(NotReadyError, match="calibrate"):
        detector(images(4))
    assert detector.calibrate(images(80, seed=1)) is detector
    torch.testing.assert_close(detector.score(some), ready(name, kind).score(some), rtol=1e-4, atol=1e-4)


# A score belongs to its image.


@every_detector
def test_a_score_does_not_depend_on_its_batch(name, kind):
    dtype, tolerance = (torch.float32, 1e-4) if kind == "unanchored" else (torch.float64, 1e-9)
    detector, some = ready(name, kind, dtype), images(6, seed=2)
    whole = detector.score(some)
    assert torch.equal(detector.score(some), whole)
    close = tolerances(detector(some), tolerance)
    torch.testing.assert_close(detector.score(some, batch_size=4), whole, **close)
    backwards = some.subset(range(5, -1, -1))
    torch.testing.assert_close(detector.score(backwards, batch_size=1).flip(0), whole, **close)
    among_others = torch.cat([some.images[:3], images(30, seed=3).images])
    torch.testing.assert_close(detector.score(among_others)[:3], whole[:3], **close)


@every_detector
def test_images_come_as_bytes_floats_and_in_any_container(name, kind):
    detector, some = ready(name, kind), images(6, seed=2)
    expected, close = detector.score(some), tolerances(detector(some), 1e-5)
    floats = some.images.float() / 255
    for source in (some.images, floats, list(floats), DataLoader(some, batch_size=4)):
        torch.testing.assert_close(detector.score(source), expected, **close)
    detector = copy.deepcopy(detector)
    loader = DataLoader([(image.float() / 255, int(label)) for image, label in images()], batch_size=7)
    detector.fit(loader).calibrate(DataLoader(images(80, seed=1), batch_size=9))
    torch.testing.assert_close(detector.score(some), expected, rtol=1e-3, atol=1e-3)


@every_detector
def test_a_call_changes_nothing(name, kind):
    detector = copy.deepcopy(ready(name, kind))
    before, attributes = everything(detector), {key: id(value) for key, value in vars(detector).items()}
    detector.net.train()
    next(module for module in detector.net.modules() if isinstance(module, nn.ReLU | nn.GELU | nn.Conv2d)).eval()
    modes = [module.training for module in detector.net.modules()]
    some = images(6, seed=2).images.float() / 255
    given, random = some.clone(), torch.get_rng_state()
    score = detector(some).score
    with torch.inference_mode():
        assert detector.score(some).equal(score)
    with pytest.raises(InputError):
        detector.score([some[0], torch.full((1, 12, 12), 7.0)], batch_size=1)
    assert not score.requires_grad
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(some, given)
    assert [module.training for module in detector.net.modules()] == modes
    after = everything(detector)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert {key: id(value) for key, value in vars(detector).items()} == attributes
    assert all(parameter.grad is None for parameter in detector.net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in detector.net.modules())


@every_detector
def test_several_threads_get_what_one_gets(name, kind):
    """On a network in training mode, that another detector shares."""
    detector = copy.deepcopy(ready(name, kind))
    members = detector.net.members if name == "ensemble" else [detector.net]
    others = [] if name in SVI else [kedge.MSP(member.network).fit(images()) for member in members]
    if kind == "anchored":
        others = [kedge.MSP(member).fit(images()) for member in members]
    for other in others:
        other.calibrate(images(80, seed=1))
    parts = [images(5, seed=seed) for seed in range(10, 14)]
    calls = [(each, part) for part in parts for each in (detector, *others)]
    expected = [each(part) for each, part in calls]
    detector.net.train()
    before = everything(detector)
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda call: call[0](call[1]), calls)
        assert all(map(same, results, expected))
    assert all(torch.equal(value, before[key]) for key, value in everything(detector).items())
    assert all(module.training for module in detector.net.modules())


@pytest.mark.parametrize("name", ["energy", "knn", "mc_dropout", "ensemble", "amp"])
def test_eight_threads_of_a_hundred_calls_equal_one_thread(name, monkeypatch):
    """With detectors of the same bare network, loaded afresh, so that the first passes are among the calls."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    net = kedge.anchor(net, init="fresh") if name == "amp" else net
    first = METHODS[name]([net, net] if name == "ensemble" else net).fit(images())
    detectors, x = [first, kedge.Energy(net).fit(images())], images(4, seed=2)
    expected = [copy.deepcopy(each).score(x) for each in detectors]
    before = copy.deepcopy(net.train().state_dict())
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            scores = pool.map(lambda call: detectors[call % 2].score(x), range(800))
            assert all(torch.equal(score, expected[call % 2]) for call, score in enumerate(scores))
    finally:
        sys.setswitchinterval(switch)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(module.training for module in net.modules())


# Errors.


@every_detector
def test_a_step_that_was_skipped_is_named(name, kind, tmp_path):
    detector = built(name, kind, trained=False)
    for early in (detector.score, detector.calibrate):
        with pytest.raises(NotReadyError, match=r"not fitted: call \w+\(net\)\.fit\(train_set\)"):
            early(images(4))
    with pytest.raises(NotReadyError, match="fit"):
        detector.save(tmp_path / "nowhere.kedge")
    detector.fit(images())
    for early in (detector, *([detector.score] if detector.learns_held_out and name != "early_exit" else [])):
        with pytest.raises(NotReadyError, match=r"calibrate\(held_out\)"):
            early(images(4))


WRONG = (
    *(torch.zeros(2, 3, 12, 12), torch.zeros(1, 12, 12), torch.zeros(2, 1, 12, 12, dtype=torch.int64)),
    *(torch.full((2, 1, 12, 12), 128.0), torch.zeros(2, 12, 12, 1), torch.zeros(2, 1, 12, 12).to_sparse()),
    *([torch.zeros(1, 12, 12).to_sparse()], torch.empty(2, 1, 12, 12, device="meta"), [], "no file.png", 3),
    *(torch.tensor(0.5), np.array(0.5), torch.zeros(2, 1, 12, 12).to(torch.float8_e4m3fn)),
    torch.nested.nested_tensor([torch.zeros(1, 12, 12)]),
)


@every_detector
def test_what_is_no_image_is_refused_and_leaves_the_threshold(name, kind):
    detector = ready(name, kind)
    threshold = detector.calibration
    for source in WRONG:
        for verb in (detector.score, detector) + ((detector.calibrate,) if not detector.learns_held_out else ()):
            with pytest.raises(InputError):
                verb(source)
    for options in ({"alpha": 0}, {"alpha": 1.5}, {"delta": 1}, {"batch_size": 0}):
        with pytest.raises(InputError, match=next(iter(options))):
            detector.calibrate(images(80, seed=1), **options)
    with pytest.raises(InputError, match="finite"):
        detector.calibrate(torch.full((20, 1, 12, 12), math.nan))
    assert detector.calibration is threshold


@every_detector
def test_an_image_with_nan_is_flagged_and_leaves_the_others_as_they_are(name, kind):
    detector, some = ready(name, kind), images(6, seed=2).images.float() / 255
    expected, broken = detector(some), some.clone()
    broken[1, 0, 3, 3], broken[4] = math.nan, math.inf
    for source in (broken, list(broken), broken.numpy()):
        detection = detector(source)
        assert torch.equal(detector.score(source), detection.score)
        assert detection.is_ood[[1, 4]].all()
        assert detection.score[[1, 4]].isposinf().all()
        assert detection.p_value[[1, 4]].eq(1 / (len(detector.calibration.scores) + 1)).all()
        assert detection.label[[1, 4]].eq(-1).all()
        rows = detection.to_rows(detector.classes)
        assert all(rows[1][key] is None for key in ("label", "class", "probability", "score", "tau"))
        torch.testing.assert_close(detection.score[[0, 2, 3, 5]], expected.score[[0, 2, 3, 5]], rtol=1e-4, atol=1e-4)


OUT_OF_RANGE = [  # the first option is at fault; found when the detector is built or, at the latest, fitted
    *(("knn", wrong) for wrong in ({"k": 0}, {"k": 49}, {"limit": 0}, {"limit": 8, "k": 9}, {"seed": -1})),
    *(("odin", wrong) for wrong in ({"temperature": 0}, {"epsilon": -0.1}, {"epsilon": math.nan}, {"seed": -1})),
    *(("react", wrong) for wrong in ({"percentile": 0}, {"percentile": 90}, {"score": "mps"}, {"head": "stage1"})),
    *(("dice", wrong) for wrong in ({"sparsity": 1}, {"sparsity": 1.5}, {"sparsity": math.nan}, {"head": "stage1"})),
    *(("adascale", {"percentile": wrong}) for wrong in (0.8, (0.9, 0.8), (0.8, 85), (0.8,))),
    *(("adascale", wrong) for wrong in ({"scale": "l"}, {"k1": 5}, {"k2": -1}, {"lam": -1}, {"epsilon": math.nan})),
    *(("nac", wrong) for wrong in ({"layers": "stage1"}, {"alpha": 0}, {"bins": 3}, {"full": 0}, {"limit": 0})),
    *(("nac", {"layers": wrong}) for wrong in ([], ["stage9"])),
    ("nac", {"alpha": (1.0, 2.0), "layers": ["stage1"]}),
    *(("weiper", wrong) for wrong in ({"delta": -1}, {"repeats": 0}, {"bins": 1}, {"weight": math.nan}, {"limit": 0})),
    *(("energy", wrong) for wrong in ({"shape": "ashes"}, {"percentile": 0.5}, {"head": "stage1", "shape": "lts"})),
    *(("energy", {"percentile": wrong, "shape": "scale"}) for wrong in (85, -0.1, math.nan, (0.6, 0.9))),
    *(("energy", {"percentile": wrong, "shape": "vra"}) for wrong in (0.9, (0.9, 0.6), (0, 0), (0.6, 95))),
    *(("nci", {"alpha": wrong}) for wrong in (-1, math.nan)),
    *(("nnguide", wrong) for wrong in ({"k": 0}, {"limit": 0}, {"seed": -1}, {"head": "stage1"})),
    *(("she", wrong) for wrong in ({"patterns": "some"}, {"beta": 0}, {"beta": math.inf}, {"limit": 0}, {"seed": -1})),
    *(("vim", wrong) for wrong in ({"dim": -1}, {"dim": 2.0}, {"dim": 32}, {"head": "stage1"})),
    *(("openmax", wrong) for wrong in ({"tail": 0}, {"alpha": 0}, {"alpha": 0.5})),
    *(("cop", wrong) for wrong in ({"variance": 0}, {"variance": 1}, {"variance": math.nan}, {"head": "stage1"})),
    *(("corp", wrong) for wrong in ({"variance": 1}, {"gamma": 0}, {"gamma": math.inf}, {"m": 0}, {"seed": -1})),
    *(("gram", {"layers": wrong}) for wrong in ("stage1", [], ["stage9"])),
    *(("rankfeat", {"layer": wrong}) for wrong in ("stage9", "fc", "stage3")),  # unknown, a vector, a single position
    ("gradnorm", {"head": "stage1"}),
    *(("gram", {"powers": wrong}) for wrong in ([], 3, [0], [1.5])),
    *(("mahalanobis", {"layers": wrong}) for wrong in ("stage1", [1], [], ["fc", "fc"], ["stage9"])),
    *(
        ("mahalanobis", wrong)
        for wrong in ({"epsilon": -0.1}, {"combine": "mean"}, {"outliers": [], "combine": "equal"})
    ),
    *(("mahalanobis", {"shrinkage": wrong}) for wrong in (-0.1, 1.1, math.nan, "oak")),
    *(("gen", wrong) for wrong in ({"gamma": 0}, {"gamma": 1.0}, {"gamma": math.nan}, {"m": 1}, {"m": 2.5})),
    *(("temperature_scaling", {"temperature": wrong}) for wrong in (0, -1.0, math.inf, math.nan)),
    *(("tta", wrong) for wrong in ({"k": 0}, {"shift": -1}, {"score": "mps"}, {"k": 7, "same_as_amp": True})),
    *(
        ("amp", wrong)
        for wrong in ({"variant": "papers"}, {"score": "mps"}, {"tau": "max"}, {"rescale": "log"}, {"k": 1})
    ),
    *(("amp", {"anchors": wrong}) for wrong in ("first", torch.zeros(1, 1, 12, 12), torch.tensor(0.5), 3)),
    *(
        ("amp", wrong)
        for wrong in ({"k": 3, "anchors": torch.zeros(4, 1, 12, 12)}, {"pool": 9, "variant": "authors", "k": 10})
    ),
    *(("amp", {"shared_tau": True, "score": wrong}) for wrong in ("tau", "mutual_information")),
    ("amp", {"shared_tau": True, "rescale": "none"}),
]


@pytest.mark.parametrize(("name", "options"), OUT_OF_RANGE, ids=str)
def test_options_out_of_range_are_refused(name, options):
    with pytest.raises(InputError, match=next(iter(options)).removesuffix("s")):
        METHODS[name](network("anchored" if name == "amp" else "unanchored"), **options).fit(images())


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] not in MEANS])
def test_labels_are_those_of_the_network_for_the_image_as_it_is(name, kind):
    detector, some = ready(name, kind), images(6, seed=2)
    with torch.no_grad():
        logits = detector.net.eval()(some.images)
    torch.testing.assert_close(detector(some).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.reads in ("features", "maps")])
def test_features_that_are_not_finite_are_refused_by_fit(name):
    net = network()
    net.network.stage3[0][0].weight.data[0] = math.nan
    with pytest.raises(InputError, match="must be finite"):
        METHODS[name](net).fit(images())


@pytest.mark.parametrize("name", METHODS)
def test_only_networks_are_taken_and_preparing_one_leaves_the_original(name):
    with pytest.raises(InputError, match="str"):
        METHODS[name]("resnet18")
    if name in PREPARED:
        net = network()
        before = copy.deepcopy(net)
        METHODS[name].prepare(net, **PREPARE.get(name, {}))
        assert same_weights(before, net)


@pytest.mark.parametrize("name", [name for name, kind in CASES if kind == "unanchored" and name in METHODS])
def test_what_a_method_learned_follows_its_network_to_another_device(name):
    if METHODS[name].reads == "images":
        pytest.skip("reads the pixels on the CPU")
    detector = copy.deepcopy(ready(name))
    learned = {key: id(value) for key, value in vars(detector).items()}
    detector.net.to("meta")
    with torch.no_grad():
        outputs = detector.outputs(torch.empty(2, 1, 12, 12, device="meta"))
    assert outputs.score.device == outputs.logits.device == torch.device("meta")
    assert {key: id(value) for key, value in vars(detector).items()} == learned  # a call changes nothing


OWN = ["odin", "mahalanobis", "gram", "rankfeat", "knn", "vim", "react", "nnguide", "deup", "ensemble"]


@pytest.mark.parametrize("name", OWN)
def test_networks_of_the_user_s_own_work_without_more_arguments(name, tmp_path):
    def user_network():
        with seeded(3):
            net = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(400, 8), nn.ReLU(), nn.Linear(8, 3)
            )
        net[-1].bias.data += 5  # ViM needs logits that are positive, as those of trained networks are
        return net

    for net in (user_network(), kedge.anchor(user_network())):
        detector = METHODS[name]([net] if name == "ensemble" else net)
        detector.fit(images()).calibrate(images(80, seed=1))
        detector.save(tmp_path / "own.kedge")
        again = kedge.load(tmp_path / "own.kedge", model=user_network())
        assert torch.equal(again.score(images(5, seed=2)), detector.score(images(5, seed=2)))


# Outliers and costs.


def test_only_those_that_learned_from_outliers_are_marked():
    marked = {name for name, kind in CASES if ready(name, kind).outliers is not None}
    assert marked == {"outlier_exposure", "discrepancy", "udg"}
    assert all(METHODS[name].needs_outliers for name in marked)
    tuned = kedge.Mahalanobis(network(), outliers=images(32, seed=9, name="outliers"))
    assert tuned.fit(images()).calibrate(images(80, seed=1)).outliers is not None


def test_a_test_set_with_outliers_of_the_training_is_refused():
    test, other = images(20, seed=3, name="test"), images(20, seed=4, name="other")
    taken = images(32, seed=9, name="taken").subset([3, 4])
    for name in ("msp", "outlier_exposure", "discrepancy", "udg"):
        detector = {name: ready(name)}
        if name == "msp":
            assert kedge.evaluate(detector, test, [other, taken]).results[name].uses_outliers is False
            continue
        assert kedge.evaluate(detector, test, [other]).results[name].uses_outliers is True
        with pytest.raises(InputError, match="2 of the images in 'taken' are among the training outliers"):
            kedge.evaluate(detector, test, [other, taken])
        untrained = built(name, trained=False).fit(images()).calibrate(images(80, seed=1))
        assert kedge.evaluate({name: untrained}, test, [other]).results[name].uses_outliers


def test_what_a_network_learned_from_is_not_forgotten_by_anchoring_or_training_again():
    outliers, more = images(32, seed=9, name="outliers"), images(32, seed=10, name="more")
    loss = kedge.OutlierExposure.loss
    net = train(network(), images(), RECIPE, loss=loss(), outliers=outliers)
    net = train(net, images(), RECIPE, loss=loss(), outliers=more)
    assert len(kedge.MSP(net).outliers) == 64
    net = kedge.anchor(net)
    assert net.record["data"]["name"] == "images"
    amp = kedge.AMP(net).fit(images()).calibrate(images(80, seed=1))
    for learned in (outliers, more):
        with pytest.raises(InputError, match="among the training outliers"):
            kedge.evaluate({"AMP": amp}, images(20, seed=3, name="test"), [learned])


def test_the_half_that_a_method_learned_from_is_no_test_set_either():
    held_out = images(80, seed=1)
    for half in (held_out.subset(range(40), name="first"), held_out.subset(range(40, 80), name="second")):
        with pytest.raises(InputError, match=f"40 of the images in '{half.name}' are among the calibration images"):
            kedge.evaluate({"T": ready("temperature_scaling")}, half, [images(20, seed=4, name="other")])


def test_costs_are_counted_in_passes():
    for name in ("msp", "max_logit", "entropy", "energy", "temperature_scaling", "mahalanobis", "gram", "knn", "vim"):
        assert ready(name).cost == kedge.detectors.Cost(forward=1, backward=0)
        assert ready(name, "anchored").cost.forward == 5  # one for each anchor
    assert ready("student").cost.forward == 1
    assert ready("odin").cost == ready("adascale").cost == kedge.detectors.Cost(forward=2, backward=1)
    assert ready("mahalanobis, moved").cost == kedge.detectors.Cost(forward=3, backward=2)
    assert ready("mc_dropout").cost.forward == ready("svi").cost.forward == 10
    assert ready("ensemble").cost.forward == 2
    assert ready("ensemble", "anchored").cost.forward == 10


def test_a_detector_that_is_not_fitted_cannot_be_evaluated():
    with pytest.raises(NotReadyError, match="'AMP' is not fitted"):
        kedge.evaluate({"AMP": kedge.AMP(network("anchored"))}, images(20, name="t"), [images(20, seed=4, name="o")])
