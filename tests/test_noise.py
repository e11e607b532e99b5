"""Noise taken apart: what the anchors, the training and the test images each contribute, worked out by hand."""

import math
import statistics

import numpy as np
import pytest
import torch

import kedge
from kedge.detectors import Cost, Detection
from kedge.errors import InputError
from kedge.evaluation import Evaluation, EvaluationResult, SeedSummary
from kedge.evaluation.noise import noise_parts, noise_table
from kedge.metrics import DETECTION_METRICS as METRICS
from kedge.metrics import Estimate
from test_metrics import ORACLES

SIZES = {"inside": 30, "near": 22, "far": 18, "other light": 10, "of near": 12}
SHIFTS = {"inside": 0.0, "near": 1.0, "far": 2.0, "other light": 0.5, "of near": 0.2}


def scores(seed, sizes) -> dict[str, list[float]]:
    """Scores by set, to one decimal so that some tie."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(SHIFTS[name], 1, n).round(1).tolist() for name, n in sizes.items()}


def result(auroc, by_set) -> EvaluationResult:
    """A result with a given mean AUROC, and an FPR95 of twice what is missing; only the scores are anything else."""
    values = {}
    for ood, step in (("near", -0.02), ("far", 0.02)):
        values[ood] = dict.fromkeys(METRICS, Estimate(auroc + step)) | {"fpr95": Estimate(2 * (1 - auroc) + step)}
    said = {}
    for name, each in by_set.items():
        score, logits = torch.tensor(each, dtype=torch.float64), torch.zeros(len(each), 2)
        said[name] = Detection(logits.argmax(dim=1), logits, logits.softmax(dim=1), None, score, score, score > 0)
    return EvaluationResult(values, {}, {}, 1.0, Cost(forward=1), False, said)


def summary(*trainings, sizes=SIZES) -> SeedSummary:
    """One evaluation for each training: AUROCs by label."""
    evaluations = {}
    for seed, aurocs in enumerate(trainings):
        sets = {
            name: kedge.ImageSet(torch.zeros(n, 1, 2, 2, dtype=torch.uint8), name=name) for name, n in sizes.items()
        }
        results = {
            label: result(value, scores(10 * seed + number, sizes))
            for number, (label, value) in enumerate(aurocs.items())
        }
        known = {"near": "of near"} if "of near" in sizes else {}
        evaluations[seed] = Evaluation(results, sets, "inside", 0, ("other light",), known)
    return SeedSummary(evaluations)


TWO = summary(
    {"AMP": 0.90, "AMP, seed 1": 0.92, "AMP, seed 2": 0.94, "MSP": 0.9},
    {"AMP": 0.80, "AMP, seed 1": 0.84, "AMP, seed 2": 0.88, "MSP": 0.8},
)
DRAWS = ("AMP, seed 1", "AMP, seed 2")


def test_the_parts_by_hand():
    found = noise_parts(TWO, "AMP", DRAWS, resamples=2)
    assert found.mean == pytest.approx(0.88)  # of 0.92 and 0.84
    assert found.anchors == pytest.approx(math.sqrt((0.0004 + 0.0016) / 2))  # variances of either training's draws
    # The means are 0.08 apart: a variance of 0.0032, of which a third of the anchors' is theirs.
    assert found.trainings == pytest.approx(math.sqrt(0.0032 - 0.001 / 3))


def test_the_parts_are_those_of_the_metric_asked_for():
    found = noise_parts(TWO, "AMP", DRAWS, "fpr95", resamples=2)  # twice what is missing: twice the deviations
    assert found.mean == pytest.approx(0.24)
    assert found.anchors == pytest.approx(2 * math.sqrt(0.001))
    assert found.trainings == pytest.approx(2 * math.sqrt(0.0032 - 0.001 / 3))


def test_three_trainings_by_hand():
    three = summary({"A": 0.6, "B": 0.8}, {"A": 0.8, "B": 0.8}, {"A": 0.9, "B": 0.7})
    found = noise_parts(three, "A", ("B",), resamples=2)
    within = (0.02 + 0 + 0.02) / 3
    assert found.mean == pytest.approx((0.7 + 0.8 + 0.8) / 3)
    assert found.anchors == pytest.approx(math.sqrt(within))
    assert found.trainings == 0  # the variance of 0.7, 0.8, 0.8 is a 300th; the anchors' half alone is a 150th


def test_where_the_anchors_explain_all_nothing_is_left_for_the_training():
    found = noise_parts(summary({"A": 0.8, "B": 0.9}, {"A": 0.9, "B": 0.8}), "A", ("B",), resamples=2)
    assert found.anchors == pytest.approx(math.sqrt(0.005))
    assert found.trainings == 0


def test_without_other_draws_the_training_has_the_whole_deviation():
    found = noise_parts(TWO, "MSP", (), resamples=2)
    assert found.anchors is None
    assert found.trainings == pytest.approx(statistics.stdev([0.9, 0.8]))
    assert found.mean == pytest.approx(0.85)


def test_one_training_says_nothing_of_others():
    one = summary({"AMP": 0.9, "again": 0.7})
    found = noise_parts(one, "AMP", ("again",), resamples=2)
    assert found.trainings is None
    assert found.anchors == pytest.approx(math.sqrt(0.02))
    alone = noise_parts(one, "AMP", (), resamples=2)
    assert (alone.anchors, alone.trainings) == (None, None)
    assert alone.mean == pytest.approx(0.9)


@pytest.mark.parametrize("metric", METRICS)
def test_images_are_redrawn_as_in_a_loop(metric):
    """Of the first training and the label itself; images known in an OOD set's source count as in distribution."""
    by_set = scores(0, SIZES)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(12):
        redrawn = {name: [by_set[name][i] for i in rng.integers(n, size=n)] for name, n in SIZES.items()}
        near = ORACLES[metric](redrawn["inside"] + redrawn["of near"], redrawn["near"])
        means.append((near + ORACLES[metric](redrawn["inside"], redrawn["far"])) / 2)
    found = noise_parts(TWO, "AMP", DRAWS, metric, resamples=12)
    assert found.images == pytest.approx(statistics.stdev(means))


def test_the_noise_of_the_images_is_as_wide_as_delongs_standard_error_says():
    sizes = {"inside": 200, "near": 150, "far": 120, "other light": 10}
    by_set = scores(0, sizes)
    inside = np.array(by_set["inside"])
    wins = [
        (np.array(by_set[ood])[:, None] > inside) + (np.array(by_set[ood])[:, None] == inside) / 2
        for ood in ("near", "far")
    ]
    shared = (wins[0].mean(axis=0) + wins[1].mean(axis=0)) / 2  # an ID image counts in both sets
    error = shared.var(ddof=1) / 200 + sum(w.mean(axis=1).var(ddof=1) / len(w) / 4 for w in wins)
    found = noise_parts(summary({"AMP": 0.9}, sizes=sizes), "AMP", ())
    assert found.images / math.sqrt(error) == pytest.approx(1, abs=0.15)


def test_methods_that_are_not_there_are_named():
    with pytest.raises(InputError, match=r"must be methods of the summary; got ODIN$"):
        noise_parts(TWO, "ODIN", ())
    with pytest.raises(InputError, match=r"must be methods of the summary; got AMP, seed 7, Gram$"):
        noise_parts(TWO, "AMP", ("AMP, seed 1", "AMP, seed 7", "Gram"))


def test_the_table_has_two_rows_for_each_method():
    table = noise_table(TWO, {"AMP": DRAWS, "MSP": ()}, resamples=12)
    assert table.heads == ("method", "metric", "mean", "± anchors", "± training", "± images")
    assert [row[:2] for row in table.rows] == [
        ("AMP", "AUROC ↑"),
        ("AMP", "FPR95 ↓"),
        ("MSP", "AUROC ↑"),
        ("MSP", "FPR95 ↓"),
    ]
    assert table.rows[0][2:5] == ("88.00", "3.16", "5.35")  # the roots of 0.001 and of 0.0032 less a third of that
    assert table.rows[1][2:5] == ("24.00", "6.32", "10.71")
    assert table.rows[2][2:5] == ("85.00", "", "7.07")  # 10 over root two
    assert table.rows[0][5] == f"{100 * noise_parts(TWO, 'AMP', DRAWS, resamples=12).images:.2f}"
    assert "over 2 trainings" in table.caption
    assert noise_table(summary({"AMP": 0.9}), {"AMP": ()}, resamples=2).rows[0][3:5] == ("", "")
    assert noise_table(TWO, {}).rows == ()
