"""Evaluation: every number in the table is the one that the metrics and the detector give when called directly."""

import json

import pytest
import torch
from torch import nn

import kedge
from kedge import metrics
from kedge.detectors import Detector, Outputs
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import evaluate
from kedge.metrics import DETECTION_METRICS as METRICS

DIRECT = {name: getattr(metrics, name) for name in METRICS}


class Brightness(Detector):
    """The brighter, the further out; classes by which of three channels is largest."""

    name = "brightness"

    def __init__(self, sign=1.0):
        super().__init__(nn.Flatten())
        self.sign = sign

    def outputs(self, x):
        return Outputs(10 * x.mean(dim=(2, 3)), self.sign * x.mean(dim=(1, 2, 3)))

    def config(self):
        return {}


def greys(n, level, seed, name, *, labels=False) -> kedge.ImageSet:
    """Images around a brightness, dark enough to tie often."""
    generator = torch.Generator().manual_seed(seed)
    images = (torch.randn(n, 3, 2, 2, generator=generator) * 20 + level).clamp(0, 255).to(torch.uint8)
    return kedge.ImageSet(images, torch.arange(n) % 3 if labels else None, name=name)


def calibrated(sign=1.0) -> Brightness:
    held_out = greys(50, 100, 9, "held out", labels=True)
    return Brightness(sign).fit(held_out).calibrate(held_out)


INSIDE = greys(70, 100, 0, "inside", labels=True)
NEAR, FAR = greys(40, 120, 1, "near"), greys(31, 200, 2, "far")


def test_every_metric_is_the_direct_call():
    detectors = {"up": calibrated(), "down": calibrated(-1.0)}
    table = evaluate(detectors, INSIDE, [NEAR, FAR])
    assert list(table.results) == ["up", "down"]
    for name, detector in detectors.items():
        result = table.results[name]
        inside = detector.score(INSIDE)
        for ood in (NEAR, FAR):
            outside = detector.score(ood)
            for metric, function in DIRECT.items():
                estimate = result.metrics[ood.name][metric]
                assert estimate.value == function(inside, outside)
                assert estimate.low is None
                assert estimate.high is None
        found = detector(INSIDE)
        assert result.accuracy == metrics.accuracy(found.logits, INSIDE.labels)
        assert result.ece == metrics.ece(found.probability, INSIDE.labels)
        assert 0 < result.accuracy < 1
        assert result.milliseconds > 0
    assert table.results["up"].metrics["far"]["auroc"].value > 0.99
    assert table.results["down"].metrics["far"]["auroc"].value < 0.01


def test_means_are_over_the_ood_sets():
    result = evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR]).results["up"]
    for metric in METRICS:
        values = [result.metrics[name][metric].value for name in ("near", "far")]
        assert result.mean(metric) == pytest.approx(sum(values) / 2)
    with pytest.raises(KeyError):
        result.mean("unheard of")


def test_the_flagged_share_is_that_of_the_threshold():
    detector = calibrated()
    result = evaluate({"up": detector}, INSIDE, [NEAR, FAR]).results["up"]
    assert list(result.flagged) == ["inside", "near", "far"]
    for images in (INSIDE, NEAR, FAR):
        expected = (detector.score(images) > detector.calibration.threshold).double().mean()
        assert result.flagged[images.name] == float(expected)
        assert result.detections[images.name].score.equal(detector.score(images))
    assert result.flagged["inside"] < result.flagged["near"] < result.flagged["far"] == 1


def test_intervals_come_from_the_bootstrap_s_seed():
    tables = [evaluate({"up": calibrated()}, INSIDE, [NEAR], resamples=50, seed=s) for s in (3, 3, 4)]
    estimates = [table.results["up"].metrics["near"] for table in tables]
    direct = metrics.detection_metrics(calibrated().score(INSIDE), calibrated().score(NEAR), resamples=50, seed=3)
    assert estimates[0] == estimates[1] == direct
    assert estimates[0] != estimates[2]
    assert estimates[0]["auroc"].low < estimates[0]["auroc"].value < estimates[0]["auroc"].high
    assert tables[0].resamples == 50


def test_without_labels_there_is_no_accuracy():
    unlabelled = kedge.ImageSet(INSIDE.images, name="inside")
    result = evaluate({"up": calibrated()}, unlabelled, [NEAR]).results["up"]
    assert (result.accuracy, result.ece) == (None, None)
    assert result.metrics == evaluate({"up": calibrated()}, INSIDE, [NEAR]).results["up"].metrics


def test_the_table_knows_its_sets():
    table = evaluate({"up": calibrated()}, INSIDE, (FAR, NEAR))
    assert table.id_name == "inside"
    assert list(table.sets) == ["inside", "far", "near"]
    assert table.ood_names == ("far", "near")


def test_as_dict_is_plain_data_with_everything_but_the_images():
    table = evaluate({"up": calibrated(), "down": calibrated(-1.0)}, INSIDE, [NEAR, FAR], resamples=20)
    plain = table.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["id"] == "inside"
    assert plain["resamples"] == 20
    assert plain["sets"]["near"] == {"images": 40, "sha256": NEAR.checksum}
    up = plain["results"]["up"]
    assert up["accuracy"] == table.results["up"].accuracy
    assert up["mean"]["auroc"] == table.results["up"].mean("auroc")
    assert set(up["metrics"]["far"]) == set(METRICS)
    assert up["metrics"]["far"]["fpr95"] == vars(table.results["up"].metrics["far"]["fpr95"])
    assert set(up["flagged"]) == {"inside", "near", "far"}
    json.dumps(evaluate({"up": calibrated()}, kedge.ImageSet(INSIDE.images), [NEAR]).as_dict(), allow_nan=False)


def test_progress_rises_to_the_total():
    seen = []
    evaluate({"up": calibrated(), "down": calibrated()}, INSIDE, [NEAR, FAR], progress=lambda *p: seen.append(p))
    assert seen[-1] == (282, 282)  # two detectors on 70 + 40 + 31 images
    assert [done for done, _ in seen] == [70, 110, 141, 211, 251, 282]
    assert {total for _, total in seen} == {282}


@pytest.mark.parametrize(
    ("detectors", "inside", "outside", "message"),
    [
        ({}, INSIDE, [NEAR], "detectors and ood_sets must each hold at least one"),
        ({"up": calibrated()}, INSIDE, [], "detectors and ood_sets must each hold at least one"),
        ({"up": calibrated()}, INSIDE, [NEAR, NEAR], r"different names, got \['inside', 'near', 'near'\]"),
        ({"up": calibrated()}, INSIDE, [INSIDE], r"different names, got \['inside', 'inside'\]"),
        (
            {"up": calibrated()},
            INSIDE,
            NEAR,
            r"ood_sets must be a list of sets, got ImageSet",
        ),
        ({"up": calibrated()}, INSIDE, [3], "images must be an ImageSet, a tensor"),
        ({"up": calibrated()}, INSIDE, [NEAR.subset([])], "the images must be at least one; the source is empty"),
        ({"up": calibrated()}, INSIDE.subset([]), [NEAR], "the images must be at least one; the source is empty"),
        (
            {"up": calibrated()},
            kedge.ImageSet(INSIDE.images, torch.full((70,), 3), name="inside"),
            [NEAR],
            r"labels must lie in 0\.\.2, got 3\.\.3",
        ),
    ],
)
def test_what_cannot_be_compared(detectors, inside, outside, message):
    with pytest.raises(InputError, match=message):
        evaluate(detectors, inside, outside)


def test_a_detector_must_be_calibrated():
    with pytest.raises(NotReadyError, match=r"call calibrate\(held_out\)"):
        evaluate({"up": Brightness().fit(NEAR)}, INSIDE, [NEAR])


def test_real_detectors_on_one_footing():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    detectors = {
        "amp": kedge.AMP(kedge.anchor(net, init="fresh")),
        **{kind.name: kind(net) for kind in (kedge.MSP, kedge.MaxLogit, kedge.Entropy, kedge.Energy)},
    }
    for detector in detectors.values():
        detector.fit(greys(50, 100, 8, "train", labels=True)).calibrate(greys(50, 100, 9, "held out", labels=True))
    table = evaluate(detectors, INSIDE, [NEAR, FAR])
    assert set(table.results) == set(detectors)
    plain = [table.results[name] for name in ("msp", "max_logit", "entropy", "energy")]
    assert len({result.accuracy for result in plain}) == 1  # one network, one prediction
    assert all(0 <= result.mean("auroc") <= 1 for result in table.results.values())


def test_a_set_apart_is_measured_and_in_no_mean():
    detectors = {"up": calibrated(), "down": calibrated(-1.0)}
    whole, apart = (evaluate(detectors, INSIDE, [NEAR, FAR], apart=names) for names in ((), ("near",)))
    for name in detectors:
        assert apart.results[name].metrics == whole.results[name].metrics
        for metric in METRICS:
            assert apart.results[name].mean(metric) == whole.results[name].metrics["far"][metric].value
    assert apart.over == "far (near apart)"
    assert whole.over == "2 OOD sets"
    table = kedge.evaluation.SeedSummary({0: apart})
    assert table.value("up", "fpr95").mean == whole.results["up"].metrics["far"]["fpr95"].value
    assert "far (near apart)" in table.table().caption
    assert "far (near apart)" in table.by_set("auroc").caption


@pytest.mark.parametrize(
    ("apart", "message"), [(("other",), "apart must name OOD sets"), (("near", "far"), "at least one OOD")]
)
def test_sets_apart_must_be_some_of_the_ood_sets(apart, message):
    with pytest.raises(InputError, match=message):
        evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR], apart=apart)
