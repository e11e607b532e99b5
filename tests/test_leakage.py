"""Images that a detector was made with are refused in what it is tested on."""

import pytest
import torch

import kedge
from helpers import images
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import training_images
from kedge.errors import InputError
from kedge.models import build
from kedge.training import Recipe, train


def noise(n, seed, name):
    return kedge.ImageSet(images(n, 1, seed=seed), torch.arange(n) % 2, name)


TRAIN, HELD_OUT, TEST, OOD = (noise(40, seed, name) for seed, name in enumerate(("train", "held", "test", "ood")))
RECIPE = Recipe(epochs=1, batch=20, crop=0, flip=False)


@pytest.fixture(scope="module")
def detector():
    net = kedge.anchor(build("compact", width=4, classes=2, channels=1))
    return kedge.AMP(train(net, TRAIN, RECIPE)).fit(TRAIN).calibrate(HELD_OUT)


def joined(a, b, name):
    return kedge.ImageSet(torch.cat([a.images, b.images]), name=name)


def test_a_calibration_image_in_a_set_is_refused_and_named(detector, tmp_path):
    detector.save(tmp_path / "a.kedge")
    for sets in (
        (joined(TEST, HELD_OUT.subset([3]), "leaky"), [OOD]),
        (TEST, [joined(OOD, HELD_OUT.subset([3]), "leaky")]),
    ):
        for each in (detector, kedge.load(tmp_path / "a.kedge")):
            with pytest.raises(
                InputError, match=r"1 of the images in 'leaky' are among the calibration images .*er 40"
            ):
                kedge.evaluate({"amp": each}, *sets)


def test_anchors_and_training_images_are_refused(detector):
    anchor = (detector.net.anchors[:1] * 255).round().to(torch.uint8)
    with pytest.raises(InputError, match="among the anchors"):
        kedge.evaluate({"amp": detector}, joined(TEST, kedge.ImageSet(anchor), "leaky"), [OOD])
    with pytest.raises(InputError, match="is the training set of the network"):
        kedge.evaluate({"amp": detector}, TRAIN, [OOD])


def test_what_the_network_was_trained_on_before_is_no_test_set_either(tmp_path):
    net = train(build("compact", width=4, classes=2, channels=1), TRAIN, RECIPE)
    net = train(kedge.anchor(net), noise(40, 9, "more"), RECIPE)
    net = train(net, noise(40, 10, "still more"), RECIPE)
    kedge.AMP(net).fit(TRAIN).calibrate(HELD_OUT).save(tmp_path / "a.kedge")
    with pytest.raises(InputError, match="is the training set of the network"):
        kedge.evaluate({"amp": kedge.load(tmp_path / "a.kedge")}, TRAIN, [OOD])


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(training_images, "SHARED", 0.005)


def one_pass(train_set):
    return torch.utils.data.DataLoader(train_set, batch_size=7)


@pytest.mark.parametrize("method", [kedge.MSP, kedge.KNN, kedge.TemperatureScaling, kedge.Mahalanobis])
@pytest.mark.parametrize("source", [lambda data: data, list, one_pass])
def test_calibrating_on_training_images_is_refused(method, source, checked, tmp_path):
    detector = method(build("compact", width=4, classes=2, channels=1)).fit(source(TRAIN))
    detector.save(tmp_path / "a.kedge")
    floats = kedge.ImageSet(torch.cat([TRAIN.images[:5], HELD_OUT.images]), torch.arange(45) % 2)
    pairs = [(image / 255, int(label)) for image, label in TRAIN]
    for each in (detector, kedge.load(tmp_path / "a.kedge")):
        for held_out in (TRAIN, pairs, floats):
            with pytest.raises(InputError, match=r"fitted on; at least .* hold images out before fit"):
                each.calibrate(held_out)
            assert each.calibration is None
        assert each.calibrate(HELD_OUT).calibration is not None


def test_a_few_duplicates_among_many_images_are_no_leak_and_only_a_sample_is_kept(checked, monkeypatch):
    large = noise(400, 5, "large")
    duplicates = kedge.ImageSet(torch.cat([large.images, TRAIN.images[:2]]))
    net = build("compact", width=4, classes=2, channels=1)
    assert kedge.KNN(net).fit(duplicates).calibrate(noise(400, 6, "held")).calibration is not None
    assert kedge.KNN(net).fit(large).calibrate(kedge.ImageSet(torch.cat([noise(400, 6, "").images, large.images[:2]])))
    monkeypatch.setattr(training_images, "KEPT", 50)
    detector = kedge.KNN(net).fit(large)
    assert len(detector.fitted_on) == 50
    with pytest.raises(InputError, match="fitted on"):
        detector.calibrate(large.subset(range(100)))


def test_calibrating_on_the_training_set_of_the_network_is_refused(detector):
    for method in (kedge.MSP, kedge.AMP):
        with pytest.raises(InputError, match="held_out is the training set of the network"):
            method(detector.net).fit(OOD).calibrate(TRAIN)


def test_an_iterator_is_read_once(checked):
    net = build("compact", width=4, classes=2, channels=1)
    detector = kedge.MSP(net).fit(iter(TRAIN.images), preprocess=kedge.Preprocess((1, 8, 8)))
    assert len(detector.fitted_on) == 0
    assert detector.calibrate(TRAIN.images).calibration is not None


def test_fingerprints_tell_apart_what_differs_in_one_pixel():
    a = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    b = a.clone()
    b[0, 2, 3, 3] = 1
    assert not torch.equal(fingerprints(a), fingerprints(b))
    assert torch.equal(fingerprints(b), fingerprints(b / 255))
    assert torch.equal(fingerprints(b), fingerprints((b / 255).double()))


def test_shared_finds_every_position():
    prints = fingerprints(TEST.images)
    mixed = torch.cat([prints[5:7], fingerprints(OOD.images[:2]), prints[5:6]])
    assert shared(prints, mixed).tolist() == [0, 1, 4]
    assert shared(prints[:0], mixed).tolist() == []


def test_a_calibration_image_is_found_in_a_set_of_another_size():
    held_out = kedge.ImageSet(images(30, 1, 16, seed=9), name="held out")
    detector = kedge.MSP(build("compact", width=4, classes=2, channels=1)).fit(TRAIN).calibrate(held_out)
    with pytest.raises(InputError, match="30 of the images in 'held out' are among the calibration images"):
        kedge.evaluate({"msp": detector}, held_out, [OOD])


def test_data_sets_and_loaders_are_evaluated_as_image_sets_are(detector):
    pairs = [(image, int(label)) for image, label in zip(TEST.images, TEST.labels, strict=True)]
    loader = torch.utils.data.DataLoader(OOD, batch_size=7)
    as_sets = kedge.evaluate({"amp": detector}, TEST, [OOD])
    as_others = kedge.evaluate({"amp": detector}, pairs, [loader])
    assert as_others.ood_names == ("ood",)
    assert as_others.id_name == "list"
    assert as_others.results["amp"].metrics == as_sets.results["amp"].metrics
    assert as_others.results["amp"].accuracy == as_sets.results["amp"].accuracy
