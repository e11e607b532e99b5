"""Curves: a metric of several results along the number that tells them apart."""

import pytest

from kedge.detectors import Cost
from kedge.evaluation import Evaluation, EvaluationResult
from kedge.evaluation.result import Curve
from kedge.metrics import DETECTION_METRICS as METRICS
from kedge.metrics import Estimate


def result(**auroc) -> EvaluationResult:
    """A result with an AUROC by OOD set, and with an FPR95 that is what is left of it."""
    values = {
        ood: {metric: Estimate(1 - value if metric == "fpr95" else value) for metric in METRICS}
        for ood, value in auroc.items()
    }
    return EvaluationResult(values, {}, {}, 1.0, Cost(forward=1), False, {})


RESULTS = {
    "K = 2": result(near=0.5, far=0.7),
    "K = 10": result(near=0.8, far=0.9),
    "K = 5": result(near=0.6, far=0.9),
    "MSP": result(near=0.25, far=0.75),
}
SETS = dict.fromkeys(("inside", "near", "far", "shifted", "of near"))
TABLE = Evaluation(RESULTS, SETS, "inside", 0, ("shifted",), {"near": "of near"})
ANCHORS = {10: ("K = 10", None), 2: ("K = 2", None), 5: ("K = 5", None)}


def values(series, **options):
    return Curve("Effect of K", "anchors", series, **options).values(TABLE)


def test_values_are_means_over_the_ood_sets_or_those_of_one_set_by_ascending_number():
    result = values({"MSP": {3.5: ("MSP", None)}, "AMP": ANCHORS, "on far": {-1: ("K = 2", "far")}})
    assert list(result) == ["MSP", "AMP", "on far"]
    assert list(result["AMP"]) == [2, 5, 10]
    assert result["AMP"] == pytest.approx({2: 0.6, 5: 0.75, 10: 0.85})
    assert (result["MSP"], result["on far"]) == ({3.5: 0.5}, {-1: 0.7})
    mixed = {1: ("MSP", "near"), 2: ("MSP", "far"), 3: ("MSP", None)}
    assert values({"MSP": mixed})["MSP"] == {1: 0.25, 2: 0.75, 3: 0.5}
    points = {2: ("K = 2", "near"), 5: ("K = 5", None)}
    assert values({"AMP": points}, metric="fpr95")["AMP"] == pytest.approx({2: 0.5, 5: 0.25})


def test_missing_results_and_sets_that_are_no_ood_sets_have_no_point():
    result = values({"AMP": {**ANCHORS, 20: ("K = 20", None)}, "gone": {1: ("Gram", None)}})
    assert {name: list(points) for name, points in result.items()} == {"AMP": [2, 5, 10]}
    for name in ("nowhere", "inside", "shifted", "of near"):
        assert values({"MSP": {1: ("MSP", name), 2: ("MSP", "near")}}) == {"MSP": {2: 0.25}}
    assert values({"gone": {1: ("Gram", "far")}}) == values({}) == {}
