"""Labels of one set as the classes of a detector: by name where both have names, else by number."""

import dataclasses

import pytest
import torch
from torch import nn

import kedge
from kedge.data.labels import renumbered
from kedge.errors import KedgeWarning
from kedge.seeds import seeded

KNOWN = ("bird", "cat", "dog")


def images(n, classes, names, seed=0) -> kedge.ImageSet:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return kedge.ImageSet(pixels, torch.arange(n) % classes, name=f"{'-'.join(names)} {seed}", classes=names)


@pytest.fixture
def detector() -> kedge.TemperatureScaling:
    with seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return kedge.TemperatureScaling(net).fit(images(30, 3, KNOWN))


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
        other_names = kedge.Energy(detector.net).fit(images(30, 3, KNOWN)).calibrate(held)
    assert other_names.calibration.temperature == 1.0
    unlabelled = dataclasses.replace(held, labels=None, classes=())
    other = kedge.Energy(detector.net).fit(images(30, 3, KNOWN)).calibrate(unlabelled)
    assert torch.equal(other_names.calibration.scores, other.calibration.scores)


def test_accuracy_is_that_of_the_classes_by_name(detector):
    energy = kedge.Energy(detector.net).fit(images(30, 3, KNOWN)).calibrate(images(60, 3, KNOWN, seed=2))
    test, ood = images(50, 2, ("dog", "cat"), seed=3), images(20, 1, (), seed=4)
    label = energy(test).label
    expected = (label == torch.where(test.labels == 0, 2, 1)).double().mean()
    assert kedge.evaluate({"e": energy}, test, [ood]).results["e"].accuracy == pytest.approx(float(expected))
    half = dataclasses.replace(test, classes=("dog", "yeti"), name="half")
    known = test.labels == 0
    expected = (label[known] == 2).double().mean()
    assert kedge.evaluate({"e": energy}, half, [ood]).results["e"].accuracy == pytest.approx(float(expected))
    strange = dataclasses.replace(test, classes=("unicorn", "yeti"), name="strange")
    assert kedge.evaluate({"e": energy}, strange, [ood]).results["e"].accuracy is None


def test_what_is_read_from_elsewhere_is_read_at_the_size_of_each_detector():
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (4, 60, 3, 24, 24), dtype=torch.uint8, generator=generator)

    class Stream(list):
        """A data set that is no ImageSet."""

    def stream(number) -> Stream:
        data = Stream(zip(pictures[number], [0] * 60, strict=True))
        data.name = f"stream {number}"
        return data

    def fitted(side) -> kedge.Energy:
        with seeded(side):
            net = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 3))
        shape = kedge.Preprocess((3, side, side))
        return kedge.Energy(net).fit(pictures[0], preprocess=shape).calibrate(pictures[1])

    small, large = fitted(6), fitted(24)
    for order in (("small", "large"), ("large", "small")):
        both = {name: {"small": small, "large": large}[name] for name in order}
        evaluation = kedge.evaluate(both, stream(2), [stream(3)])
        for name, detector in both.items():
            assert torch.equal(evaluation.results[name].detections["stream 2"].score, detector.score(pictures[2]))
        with pytest.raises(kedge.errors.InputError, match="among the calibration images"):
            kedge.evaluate(both, stream(1), [stream(3)])
