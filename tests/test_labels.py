"""Labels of one set as the classes of a detector: by name where both have names, else by number."""

import dataclasses

import pytest
import torch

import helpers
import kedge
from kedge.data.labels import renumbered
from kedge.errors import InputError, KedgeWarning

KNOWN = ("bird", "cat", "dog")


def images(n, classes, names, seed=0) -> kedge.ImageSet:
    pixels = helpers.images(n, 1, 4, seed)
    return kedge.ImageSet(pixels, torch.arange(n) % classes, name=f"{'-'.join(names)} {seed}", classes=names)


def energy(detector) -> kedge.Energy:
    return kedge.Energy(detector.net).fit(images(30, 3, KNOWN))


@pytest.fixture
def detector() -> kedge.TemperatureScaling:
    return kedge.TemperatureScaling(helpers.flat(16, 3)).fit(images(30, 3, KNOWN))


def test_numbers_follow_names():
    labels = torch.tensor([0, 1, 1, -1, 7])
    assert renumbered(labels, ("dog", "cat"), KNOWN).tolist() == [2, 1, 1, -1, -1]
    assert renumbered(labels, ("dog", "yeti"), KNOWN).tolist() == [2, -1, -1, -1, -1]
    for names, known in (((), KNOWN), (("dog", "cat"), ()), (KNOWN, KNOWN)):
        assert renumbered(labels, names, known) is labels


@pytest.mark.parametrize("kind", [kedge.TemperatureScaling, kedge.Energy])  # learns from half of them; from none
def test_a_folder_of_two_classes_calibrates_as_those_classes(detector, kind):
    held = images(80, 2, ("cat", "dog"), seed=1)  # 0 and 1 there, 1 and 2 to the detector
    moved = dataclasses.replace(held, labels=held.labels + 1, classes=KNOWN)
    calibrations = [kind(detector.net).fit(images(30, 3, KNOWN)).calibrate(each).calibration for each in (held, moved)]
    assert calibrations[0].temperature == calibrations[1].temperature
    assert torch.equal(calibrations[0].scores, calibrations[1].scores)


def test_labels_of_classes_that_the_detector_does_not_have_are_not_used_with_a_warning(detector):
    held = images(80, 2, ("yeti", "unicorn"), seed=1)
    with pytest.warns(KedgeWarning, match="yeti, unicorn.*bird, cat, dog"):
        other_names = energy(detector).calibrate(held).calibration
    assert other_names.temperature == 1.0
    unlabelled = energy(detector).calibrate(held.images).calibration
    assert torch.equal(other_names.scores, unlabelled.scores)


def test_accuracy_is_that_of_the_classes_by_name(detector):
    calibrated = energy(detector).calibrate(images(60, 3, KNOWN, seed=2))
    test, ood = images(50, 2, ("dog", "cat"), seed=3), images(20, 1, (), seed=4)
    label = calibrated(test).label

    def accuracy(*names):
        renamed = dataclasses.replace(test, classes=names, name="-".join(names))
        return kedge.evaluate({"e": calibrated}, renamed, [ood]).results["e"].accuracy

    expected = (label == torch.where(test.labels == 0, 2, 1)).double().mean()
    assert accuracy("dog", "cat") == pytest.approx(float(expected))
    with pytest.raises(InputError, match=r"id_test must show the classes of 'e', .* has yeti"):
        accuracy("dog", "yeti")


class Stream(list):
    """A data set that is no ImageSet."""


def test_a_data_set_is_read_at_the_size_of_each_detector():
    pictures = helpers.images(4 * 60, side=24).view(4, 60, 3, 24, 24)

    def stream(number) -> Stream:
        data = Stream(zip(pictures[number], [0] * 60, strict=True))
        data.name = f"stream {number}"
        return data

    def fitted(side) -> kedge.Energy:
        net, shape = helpers.flat(3 * side * side, 3), kedge.Preprocess((3, side, side))
        return kedge.Energy(net).fit(pictures[0], preprocess=shape).calibrate(pictures[1])

    detectors = {"small": fitted(6), "large": fitted(24)}
    for order in (("small", "large"), ("large", "small")):
        both = {name: detectors[name] for name in order}
        evaluation = kedge.evaluate(both, stream(2), [stream(3)])
        for name, detector in both.items():
            assert torch.equal(evaluation.results[name].detections["stream 2"].score, detector.score(pictures[2]))
        with pytest.raises(InputError, match="among the calibration images"):
            kedge.evaluate(both, stream(1), [stream(3)])
