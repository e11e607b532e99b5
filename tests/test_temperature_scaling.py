"""Temperature scaling: one temperature, fitted to the labels of half of the held-out images."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import nn

import kedge
from kedge.data.leakage import fingerprints
from kedge.detectors import TemperatureScaling
from kedge.errors import InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded


def images(n=120, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator)


def network(kind="plain", *, dtype=torch.float32) -> kedge.Classifier:
    """A compact network whose weights and batch statistics are drawn large enough for scores to vary."""
    with seeded(0):
        net = build("compact", width=4, classes=4, channels=3)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(200)
    net = net.to(dtype).eval()
    if kind == "anchored":
        net = kedge.anchor(net, init="fresh", mean=[0.5] * 3, std=[0.25] * 3)
        net.set_anchors(images(3, seed=9))
        return net
    return kedge.Classifier(net, mean=[0.5] * 3, std=[0.25] * 3)


def logits_of(net: kedge.Classifier, x: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return net.eval()(x).double().numpy()


def held_out(net: kedge.Classifier, n=120, seed=1) -> kedge.ImageSet:
    """Labels that the network is right about as often as its softmax at T = 2 says."""
    x = images(n, seed)
    probabilities = softmax(logits_of(net, x) / 2, axis=1)
    rng = np.random.default_rng(seed)
    return kedge.ImageSet(x, torch.tensor([rng.choice(4, p=row) for row in probabilities]))


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which images the temperature is fitted on, and which the threshold is set on."""
    mine = fingerprints(x)[:, 0] % 2 == 0
    return mine, ~mine


def best_temperature(logits: np.ndarray, labels: torch.Tensor) -> float:
    """The minimum of the negative log-likelihood by scipy, over the logarithm of T."""

    def loss(log_t: float) -> float:
        return -log_softmax(logits / math.exp(log_t), axis=1)[np.arange(len(labels)), labels.numpy()].mean()

    return math.exp(minimize_scalar(loss, bounds=(math.log(1e-3), math.log(1e3)), options={"xatol": 1e-10}).x)


def calibrated(kind="plain", data=None, **options) -> TemperatureScaling:
    net = network(kind)
    return TemperatureScaling(net).fit(images()).calibrate(held_out(net) if data is None else data, **options)


# The temperature.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_it_makes_the_labels_of_half_of_the_images_most_likely(kind):
    net = network(kind)
    data = held_out(net)
    mine, other = halves(data.images)
    detector = TemperatureScaling(net).fit(images()).calibrate(data)
    expected = best_temperature(logits_of(net, data.images[mine]), data.labels[mine])
    assert detector.temperature == pytest.approx(expected, rel=1e-5)
    for rest in (other, mine | other):  # which would have given another
        wrong = best_temperature(logits_of(net, data.images[rest]), data.labels[rest])
        assert abs(wrong - expected) > 1e-4 * expected
    assert 1 < detector.temperature < 4  # the labels were drawn at T = 2


def test_more_images_than_a_batch():
    net = network()
    data = held_out(net, 700)
    mine, _ = halves(data.images)
    assert int(mine.sum()) > 256
    detector = TemperatureScaling(net).fit(images()).calibrate(data)
    expected = best_temperature(logits_of(net, data.images[mine]), data.labels[mine])
    assert detector.temperature == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_the_score_is_msp_of_the_logits_over_the_temperature(kind):
    detector = calibrated(kind)
    x = images(9, seed=2)
    logits = logits_of(detector.net, x)
    expected = -softmax(logits / detector.temperature, axis=1).max(axis=1)
    found = detector(x)
    assert found.score.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert found.logits.numpy() == pytest.approx(logits, abs=1e-4)
    assert found.label.tolist() == logits.argmax(axis=1).tolist()


def test_only_images_with_a_label_count_for_it():
    net = network()
    data = held_out(net)
    mine, other = halves(data.images)
    labels = data.labels.clone()
    labels[::3] = -1
    known = mine & (labels >= 0)
    detector = TemperatureScaling(net).fit(images()).calibrate(kedge.ImageSet(data.images, labels))
    expected = best_temperature(logits_of(net, data.images[known]), labels[known])
    assert detector.temperature == pytest.approx(expected, rel=1e-4)
    assert len(detector.calibration.scores) == int(other.sum())  # for the threshold all of them count


# The halves.


def test_the_threshold_is_set_on_the_other_half():
    net = network()
    data = held_out(net)
    learned, other = halves(data.images)
    detector = TemperatureScaling(net).fit(images()).calibrate(data)
    assert len(detector.calibration.scores) == int(other.sum())
    assert 40 <= int(other.sum()) <= 80
    assert detector.calibration.scores.allclose(detector.score(data.images[other]).double().sort().values, atol=1e-6)
    both = torch.cat([fingerprints(data.images[learned]), fingerprints(data.images[other])])
    assert detector.calibration.fingerprints.equal(both)  # a test set must hold neither


def test_the_halves_do_not_depend_on_the_order():
    net = network(dtype=torch.float64)
    data = held_out(net)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    first = TemperatureScaling(net).fit(images()).calibrate(data)
    shuffled = kedge.ImageSet(data.images[order], data.labels[order])
    second = TemperatureScaling(net).fit(images()).calibrate(shuffled, batch_size=7)
    assert second.temperature == pytest.approx(first.temperature, rel=1e-9)
    assert second.calibration.scores.allclose(first.calibration.scores, rtol=0, atol=1e-9)


def test_nor_on_how_the_pixels_are_stored():
    net = network()
    data = held_out(net)
    floats = [(x / 255, int(y)) for x, y in zip(data.images, data.labels, strict=True)]
    found = TemperatureScaling(net).fit(images()).calibrate(floats)
    assert found.temperature == pytest.approx(calibrated().temperature, rel=1e-5)


def test_equal_images_come_into_one_half():
    net = network()
    data = held_out(net)
    _, other = halves(data.images)
    twice = kedge.ImageSet(torch.cat([data.images, data.images]), torch.cat([data.labels, data.labels]))
    detector = TemperatureScaling(net).fit(images()).calibrate(twice)
    assert detector.temperature == pytest.approx(calibrated().temperature, rel=1e-6)
    assert len(detector.calibration.scores) == 2 * int(other.sum())


def test_one_image_cannot_be_halved():
    with pytest.raises(InputError, match=r"images enough for two halves, since TemperatureScaling learns.*; got 1"):
        calibrated(data=kedge.ImageSet(images(1), torch.tensor([0])))


# A temperature that is given.


def test_a_given_temperature_is_not_fitted():
    net = network()
    data = held_out(net)
    detector = TemperatureScaling(net, temperature=3.0).fit(images())
    expected = -softmax(logits_of(net, images(9)) / 3, axis=1).max(axis=1)
    assert detector.score(images(9)).tolist() == pytest.approx(expected.tolist(), abs=1e-5)  # before any calibration
    for source in (data, data.images):  # with labels or without
        detector.calibrate(source)
        assert detector.temperature == 3.0
        assert len(detector.calibration.scores) == 120  # the threshold may have all images
    assert detector.config() == {"temperature": 3.0}


def test_at_temperature_one_it_is_msp():
    net = network()
    one, msp = TemperatureScaling(net, temperature=1.0).fit(images()), kedge.MSP(net).fit(images())
    assert one.score(images(9)).equal(msp.score(images(9)))


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_a_temperature_is_a_positive_number(temperature):
    with pytest.raises(InputError, match=r"temperature must lie in \(0, inf\)"):
        TemperatureScaling(network(), temperature=temperature)


# What is missing.


def test_without_labels_there_is_nothing_to_fit_to():
    for unlabelled in (images(), kedge.ImageSet(images(), torch.full((120,), -1))):
        with pytest.raises(InputError, match=r"held_out must have labels, since TemperatureScaling fits"):
            calibrated(data=unlabelled)


def test_before_calibration_there_is_no_score():
    detector = TemperatureScaling(network())
    with pytest.raises(NotReadyError, match=r"not fitted: call TemperatureScaling\(net\)\.fit\(train_set\) first"):
        detector.score(images())
    detector.fit(images())
    with pytest.raises(NotReadyError, match=r"no temperature yet: call calibrate\(held_out\) with labelled images, or"):
        detector.score(images())
    assert detector.state() == {}


def test_fitting_again_forgets_the_temperature():
    detector = calibrated().fit(images())
    assert detector.tau is None
    assert detector.calibration is None
    with pytest.raises(NotReadyError, match="no temperature yet"):
        detector.score(images())
    kept = TemperatureScaling(network(), temperature=3.0).fit(images()).fit(images())
    assert kept.temperature == 3.0


def test_calibrating_again_fits_again():
    net = network()
    detector = TemperatureScaling(net).fit(images()).calibrate(held_out(net))
    first = detector.temperature
    detector.calibrate(held_out(net, seed=4))
    fresh = TemperatureScaling(net).fit(images()).calibrate(held_out(net, seed=4))
    assert detector.temperature == fresh.temperature != first


def test_a_calibration_that_fails_leaves_no_old_threshold_on_new_scores(monkeypatch):
    net = network()
    detector = TemperatureScaling(net).fit(images()).calibrate(held_out(net))
    first = detector.temperature
    with pytest.raises(InputError, match="batch_size"):
        detector.calibrate(held_out(net, seed=4), batch_size=0)  # nothing has been learned yet
    assert (detector.temperature, detector.calibration is None) == (first, False)
    monkeypatch.setattr(detector, "_run", lambda *args: iter([1 / 0]))
    with pytest.raises(ZeroDivisionError):
        detector.calibrate(held_out(net, seed=4))
    assert (detector.temperature != first, detector.calibration) == (True, None)


# As every detector.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_saved_and_loaded_it_scores_the_same(kind, tmp_path):
    detector = calibrated(kind)
    detector.save(tmp_path / "saved.kedge")
    again = kedge.load(tmp_path / "saved.kedge")
    assert again.temperature == detector.temperature
    assert again.learns_held_out
    assert again(images(9, seed=2)).score.equal(detector(images(9, seed=2)).score)
    given = TemperatureScaling(network(kind), temperature=3.0).fit(images())
    given.save(tmp_path / "given.kedge")
    again = kedge.load(tmp_path / "given.kedge")
    assert not again.learns_held_out
    assert again.score(images(9)).equal(given.score(images(9)))


def test_saved_before_calibration_it_still_has_no_temperature(tmp_path):
    TemperatureScaling(network()).fit(images()).save(tmp_path / "early.kedge")
    again = kedge.load(tmp_path / "early.kedge")
    with pytest.raises(NotReadyError, match="no temperature yet"):
        again.score(images())
    assert again.calibrate(held_out(network())).temperature == pytest.approx(calibrated().temperature, rel=1e-6)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_batch_size_or_order(kind, dtype, tolerance):
    x = images(30, seed=5)
    net = network(kind, dtype=dtype)
    detector = TemperatureScaling(net).fit(images()).calibrate(held_out(net))
    whole = detector.score(x)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    for size in (1, 7):
        assert detector.score(x, batch_size=size).allclose(whole, rtol=tolerance, atol=0)
        assert detector.score(x[order], batch_size=size).allclose(whole[order], rtol=tolerance, atol=0)


def test_a_network_in_training_mode_is_read_in_evaluation_mode():
    net = network()
    data = held_out(net)
    expected = TemperatureScaling(net).fit(images()).calibrate(data).temperature
    net.train()
    assert TemperatureScaling(net).fit(images()).calibrate(data).temperature == expected
    assert net.training


def test_where_no_label_is_wrong_the_temperature_stays_one():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2, bias=False)).double()
    net[1].weight.data = torch.tensor([[1.0] * 12, [0.0] * 12]).double()
    right = [(torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(i)).double(), 0) for i in range(60)]
    detector = TemperatureScaling(net).fit(right).calibrate(right)
    assert detector.temperature == 1.0
    assert len(detector.score(right).unique()) > 1
