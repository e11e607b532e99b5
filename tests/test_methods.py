"""Every method behind the same verbs, so that a user can swap one word; the formulas have tests of their own."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import kedge
from kedge.detectors import Detector, TrainedDetector
from kedge.detectors.registry import DETECTORS
from kedge.errors import InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, train

NAMES = {
    "AMP", "MSP", "MaxLogit", "Entropy", "Energy", "TemperatureScaling", "ODIN", "Mahalanobis", "Gram", "MCDropout",
    "DeepEnsemble", "KNN", "ViM", "ReAct", "DEUP", "SVI", "SVIAvUC", "OutlierExposure", "ClassifierDiscrepancy", "UDG",
    "DUQ", "TTA", "LowLevelStatistics", "Student",
}  # fmt: skip
RECIPE = Recipe(epochs=1, batch=16, lr=0.02, crop=0, flip=False)
TRAINED = [name for name, kind in DETECTORS.items() if issubclass(kind, TrainedDetector)]
PREPARE = {"udg": {"groups": 6}}
ANCHORED = [name for name in DETECTORS if name not in (*TRAINED, "student")]
PLAIN = [name for name in DETECTORS if name != "amp"]
EVERY = [(name, "plain") for name in PLAIN] + [(name, "anchored") for name in ANCHORED]


def images(n=48, seed=0, name="images") -> kedge.ImageSet:
    """Three classes by their brightest third, under noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 150, (n, 1, 12, 12), dtype=torch.uint8, generator=generator)
    labels = torch.arange(n) % 3
    for label in range(3):
        pixels[labels == label, :, :, 4 * label : 4 * label + 4] += 100
    return kedge.ImageSet(pixels, labels, name=name, classes=("left", "middle", "right"))


def network(kind: str, seed=0) -> kedge.Classifier:
    with seeded(seed):
        net = build("compact", width=4, classes=3, channels=1, dropout=0.3)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(5)
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", seed=seed, mean=0.5, std=0.25).eval()
    return kedge.Classifier(net, mean=0.5, std=0.25).eval()


def made(name: str, kind="plain") -> Detector:
    """A detector before it is fitted, on a network that its method can use."""
    method = DETECTORS[name]
    if issubclass(method, TrainedDetector):
        options = PREPARE.get(name, {})
        loss = method.loss(**options)
        outliers = images(32, seed=9, name="outliers") if loss.outliers_per_image else None
        net = train(method.prepare(network(kind), **options), images(), RECIPE, loss=loss, outliers=outliers)
        return method(net)
    if name == "ensemble":
        return method([network(kind), network(kind, seed=1)])
    if name == "student":
        return method(method.prepare(network(kind)))
    return method(network(kind))


def ready(name: str, kind="plain") -> Detector:
    return made(name, kind).fit(images()).calibrate(images(80, seed=1))


@pytest.fixture(scope="module")
def detectors() -> dict[tuple[str, str], Detector]:
    """One of each, made once; tests that change one take a copy."""
    return {key: ready(*key) for key in EVERY}


def test_the_methods_of_the_paper_are_all_here():
    assert {kind.__name__ for kind in DETECTORS.values()} == NAMES
    assert all(getattr(kedge, name) in DETECTORS.values() for name in NAMES)
    assert all(name == kind.name for name, kind in DETECTORS.items())


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_build_fit_calibrate_call(detectors, name, kind):
    found = detectors[name, kind](images(10, seed=2))
    assert found.logits.shape == found.probability.shape == (10, 3)
    assert found.score.shape == found.p_value.shape == found.is_ood.shape == (10,)
    assert torch.equal(found.label, found.logits.argmax(dim=1))
    torch.testing.assert_close(found.probability.sum(dim=1), torch.ones(10))
    threshold = detectors[name, kind].calibration.threshold
    assert torch.equal(found.is_ood, found.score.double() > threshold)


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_saved_detector_says_the_same(detectors, name, kind, tmp_path):
    detector = detectors[name, kind]
    detector.save(tmp_path / "a.kedge")
    again = kedge.load(tmp_path / "a.kedge")
    assert type(again) is type(detector)
    ours, theirs = detector(images(10, seed=2)), again(images(10, seed=2))
    assert torch.equal(ours.score, theirs.score)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.is_ood, theirs.is_ood)
    assert again.classes == detector.classes == ("left", "middle", "right")
    assert again.cost == detector.cost
    assert (again.outliers is None) == (detector.outliers is None)


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_score_does_not_depend_on_its_batch(detectors, name, kind):
    some = images(12, seed=2)
    detector = detectors[name, kind]
    whole = detector.score(some)
    assert torch.equal(detector.score(some), whole)
    close = {"rtol": 1e-4, "atol": 1e-4 * float(whole.abs().max())}
    torch.testing.assert_close(detector.score(some, batch_size=5), whole, **close)
    backwards = some.subset(range(11, -1, -1))
    torch.testing.assert_close(detector.score(backwards, batch_size=1).flip(0), whole, **close)


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_scoring_leaves_no_trace(detectors, name, kind):
    detector = detectors[name, kind]
    before = {key: value.clone() for key, value in detector.net.state_dict().items()}
    detector.net.train()
    random = torch.get_rng_state()
    detector.score(images(6, seed=2))
    assert torch.equal(torch.get_rng_state(), random)
    assert detector.net.training
    detector.net.eval()
    assert all(torch.equal(before[key], value) for key, value in detector.net.state_dict().items())
    assert all(parameter.grad is None for parameter in detector.net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in detector.net.modules())


@pytest.mark.parametrize("name", [name for name in DETECTORS if name != "ensemble"])
def test_a_step_that_was_skipped_is_named(name):
    net = network("anchored" if name == "amp" else "plain")
    kind = DETECTORS[name]
    if name in (*TRAINED, "student"):
        net = kind.prepare(net, **PREPARE.get(name, {}))
    detector = kind(net)
    with pytest.raises(NotReadyError, match=r"not fitted: call \w+\(net\)\.fit\(train_set\) first"):
        detector.score(images(4))
    with pytest.raises(NotReadyError, match="nothing to save"):
        detector.save("nowhere.kedge")


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_fitting_again_forgets(detectors, name, kind):
    detector = copy.deepcopy(detectors[name, kind])
    detector.fit(images(48, seed=5)).calibrate(images(80, seed=6))
    detector.fit(images())
    assert detector.calibration is None
    detector.calibrate(images(80, seed=1))
    some = images(10, seed=2)
    torch.testing.assert_close(detector.score(some), detectors[name, kind].score(some), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_images_come_in_any_form(detectors, name, kind):
    detector = copy.deepcopy(detectors[name, kind])
    whole = images()
    loader = DataLoader([(image.float() / 255, int(label)) for image, label in whole], batch_size=7)
    detector.fit(loader).calibrate(DataLoader(images(80, seed=1), batch_size=9))
    some = images(6, seed=2)
    torch.testing.assert_close(detector.score(some), detectors[name, kind].score(some), rtol=1e-3, atol=1e-3)


def test_only_those_that_learned_from_outliers_say_so(detectors):
    star = {name for (name, _), detector in detectors.items() if detector.outliers is not None}
    assert star == {"outlier_exposure", "discrepancy", "udg"}
    tuned = kedge.Mahalanobis(network("plain"), outliers=images(32, seed=9, name="outliers"))
    assert tuned.fit(images()).calibrate(images(80, seed=1)).outliers is not None


def test_a_set_that_holds_outliers_of_the_training_is_refused(detectors):
    test, other = images(20, seed=3, name="test"), images(20, seed=4, name="other")
    taken = images(32, seed=9, name="taken").subset([3, 4])
    for (name, _), detector in detectors.items():
        if detector.outliers is None:
            assert kedge.evaluate({name: detector}, test, [other, taken]).results[name].uses_outliers is False
        else:
            assert kedge.evaluate({name: detector}, test, [other]).results[name].uses_outliers is True
            with pytest.raises(InputError, match="2 of the images in 'taken' are among the training outliers"):
                kedge.evaluate({name: detector}, test, [other, taken])


def test_costs_are_counted_in_passes(detectors):
    plain = {name: detectors[name, "plain"].cost for name in PLAIN}
    assert plain["student"].forward == 1
    for name in ("msp", "max_logit", "entropy", "energy", "temperature_scaling", "mahalanobis", "gram", "knn", "vim"):
        assert (plain[name].forward, plain[name].backward) == (1, 0)
        assert (detectors[name, "anchored"].cost.forward) == 5  # an anchored network has five anchors
    assert (plain["odin"].forward, plain["odin"].backward) == (2, 1)
    assert plain["mc_dropout"].forward == plain["svi"].forward == 10
    assert plain["ensemble"].forward == 2
    assert detectors["ensemble", "anchored"].cost.forward == 10


@pytest.mark.parametrize("name", [*TRAINED, "student"])
def test_preparing_leaves_the_original(name):
    net = network("plain")
    before = {key: value.clone() for key, value in net.state_dict().items()}
    DETECTORS[name].prepare(net, **PREPARE.get(name, {}))
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["odin", "mahalanobis", "gram", "knn", "vim", "react", "deup", "ensemble"])
def test_networks_of_the_user_s_own_work_without_more_arguments(name, tmp_path):
    def mine():
        with seeded(3):
            net = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(400, 8), nn.ReLU(), nn.Linear(8, 3)
            )
        net[-1].bias.data += 5  # ViM needs logits that are positive, as those of trained networks are
        return net

    for net in (mine(), kedge.anchor(mine())):
        detector = DETECTORS[name]([net] if name == "ensemble" else net)
        detector.fit(images()).calibrate(images(80, seed=1))
        detector.save(tmp_path / "mine.kedge")
        again = kedge.load(tmp_path / "mine.kedge", model=mine())
        assert torch.equal(again.score(images(5, seed=2)), detector.score(images(5, seed=2)))


def test_what_a_network_learned_from_is_not_forgotten_by_anchoring_or_training_again():
    outliers, more = images(32, seed=9, name="outliers"), images(32, seed=10, name="more")
    loss = kedge.OutlierExposure.loss
    net = train(network("plain"), images(), RECIPE, loss=loss(), outliers=outliers)
    net = train(net, images(), RECIPE, loss=loss(), outliers=more)
    assert len(kedge.MSP(net).outliers) == 64
    net = kedge.anchor(net)
    assert net.record["data"]["name"] == "images"
    amp = kedge.AMP(net).fit(images()).calibrate(images(80, seed=1))
    test = images(20, seed=3, name="test")
    for learned in (outliers, more):
        with pytest.raises(InputError, match="among the training outliers"):
            kedge.evaluate({"AMP": amp}, test, [learned])


@pytest.mark.parametrize("name", ["outlier_exposure", "discrepancy", "udg"])
def test_methods_that_need_outliers_are_marked_however_their_network_was_trained(name):
    kind = DETECTORS[name]
    detector = kind(kind.prepare(network("plain"), **PREPARE.get(name, {})))
    detector.fit(images()).calibrate(images(80, seed=1))
    table = kedge.evaluate({name: detector}, images(20, seed=3, name="test"), [images(20, seed=4, name="other")])
    assert table.results[name].uses_outliers


def test_the_half_that_a_method_learned_from_is_no_test_set_either():
    held_out = images(80, seed=1)
    detector = kedge.TemperatureScaling(network("plain")).fit(images()).calibrate(held_out)
    for half in (held_out.subset(range(40), name="first"), held_out.subset(range(40, 80), name="second")):
        with pytest.raises(InputError, match=f"40 of the images in '{half.name}' are among the calibration images"):
            kedge.evaluate({"T": detector}, half, [images(20, seed=4, name="other")])


def test_a_detector_that_is_not_fitted_cannot_be_evaluated():
    with pytest.raises(NotReadyError, match="'AMP' is not fitted"):
        kedge.evaluate({"AMP": kedge.AMP(network("anchored"))}, images(20, name="t"), [images(20, seed=4, name="o")])
