"""Evaluation: every number in the table is the one that the metrics and the detector give when called directly."""

import json
import re

import pytest
import torch
from torch import nn

import kedge
from kedge import metrics
from kedge.detectors import Detector, Outputs
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import evaluate
from kedge.evaluation.report import write_report
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


def test_every_number_is_that_of_the_direct_call():
    detectors = {"up": calibrated(), "down": calibrated(-1.0)}
    table = evaluate(detectors, INSIDE, (NEAR, FAR))
    assert (table.id_name, table.ood_names) == ("inside", ("near", "far"))
    assert (list(table.results), list(table.sets)) == (["up", "down"], ["inside", "near", "far"])
    for name, detector in detectors.items():
        result, outputs = table.results[name], detector(INSIDE)
        for metric, function in DIRECT.items():
            values = [function(outputs.score, detector.score(ood)) for ood in (NEAR, FAR)]
            assert [result.metrics[ood][metric] for ood in ("near", "far")] == [metrics.Estimate(v) for v in values]
            assert result.mean(metric) == pytest.approx(sum(values) / 2)
        with pytest.raises(KeyError):
            result.mean("unheard of")
        assert result.accuracy == metrics.accuracy(outputs.logits, INSIDE.labels)
        assert result.value("ece") == metrics.ece(outputs.probability, INSIDE.labels)
        right = outputs.label == INSIDE.labels
        for metric in ("oscr", "scod_aurc"):
            assert result.value(metric, "near") == getattr(metrics, metric)(outputs.score, detector.score(NEAR), right)
        assert 0 < result.accuracy < 1
        assert result.milliseconds > 0
        assert list(result.flagged) == ["inside", "near", "far"]
        for images in (INSIDE, NEAR, FAR):
            flagged = (detector.score(images) > detector.calibration.threshold).double().mean()
            assert result.flagged[images.name] == float(flagged)
            assert result.detections[images.name].score.equal(detector.score(images))
    up, down = table.results.values()
    assert down.metrics["far"]["auroc"].value < 0.01 < 0.99 < up.metrics["far"]["auroc"].value
    assert up.flagged["inside"] < up.flagged["near"] < up.flagged["far"] == 1


def test_intervals_come_from_the_bootstrap_s_seed():
    tables = [evaluate({"up": calibrated()}, INSIDE, [NEAR], resamples=50, seed=s) for s in (3, 3, 4)]
    estimates = [table.results["up"].metrics["near"] for table in tables]
    inside, right = calibrated().score(INSIDE), calibrated()(INSIDE).label == INSIDE.labels
    direct = metrics.detection_metrics(inside, calibrated().score(NEAR), right, resamples=50, seed=3)
    assert estimates[0] == estimates[1] == direct
    assert estimates[0] != estimates[2]
    assert estimates[0]["auroc"].low < estimates[0]["auroc"].value < estimates[0]["auroc"].high
    assert tables[0].resamples == 50


def test_the_best_and_the_difference_hold_metrics_of_classifier_and_detector_together():
    table = evaluate({"up": calibrated(), "down": calibrated(-1.0)}, INSIDE, [NEAR, FAR])
    best = kedge.evaluation.best_beyond_noise(table, resamples=50)
    assert {best.overall[name] for name in ("oscr", "scod_aurc", "auroc")} == {"up"}
    gap = kedge.evaluation.difference(table, "up", "down", resamples=50)["far"]["oscr"]
    assert gap.value == table.results["up"].value("oscr", "far") - table.results["down"].value("oscr", "far")
    assert 0 < gap.low < gap.value < gap.high


def test_without_labels_there_is_no_accuracy():
    unlabelled = kedge.ImageSet(INSIDE.images, name="inside")
    result = evaluate({"up": calibrated()}, unlabelled, [NEAR]).results["up"]
    assert (result.accuracy, result.classifier) == (None, {})
    labelled = evaluate({"up": calibrated()}, INSIDE, [NEAR]).results["up"].metrics["near"]
    assert result.metrics["near"] == {name: labelled[name] for name in METRICS}
    assert (result.value("oscr"), result.value("nll")) == (None, None)


def test_as_dict_is_data_for_json_with_everything_but_the_images():
    table = evaluate({"up": calibrated(), "down": calibrated(-1.0)}, INSIDE, [NEAR, FAR], resamples=20)
    data, result = table.as_dict(), table.results["up"]
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["id"], data["resamples"]) == ("inside", 20)
    assert data["sets"]["near"] == {"images": 40, "sha256": NEAR.checksum}
    up = data["results"]["up"]
    assert (up["accuracy"], up["mean"]["auroc"]) == (result.accuracy, result.mean("auroc"))
    assert up["metrics"]["far"] == {metric: vars(estimate) for metric, estimate in result.metrics["far"].items()}
    assert set(up["mean"]) == set(up["metrics"]["far"]) == set(metrics.COUNTED)
    assert set(metrics.CLASSIFIER_METRICS) <= set(up)
    assert up["flagged"] == result.flagged
    json.dumps(evaluate({"up": calibrated()}, kedge.ImageSet(INSIDE.images), [NEAR]).as_dict(), allow_nan=False)


def test_progress_rises_to_the_total():
    seen = []
    evaluate({"up": calibrated(), "down": calibrated()}, INSIDE, [NEAR, FAR], progress=lambda *p: seen.append(p))
    assert seen == [(done, 282) for done in (70, 110, 141, 211, 251, 282)]  # two detectors on 70 + 40 + 31 images


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"detectors": {}}, "detectors and ood_sets must each hold at least one"),
        ({"ood_sets": []}, "detectors and ood_sets must each hold at least one"),
        ({"ood_sets": [NEAR, NEAR]}, r"different names, got \['inside', 'near', 'near'\]"),
        ({"ood_sets": [INSIDE]}, r"different names, got \['inside', 'inside'\]"),
        ({"ood_sets": NEAR}, "ood_sets must be a list of sets, got ImageSet"),
        ({"ood_sets": [3]}, "images must be an ImageSet, a tensor"),
        ({"ood_sets": [NEAR.subset([])]}, "the images must be at least one; the source is empty"),
        ({"id_test": INSIDE.subset([])}, "the images must be at least one; the source is empty"),
        (
            {"id_test": kedge.ImageSet(INSIDE.images, torch.full((70,), 3))},
            "id_test must show the classes of 'up', which are 3, 0 to 2; 'images' has 3",
        ),
        ({"apart": ("other",)}, "apart must name OOD sets"),
        ({"apart": ("near", "far")}, "at least one OOD"),
        ({"detectors": {"up": Brightness().fit(NEAR)}}, r"call calibrate\(held_out\)"),
    ],
)
def test_arguments_that_cannot_be_evaluated(change, message):
    with pytest.raises((InputError, NotReadyError), match=message):
        evaluate(**{"detectors": {"up": calibrated()}, "id_test": INSIDE, "ood_sets": [NEAR, FAR]} | change)


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


def named_like(names, sign=1.0) -> Brightness:
    detector = calibrated(sign)
    detector.classes = names
    return detector


COLORS = ("red", "green", "blue")


@pytest.mark.parametrize(
    ("names", "labels", "classes", "words"),
    [
        (COLORS, INSIDE.labels, ("red", "green", "yeti"), "red, green, blue; 'test' has yeti"),
        (COLORS, INSIDE.labels + 1000, (), "has 1000, 1001, 1002"),
        ((), INSIDE.labels + 2**20 - 3, (), "which are 3, 0 to 2; 'test' has 1048573"),
        ((), INSIDE.labels, (*COLORS, "grey"), "has 4 classes"),
    ],
)
def test_the_test_set_must_show_the_detector_s_classes(names, labels, classes, words):
    with pytest.raises(InputError, match=f"id_test must show the classes of 'it'.*{words}"):
        evaluate({"it": named_like(names)}, kedge.ImageSet(INSIDE.images, labels, "test", classes), [NEAR])
    with pytest.raises(InputError, match="same classes in the same order"):
        evaluate({"it": named_like(COLORS), "other": named_like(COLORS[::-1])}, INSIDE, [NEAR])


def test_labels_are_matched_by_name_everywhere(tmp_path):
    """A test set that numbers its classes in another order, and lacks some labels, gives the same numbers."""
    detectors = {"it": named_like(COLORS), "other": named_like(COLORS, -1.0)}
    labels = INSIDE.labels.clone()
    labels[::7] = -1
    turned = torch.where(labels < 0, labels, 2 - labels)
    sets = (labels, COLORS), (turned, COLORS[::-1])
    tables = [evaluate(detectors, kedge.ImageSet(INSIDE.images, y, "inside", c), [NEAR]) for y, c in sets]
    result = tables[0].results["it"]
    assert result.accuracy == metrics.accuracy(calibrated()(INSIDE).label[labels >= 0], labels[labels >= 0])
    assert result.classifier == tables[1].results["it"].classifier
    assert torch.equal(tables[0].sets["inside"].labels, tables[1].sets["inside"].labels)
    assert kedge.evaluation.best_beyond_noise(tables[0]) == kedge.evaluation.best_beyond_noise(tables[1])
    pages = [write_report(tmp_path / "a.html", table, title="a").read_text() for table in tables]
    cleaned = [re.sub(r"<td>[\d.]+</td></tr>|milliseconds.*", "", page) for page in pages]
    assert cleaned[0] == cleaned[1]
