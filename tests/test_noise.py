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
    """A result with a given mean AUROC, an FPR95 of twice what is missing, and scores."""
    values, detections = {}, {}
    for ood, step in (("near", -0.02), ("far", 0.02)):
        values[ood] = dict.fromkeys(METRICS, Estimate(auroc + step)) | {"fpr95": Estimate(2 * (1 - auroc) + step)}
    for name, each in by_set.items():
        score, logits = torch.tensor(each, dtype=torch.float64), torch.zeros(len(each), 2)
        detections[name] = Detection(logits.argmax(dim=1), logits, logits.softmax(dim=1), None, score, score, score > 0)
    return EvaluationResult(values, {}, {}, 1.0, Cost(forward=1), False, detections)


def summary(*trainings, sizes=SIZES) -> SeedSummary:
    """One evaluation for each training: AUROCs by label."""
    sets = {name: kedge.ImageSet(torch.zeros(n, 1, 2, 2, dtype=torch.uint8), name=name) for name, n in sizes.items()}
    known = {"near": "of near"} if "of near" in sizes else {}
    evaluations = {}
    for seed, aurocs in enumerate(trainings):
        drawn = (scores(10 * seed + number, sizes) for number in range(len(aurocs)))
        results = {label: result(value, next(drawn)) for label, value in aurocs.items()}
        evaluations[seed] = Evaluation(results, sets, "inside", 0, ("other light",), known)
    return SeedSummary(evaluations)


TWO = summary(
    {"AMP": 0.90, "AMP, seed 1": 0.92, "AMP, seed 2": 0.94, "MSP": 0.9},
    {"AMP": 0.80, "AMP, seed 1": 0.84, "AMP, seed 2": 0.88, "MSP": 0.8},
)
DRAWS = ("AMP, seed 1", "AMP, seed 2")


THREE = summary({"A": 0.6, "B": 0.8}, {"A": 0.8, "B": 0.8}, {"A": 0.9, "B": 0.7})
ONE = summary({"AMP": 0.9, "again": 0.7})


@pytest.mark.parametrize(
    ("given", "arguments", "mean", "anchors", "trainings"),
    [
        # The anchors have the mean variance of either training's draws. The means of the trainings, 0.92 and 0.84, have
        # a variance of 0.0032, of which a third of the anchors' is theirs.
        (TWO, ("AMP", DRAWS), 0.88, (0.0004 + 0.0016) / 2, 0.0032 - 0.001 / 3),
        (TWO, ("AMP", DRAWS, "fpr95"), 0.24, 4 * 0.001, 4 * (0.0032 - 0.001 / 3)),  # twice what is missing
        # The variance of 0.7, 0.8, 0.8 is a 300th; the anchors' half alone is a 150th: none is left.
        (THREE, ("A", ("B",)), (0.7 + 0.8 + 0.8) / 3, (0.02 + 0 + 0.02) / 3, 0),
        (summary({"A": 0.8, "B": 0.9}, {"A": 0.9, "B": 0.8}), ("A", ("B",)), 0.85, 0.005, 0),
        (TWO, ("MSP", ()), 0.85, None, statistics.variance([0.9, 0.8])),  # without draws: all is the training's
        (ONE, ("AMP", ("again",)), 0.8, 0.02, None),
        (ONE, ("AMP", ()), 0.9, None, None),
    ],
)
def test_the_parts_by_hand(given, arguments, mean, anchors, trainings):
    parts = noise_parts(given, *arguments, resamples=2)
    assert parts.mean == pytest.approx(mean)
    for part, variance in ((parts.anchors, anchors), (parts.trainings, trainings)):
        assert part == (None if variance is None else pytest.approx(math.sqrt(variance)))


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
    parts = noise_parts(TWO, "AMP", DRAWS, metric, resamples=12)
    assert parts.images == pytest.approx(statistics.stdev(means))


def test_missing_methods_are_named_in_the_error():
    for label, draws, missing in (("ODIN", (), "ODIN"), ("AMP", (*DRAWS, "AMP, seed 7", "Gram"), "AMP, seed 7, Gram")):
        with pytest.raises(InputError, match=f"must be methods of the summary; got {missing}$"):
            noise_parts(TWO, label, draws)


def test_the_table_has_two_rows_for_each_method():
    table = noise_table(TWO, {"AMP": DRAWS, "MSP": ()}, resamples=12)
    assert table.heads == ("method", "metric", "mean", "± anchors", "± training", "± images")
    assert [row[:5] for row in table.rows[:3]] == [
        ("AMP", "AUROC ↑", "88.00", "3.16", "5.35"),  # the roots of 0.001 and of 0.0032 less a third of that
        ("AMP", "FPR95 ↓", "24.00", "6.32", "10.71"),
        ("MSP", "AUROC ↑", "85.00", "", "7.07"),  # 10 over root two
    ]
    assert table.rows[3][:2] == ("MSP", "FPR95 ↓")
    assert table.rows[0][5] == f"{100 * noise_parts(TWO, 'AMP', DRAWS, resamples=12).images:.2f}"
    assert "over 2 trainings" in table.caption
    assert noise_table(summary({"AMP": 0.9}), {"AMP": ()}, resamples=2).rows[0][3:5] == ("", "")
    assert noise_table(TWO, {}).rows == ()
