"""Temperature scaling: one temperature, fitted to the labels of half of the held-out images."""

import math
import re
import warnings

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
from kedge.errors import InputError, KedgeWarning, NotReadyError


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


def calibrated(kind="unanchored", data=None, **options) -> TemperatureScaling:
    net = network(kind)
    return TemperatureScaling(net).fit(images(120)).calibrate(held_out(net) if data is None else data, **options)


# The temperature.


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_it_makes_the_labels_of_half_of_the_images_most_likely(kind):
    net = network(kind)
    data = held_out(net)
    half, other = halves(data.images)
    detector = TemperatureScaling(net).fit(images(120)).calibrate(data)
    expected = best_temperature(logits_of(net, data.images[half]), data.labels[half])
    assert detector.temperature == pytest.approx(expected, rel=1e-5)
    for rest in (other, half | other):  # which would have given another
        wrong = best_temperature(logits_of(net, data.images[rest]), data.labels[rest])
        assert abs(wrong - expected) > 1e-4 * expected
    assert 1 < detector.temperature < 4  # the labels were drawn at T = 2


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_the_score_is_msp_of_the_logits_over_the_temperature(kind):
    detector = calibrated(kind)
    x = images(9, seed=2)
    logits = logits_of(detector.net, x)
    expected = -softmax(logits / detector.temperature, axis=1).max(axis=1)
    detection = detector(x)
    assert detection.score.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert detection.logits.numpy() == pytest.approx(logits, abs=1e-4)
    assert detection.label.tolist() == logits.argmax(axis=1).tolist()


def test_only_images_with_a_label_count_for_it():
    net = network()
    data = held_out(net)
    half, other = halves(data.images)
    labels = data.labels.clone()
    labels[::3] = -1
    known = half & (labels >= 0)
    detector = TemperatureScaling(net).fit(images(120)).calibrate(kedge.ImageSet(data.images, labels))
    expected = best_temperature(logits_of(net, data.images[known]), labels[known])
    assert detector.temperature == pytest.approx(expected, rel=1e-4)
    assert len(detector.calibration.scores) == int(other.sum())  # for the threshold all of them count


# The halves.


def test_the_threshold_is_set_on_the_other_half():
    net = network()
    data = held_out(net)
    half, other = halves(data.images)
    detector = TemperatureScaling(net).fit(images(120)).calibrate(data)
    assert len(detector.calibration.scores) == int(other.sum())
    assert 40 <= int(other.sum()) <= 80
    assert detector.calibration.scores.allclose(detector.score(data.images[other]).double().sort().values, atol=1e-6)
    both = torch.cat([fingerprints(data.images[half]), fingerprints(data.images[other])])
    assert detector.calibration.fingerprints.equal(both)  # a test set must hold neither


def test_the_halves_do_not_depend_on_the_order():
    net = network(dtype=torch.float64)
    data = held_out(net)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    first = TemperatureScaling(net).fit(images(120)).calibrate(data)
    shuffled = kedge.ImageSet(data.images[order], data.labels[order])
    second = TemperatureScaling(net).fit(images(120)).calibrate(shuffled, batch_size=7)
    assert second.temperature == pytest.approx(first.temperature, rel=1e-9)
    assert second.calibration.scores.allclose(first.calibration.scores, rtol=0, atol=1e-9)


def test_equal_images_come_into_one_half():
    net = network()
    data = held_out(net)
    _, other = halves(data.images)
    twice = kedge.ImageSet(torch.cat([data.images, data.images]), torch.cat([data.labels, data.labels]))
    detector = TemperatureScaling(net).fit(images(120)).calibrate(twice)
    assert detector.temperature == pytest.approx(calibrated().temperature, rel=1e-6)
    assert len(detector.calibration.scores) == 2 * int(other.sum())


def test_one_image_cannot_be_halved():
    with pytest.raises(InputError, match="halves"):
        calibrated(data=kedge.ImageSet(images(1), torch.tensor([0])))


def test_the_warning_about_too_few_images_counts_them_before_they_are_halved():
    """At alpha = 5 % the threshold takes 19 images; one half of 38 has so many in every second case only."""
    net = network()
    with pytest.warns(KedgeWarning, match=r"calibrate with at least \d+ held-out images, about half") as warned:
        TemperatureScaling(net).fit(images(40)).calibrate(held_out(net, 30))
    needed = int(re.search(r"at least (\d+)", str(warned[0].message)).group(1))
    assert 2 * 19 < needed < 3 * 19
    enough = 0
    for seed in range(100):
        enough += int(halves(images(needed, seed=seed))[1].sum()) >= 19
    assert enough >= 97
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TemperatureScaling(net).fit(images(40)).calibrate(held_out(net, needed))


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


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_a_temperature_is_a_positive_number(temperature):
    with pytest.raises(InputError, match=r"temperature must lie in \(0, inf\)"):
        TemperatureScaling(network(), temperature=temperature)


def test_without_labels_there_is_nothing_to_fit_to():
    for unlabelled in (images(120), kedge.ImageSet(images(120), torch.full((120,), -1))):
        with pytest.raises(InputError, match="held_out must have labels"):
            calibrated(data=unlabelled)


def test_there_is_no_score_before_calibration_nor_after_fitting_again(tmp_path):
    for detector in (TemperatureScaling(network()).fit(images(120)), calibrated().fit(images(120))):
        detector.save(tmp_path / "early.kedge")
        for each in (detector, kedge.load(tmp_path / "early.kedge")):
            assert each.state() == {}
            with pytest.raises(NotReadyError, match=r"no temperature yet: call calibrate\(held_out\)"):
                each.score(images(9))


def test_calibrating_again_fits_again_and_a_failure_leaves_no_old_threshold_on_new_scores(monkeypatch):
    net = network()
    detector = TemperatureScaling(net).fit(images(120)).calibrate(held_out(net))
    first = detector.temperature
    with pytest.raises(InputError, match="batch_size"):
        detector.calibrate(held_out(net, seed=4), batch_size=0)  # nothing has been learned yet
    assert (detector.temperature, detector.calibration is None) == (first, False)
    fresh = TemperatureScaling(net).fit(images(120)).calibrate(held_out(net, seed=4))
    assert detector.calibrate(held_out(net, seed=4)).temperature == fresh.temperature != first
    monkeypatch.setattr(detector, "_run", lambda *args: iter([1 / 0]))
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
