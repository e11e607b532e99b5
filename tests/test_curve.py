"""Curves: a metric of several results along the number that tells them apart."""

import pytest

from kedge.detectors import Cost
from kedge.evaluation import Evaluation, EvaluationResult
from kedge.evaluation.curve import Curve
from kedge.metrics import DETECTION_METRICS as METRICS
from kedge.metrics import Estimate


def result(**auroc) -> EvaluationResult:
    """A result with an AUROC by OOD set, and with an FPR95 that is what is left of it."""
    values = {
        ood: {metric: Estimate(1 - value if metric == "fpr95" else value) for metric in METRICS}
        for ood, value in auroc.items()
    }
    return EvaluationResult(values, {}, {}, 1.0, Cost(forward=1), False, {})


TABLE = Evaluation(
    {
        "K = 2": result(near=0.5, far=0.7),
        "K = 10": result(near=0.8, far=0.9),
        "K = 5": result(near=0.6, far=0.9),
        "MSP": result(near=0.25, far=0.75),
    },
    dict.fromkeys(("inside", "near", "far", "shifted", "of near")),
    "inside",
    0,
    ("shifted",),
    {"near": "of near"},
)
ANCHORS = {10: ("K = 10", None), 2: ("K = 2", None), 5: ("K = 5", None)}


def values(series, **options):
    return Curve("Effect of K", "anchors", series, **options).values(TABLE)


def test_values_are_by_number_upwards():
    found = values({"AMP": ANCHORS})
    assert list(found) == ["AMP"]
    assert list(found["AMP"]) == [2, 5, 10]


def test_without_a_set_they_are_means_over_all_ood_sets():
    assert values({"AMP": ANCHORS})["AMP"] == pytest.approx({2: 0.6, 5: 0.75, 10: 0.85})


def test_with_a_set_they_are_those_of_this_set():
    far = {number: (label, "far") for number, (label, _) in ANCHORS.items()}
    assert values({"AMP": far})["AMP"] == {2: 0.7, 5: 0.9, 10: 0.9}
    mixed = {1: ("MSP", "near"), 2: ("MSP", "far"), 3: ("MSP", None)}
    assert values({"MSP": mixed})["MSP"] == {1: 0.25, 2: 0.75, 3: 0.5}


def test_the_metric_is_the_one_asked_for():
    assert values({"AMP": {2: ("K = 2", "near"), 5: ("K = 5", None)}}, metric="fpr95")["AMP"] == pytest.approx(
        {2: 0.5, 5: 0.25}
    )


def test_series_keep_their_order_and_their_own_numbers():
    found = values({"MSP": {3.5: ("MSP", None)}, "AMP": ANCHORS, "on far": {-1: ("K = 2", "far")}})
    assert list(found) == ["MSP", "AMP", "on far"]
    assert found["MSP"] == {3.5: 0.5}
    assert found["on far"] == {-1: 0.7}


def test_results_and_sets_that_are_not_there_are_left_out():
    found = values({"AMP": {**ANCHORS, 20: ("K = 20", None)}, "gone": {1: ("Gram", None)}})
    assert list(found) == ["AMP"]
    assert list(found["AMP"]) == [2, 5, 10]
    somewhere = {1: ("MSP", "nowhere"), 2: ("MSP", "far")}
    assert values({"MSP": somewhere}) == {"MSP": {2: 0.75}}
    assert values({"gone": {1: ("Gram", "far")}}) == values({}) == {}


@pytest.mark.parametrize("name", ["inside", "shifted", "of near"])
def test_what_is_no_ood_set_has_no_point(name):
    assert values({"MSP": {1: ("MSP", name), 2: ("MSP", "near")}}) == {"MSP": {2: 0.25}}
