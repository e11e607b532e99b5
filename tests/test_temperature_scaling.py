"""Temperature scaling: one temperature, fitted to the labels of half of the held-out images."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import nn

import helpers
import kedge
from helpers import images
from kedge.data.leakage import fingerprints
from kedge.detectors import TemperatureScaling
from kedge.errors import InputError


def network(kind="unanchored", **options) -> kedge.Classifier:
    net = helpers.network(kind, **options)
    net.network.fc.weight.data.mul_(10)
    if kind == "anchored":
        net.set_anchors(images(3, seed=9))
    return net


def logits_of(net: kedge.Classifier, x: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return net.eval()(x).double().numpy()


def held_out(net: kedge.Classifier, n=120, seed=1) -> kedge.ImageSet:
    """Labels that the network is right about as often as its softmax at T = 2 says."""
    x = images(n, seed=seed)
    probabilities = softmax(logits_of(net, x) / 2, axis=1)
    rng = np.random.default_rng(seed)
    return kedge.ImageSet(x, torch.tensor([rng.choice(4, p=row) for row in probabilities]))


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which images the temperature is fitted on, and which the threshold is set on."""
    first = fingerprints(x)[:, 0] % 2 == 0
    return first, ~first


def best_temperature(logits: np.ndarray, labels: torch.Tensor) -> float:
    """The minimum of the negative log-likelihood by scipy, over the logarithm of T."""

    def loss(log_t: float) -> float:
        return -log_softmax(logits / math.exp(log_t), axis=1)[np.arange(len(labels)), labels.numpy()].mean()

    return math.exp(minimize_scalar(loss, bounds=(math.log(1e-3), math.log(1e3)), options={"xatol": 1e-10}).x)


def calibrated(net: kedge.Classifier, data=None, **options) -> TemperatureScaling:
    return TemperatureScaling(net).fit(images(120)).calibrate(held_out(net) if data is None else data, **options)


# The temperature.


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_it_makes_the_labels_of_half_of_the_images_most_likely(kind):
    net = network(kind)
    data = held_out(net)
    half, other = halves(data.images)
    detector = calibrated(net, data)
    expected, *wrong = (
        best_temperature(logits_of(net, data.images[part]), data.labels[part]) for part in (half, other, half | other)
    )
    assert detector.temperature == pytest.approx(expected, rel=1e-5)
    assert all(abs(each - expected) > 1e-4 * expected for each in wrong)
    assert 1 < detector.temperature < 4  # the labels were drawn at T = 2


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_the_score_is_msp_of_the_logits_over_the_temperature(kind):
    detector, x = calibrated(network(kind)), images(9, seed=2)
    logits = logits_of(detector.net, x)
    expected = -softmax(logits / detector.temperature, axis=1).max(axis=1)
    detection = detector(x)
    assert detection.score.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert detection.logits.numpy() == pytest.approx(logits, abs=1e-4)


# The halves.


def test_the_threshold_is_set_on_the_other_half():
    net = network()
    data = held_out(net)
    half, other = halves(data.images)
    detector = calibrated(net, data)
    assert 40 <= int(other.sum()) <= 80
    assert detector.calibration.scores.allclose(detector.score(data.images[other]).double().sort().values, atol=1e-6)
    both = torch.cat([fingerprints(data.images[half]), fingerprints(data.images[other])])
    assert detector.calibration.fingerprints.equal(both)  # a test set must hold neither


def test_the_halves_do_not_depend_on_the_order_and_equal_images_come_into_one():
    net = network(dtype=torch.float64)
    data = held_out(net)
    first = calibrated(net, data)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    second = calibrated(net, kedge.ImageSet(data.images[order], data.labels[order]), batch_size=7)
    assert second.temperature == pytest.approx(first.temperature, rel=1e-9)
    assert second.calibration.scores.allclose(first.calibration.scores, rtol=0, atol=1e-9)
    twice = calibrated(net, kedge.ImageSet(data.images.repeat(2, 1, 1, 1), data.labels.repeat(2)))
    assert twice.temperature == pytest.approx(first.temperature, rel=1e-6)
    assert len(twice.calibration.scores) == 2 * len(first.calibration.scores)


# A given temperature, and a missing one.


def test_a_given_temperature_is_not_fitted():
    net = network()
    detector = TemperatureScaling(net, temperature=3.0).fit(images(120))
    expected = -softmax(logits_of(net, images(9)) / 3, axis=1).max(axis=1)
    assert detector.score(images(9)).tolist() == pytest.approx(expected.tolist(), abs=1e-5)  # before any calibration
    for source in (held_out(net), images(120)):  # with labels or without
        detector.calibrate(source)
        assert detector.temperature == 3.0
        assert len(detector.calibration.scores) == 120  # the threshold may have all images
    assert detector.fit(images(120)).temperature == 3.0
    one = TemperatureScaling(net, temperature=1.0).fit(images(120))
    assert one.score(images(9)).equal(kedge.MSP(net).fit(images(120)).score(images(9)))


def test_without_labels_or_halves_there_is_nothing_to_fit_to():
    for unlabelled in (images(120), kedge.ImageSet(images(120), torch.full((120,), -1))):
        with pytest.raises(InputError, match="held_out must have labels"):
            calibrated(network(), unlabelled)
    with pytest.raises(InputError, match="halves"):
        calibrated(network(), kedge.ImageSet(images(1), torch.tensor([0])))


def test_calibrating_again_fits_again_and_a_failure_leaves_no_old_threshold_on_new_scores(monkeypatch):
    net = network()
    detector, more = calibrated(net), held_out(net, seed=4)
    first = detector.temperature
    with pytest.raises(InputError, match="batch_size"):
        detector.calibrate(more, batch_size=0)  # nothing has been learned yet
    assert (detector.temperature, detector.calibration is None) == (first, False)
    assert detector.calibrate(more).temperature == calibrated(net, more).temperature != first
    monkeypatch.setattr(detector, "outputs", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        detector.calibrate(held_out(net))
    assert (detector.temperature, detector.calibration) == (first, None)


def test_where_no_label_is_wrong_the_temperature_stays_one():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2, bias=False)).double()
    net[1].weight.data = torch.tensor([[1.0] * 12, [0.0] * 12]).double()
    right = [(torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(i)).double(), 0) for i in range(60)]
    detector = TemperatureScaling(net).fit(right).calibrate(right)
    assert detector.temperature == 1.0
    assert len(detector.score(right).unique()) > 1
