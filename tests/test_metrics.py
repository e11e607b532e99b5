"""Metrics against scikit-learn and against the loops of their definitions."""

import itertools
import math
import runpy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score

from kedge import metrics
from kedge.errors import InputError
from kedge.metrics import (
    CLASSIFIER_METRICS,
    COUNTED,
    DETECTION_METRICS,
    METRICS,
    Estimate,
    Predictions,
    Repeated,
    accuracy,
    aupr_in,
    aupr_out,
    aurc,
    auroc,
    brier,
    detection_metrics,
    dtacc,
    ece,
    fpr95,
    fpr95_ood,
    nll,
    smooth_ece,
)

INF = math.inf
NAMES = list(DETECTION_METRICS)

tied = st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF]), min_size=1, max_size=60)
spread = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=30)
scores = tied | spread


# The definitions, as loops.


def pairs_won(inside, outside):
    halves = sum((o > i) + (o >= i) for i in inside for o in outside)
    return halves / (2 * len(inside) * len(outside))


def accepted_at_95(inside, outside):
    t = min(t for t in inside if 100 * sum(i <= t for i in inside) >= 95 * len(inside))
    return sum(o <= t for o in outside) / len(outside)


def flagged_at_95(inside, outside):
    t = max(t for t in outside if 100 * sum(o >= t for o in outside) >= 95 * len(outside))
    return sum(i >= t for i in inside) / len(inside)


def best_balanced(inside, outside):
    shares = (
        (sum(i <= t for i in inside) / len(inside) + sum(o > t for o in outside) / len(outside)) / 2
        for t in [*inside, *outside]
    )
    return max(0.5, *shares)  # one half: flag all


def errors_over_thresholds(inside, outside):
    """Between any two neighboring scores: ID flagged plus OOD accepted, times how far they are apart; in fractions.

    Infinite scores are far beyond all others.
    """
    exact = {s: Fraction(s) if math.isfinite(s) else (-1) ** (s < 0) * 10**400 for s in [*inside, *outside]}
    places, area = sorted(exact), Fraction(0)
    for low, high in itertools.pairwise(places):
        flagged, accepted = sum(i > low for i in inside), sum(o <= low for o in outside)
        errors = Fraction(flagged, len(inside)) + Fraction(accepted, len(outside))
        area += (exact[high] - exact[low]) * errors / 2
    span = exact[places[-1]] - exact[places[0]]
    return float(area / span) if span else 0.5


def sklearn_input(inside, outside):
    """OOD is positive; scores become ranks, because scikit-learn takes no infinities."""
    both = np.array([*inside, *outside], dtype=float)
    return np.repeat([0, 1], [len(inside), len(outside)]), np.unique(both, return_inverse=True)[1].astype(float)


def sklearn_aupr_out(inside, outside):
    return average_precision_score(*sklearn_input(inside, outside))


def sklearn_aupr_in(inside, outside):
    truth, ranks = sklearn_input(inside, outside)
    return average_precision_score(1 - truth, -ranks)


ORACLES = {
    "auroc": pairs_won,
    "fpr95": accepted_at_95,
    "dtacc": best_balanced,
    "aupr_in": sklearn_aupr_in,
    "aupr_out": sklearn_aupr_out,
    "fpr95_ood": flagged_at_95,
    "autc": errors_over_thresholds,
}


def test_the_table_holds_every_metric_under_the_name_of_its_function():
    assert set(ORACLES) == set(NAMES)
    assert {*COUNTED, *CLASSIFIER_METRICS} == set(METRICS)
    predictions = Predictions([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], [0.1, 0.2, 0.3], [0, 1, 0])
    values = {name: metric(predictions) for name, metric in CLASSIFIER_METRICS.items()}
    right = np.array([True, True, False])
    for name, value in values.items():
        given = (
            (predictions.score, right) if name in ("aurc", "augrc") else (predictions.probability, predictions.truth)
        )
        assert value == getattr(metrics, name)(*given)
    for name, metric in METRICS.items():
        assert callable(getattr(metrics, name))
        assert (metric.of_counts is None) != (metric.of_predictions is None)
        assert metric.label in metric.head
    assert (METRICS["auroc"].head, METRICS["fpr95"].head, METRICS["ece"].better) == ("AUROC ↑", "FPR95 ↓", "lower")
    assert METRICS["auroc"].text(0.98765) == "98.8"
    assert METRICS["nll"].text(0.98765) == "0.988"


@pytest.mark.parametrize("name", NAMES)
@given(inside=scores, outside=scores)
def test_each_metric_is_its_definition(name, inside, outside):
    assert getattr(metrics, name)(inside, outside) == pytest.approx(ORACLES[name](inside, outside), abs=1e-12)


@given(inside=scores, outside=scores)
def test_metrics_agree_with_each_other(inside, outside):
    single = {name: Estimate(getattr(metrics, name)(inside, outside)) for name in NAMES}
    assert detection_metrics(inside, outside) == single  # from one sort
    flipped = [-o for o in outside], [-i for i in inside]  # exchanges the roles and the sign
    assert fpr95_ood(inside, outside) == fpr95(*flipped)
    assert aupr_out(inside, outside) == aupr_in(*flipped)
    assert auroc(inside, outside) == auroc(*flipped)
    assert dtacc(inside, outside) == dtacc(*flipped)
    curve = flagged_id, flagged_ood = metrics.roc_curve(inside, outside)  # from none to all flagged
    for flagged in curve:
        assert (flagged[0], flagged[-1], bool((np.diff(flagged) >= 0).all())) == (0, 1, True)
    assert np.trapezoid(flagged_ood, flagged_id) == pytest.approx(pairs_won(inside, outside), abs=1e-12)


def test_numbers_are_not_rounded():
    for n in (1, 2, 19, 20, 21, 40, 60, 100, 140, 180, 220, 999, 1000):  # 95 % is counted in whole images
        enough = math.ceil(Fraction(95, 100) * n)
        assert fpr95(range(n), range(n)) == fpr95_ood(range(n), range(n)) == enough / n
    assert auroc([2**53], [2**53 + 1]) == 1  # no tie


def test_the_benchmark_compares_metrics_with_scikit_learn():
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "metrics.py"))
    result = script["large"](400, resamples=2)
    assert set(result["by_metric"]) <= set(NAMES)
    truth, ranks = sklearn_input([0, 1, 1, 3], [1, 2, 3])
    assert auroc([0, 1, 1, 3], [1, 2, 3]) == pytest.approx(roc_auc_score(truth, ranks), abs=1e-12)
    assert result["difference"] < script["TOLERANCE"]


def test_perfect_inverted_and_constant_scores():
    for sets, values in (
        (([0, 1], [2, 3]), (1, 0, 1, 1, 1, 0, 1 / 6)),
        (([2, 3], [0, 1]), (0, 1, 0.5, 5 / 12, 5 / 12, 1, 5 / 6)),
        (([7] * 30, [7] * 10), (0.5, 1, 0.5, 0.75, 0.25, 1, 0.5)),
    ):
        estimates = detection_metrics(*sets)
        names = ("auroc", "fpr95", "dtacc", "aupr_in", "aupr_out", "fpr95_ood", "autc")
        assert [estimates[name].value for name in names] == pytest.approx(values, abs=1e-12)


# Arguments.

CONVERSIONS = [
    list,
    tuple,
    *(lambda v, d=d: np.array(v, dtype=d) for d in (np.float16, np.float32, np.uint8)),
    lambda v: np.array(v)[::-1][::-1],
    *(lambda v, d=d: torch.tensor(v, dtype=d) for d in (torch.int64, torch.bfloat16, torch.float16)),
    lambda v: torch.tensor(v, dtype=torch.float64, requires_grad=True),
]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_lists_arrays_and_tensors_of_any_kind_give_the_same(convert):
    inside, outside = [3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9]
    expected = detection_metrics(np.array(inside, dtype=np.float64), np.array(outside, dtype=np.float64))
    given = convert(inside), convert(outside)
    assert detection_metrics(*given) == expected
    assert detection_metrics(given[0], outside, resamples=2)["auroc"].value == expected["auroc"].value
    assert [list(map(int, v)) for v in given] == [inside, outside]  # left alone
    counts = Repeated(*given)(*(np.ones(len(v), dtype=np.int64) for v in given))
    assert all(metric(counts) == expected[name].value for name, metric in DETECTION_METRICS.items())


@pytest.mark.parametrize("function", [auroc, dtacc, metrics.roc_curve, detection_metrics, Repeated])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "at least one score"),
        ([[1.0, 2.0]], r"must be \(N,\).*got \(1, 2\)"),
        (1.0, r"must be \(N,\).*got \(\)"),
        ([1.0, math.nan, INF], "1 of 3 values are NaN"),
        (["a"], "real numbers"),
        ([1j], "real numbers"),
        ([[1.0], [1.0, 2.0]], "array of numbers"),
    ],
)
def test_bad_scores_are_refused_by_name(function, bad, message):
    for name, arguments in (("id_scores", (bad, [1.0])), ("ood_scores", ([1.0], bad))):
        with pytest.raises(InputError, match=f"(?s){name}.*{message}"):
            function(*arguments)


# Intervals.

BOUNDED = [name for name in NAMES if METRICS[name].interval]


@pytest.fixture(scope="module")
def normals():
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, 300).round(1), rng.normal(1, 1, 200).round(1)


def test_intervals_come_from_the_seed_alone_hold_the_value_and_grow_with_the_level(normals):
    first = detection_metrics(*normals, resamples=50, seed=3)
    shuffled = [np.random.default_rng(1).permutation(v) for v in normals]
    assert detection_metrics(*shuffled, resamples=50, seed=3) == first
    assert detection_metrics(*normals, resamples=50, seed=4) != first
    narrow, wide = (detection_metrics(*normals, resamples=400, level=level) for level in (0.5, 0.99))
    for name in BOUNDED:
        assert wide[name].value == narrow[name].value == getattr(metrics, name)(*normals)
        assert 0 <= wide[name].low <= wide[name].value <= wide[name].high <= 1
        assert wide[name].low <= narrow[name].low <= narrow[name].high <= wide[name].high
    assert detection_metrics([1.0], [2.0], resamples=5)["auroc"] == Estimate(1.0, 1.0, 1.0)


def test_intervals_are_those_of_a_bootstrap_that_computes_every_metric_anew(normals):
    """The same draws, taken as scores and given to the oracles."""
    inside, outside = (np.sort(v)[:80] for v in normals)
    rng = np.random.default_rng(11)
    drawn = {name: [] for name in BOUNDED}
    for _ in range(25):
        redrawn = [v[rng.integers(len(v), size=len(v))] for v in (inside, outside)]
        for name in BOUNDED:
            drawn[name].append(ORACLES[name](*(v.tolist() for v in redrawn)))
    intervals = detection_metrics(inside, outside, resamples=25, level=0.8, seed=11)
    for name in BOUNDED:
        low, high = np.quantile(drawn[name], [0.1, 0.9])
        assert intervals[name].low == pytest.approx(low, abs=1e-12)
        assert intervals[name].high == pytest.approx(high, abs=1e-12)


def test_intervals_that_are_given_cover_the_truth_as_often_as_they_say():
    """DTACC has none: a percentile interval would cover too little."""

    def normal(z):
        return 0.5 * (1 + math.erf(z / math.sqrt(2)))

    truth = {"auroc": normal(1 / math.sqrt(2)), "dtacc": normal(1 / 2)}  # of N(0, 1) and N(1, 1)
    rng, covered, runs = np.random.default_rng(8), dict.fromkeys(truth, 0), 150
    for _ in range(runs):
        estimates = detection_metrics(rng.normal(0, 1, 100), rng.normal(1, 1, 100), resamples=100, level=0.9)
        for name, value in truth.items():
            low, high = estimates[name].low, estimates[name].high
            covered[name] += low is None or low <= value <= high
    for name in truth:
        assert covered[name] / runs >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / runs), name
    assert covered["auroc"] / runs <= 0.9 + 3 * math.sqrt(0.9 * 0.1 / runs)
    assert estimates["dtacc"] == Estimate(estimates["dtacc"].value)


def test_intervals_of_very_many_scores_are_those_of_a_draw_of_each(monkeypatch):
    rng = np.random.default_rng(2)
    sets = rng.normal(0, 1, 12_000), rng.normal(1, 1, 8_000)
    each = detection_metrics(*sets, resamples=400)
    monkeypatch.setattr(metrics, "FULL", 1_000)
    monkeypatch.setattr(metrics, "GRID", 2_000)
    grouped = detection_metrics(*sets, resamples=400)
    assert detection_metrics(*sets, resamples=400) == grouped
    for name in BOUNDED:
        assert grouped[name].value == each[name].value
        width = each[name].high - each[name].low
        assert (grouped[name].high - grouped[name].low) / width == pytest.approx(1, abs=0.2)
        assert grouped[name].low == pytest.approx(each[name].low, abs=0.15 * width)
        assert grouped[name].high == pytest.approx(each[name].high, abs=0.15 * width)
    monkeypatch.setattr(metrics, "GRID", 500)
    unequal = detection_metrics(rng.normal(0, 1, 30_000), rng.normal(1, 1, 60).round(1), resamples=200)
    assert all(0 <= unequal[name].low <= unequal[name].value <= unequal[name].high <= 1 for name in BOUNDED)


def test_bad_bootstrap_settings_are_refused_by_name():
    for bad in ({"resamples": -1}, {"resamples": 1.5}, {"level": 1.0}, {"level": 0.0}, {"seed": -1}):
        with pytest.raises(InputError, match=next(iter(bad))):
            detection_metrics([1.0], [2.0], **bad)


# Images that stand several times, or not at all.


def standing(score):
    """Scores with how often each stands, at least one of them once."""
    return st.lists(st.tuples(score, st.integers(0, 3)), min_size=1, max_size=25).filter(lambda p: any(n for _, n in p))


few = standing(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF]))
many = standing(st.floats(allow_nan=False, width=32))


@given(inside=few | many, outside=few | many)
def test_an_image_that_stands_n_times_counts_n_times(inside, outside):
    (id_scores, id_times), (ood_scores, ood_times) = (map(np.array, zip(*p, strict=True)) for p in (inside, outside))
    expected = detection_metrics(np.repeat(id_scores, id_times), np.repeat(ood_scores, ood_times))
    counts = Repeated(id_scores, ood_scores)(id_times, ood_times)
    for name, metric in DETECTION_METRICS.items():
        assert metric(counts) == pytest.approx(expected[name].value, abs=1e-12)


# Accuracy and calibration error.


def test_accuracy_of_classes_and_of_logits():
    assert accuracy([0, 1, 2, 2], [0, 1, 2, 0]) == 0.75
    assert accuracy(torch.eye(4, requires_grad=True), torch.tensor([0, 1, 2, 0])) == 0.75
    assert accuracy([[-INF, 0.0]], [1]) == 1


def looped_ece(probabilities, labels, bins):
    confidences = [max(row) for row in probabilities]
    right = [list(row).index(max(row)) == label for row, label in zip(probabilities, labels, strict=True)]
    error = 0.0
    for b in range(bins):
        members = [i for i, c in enumerate(confidences) if b / bins < c <= (b + 1) / bins]
        if members:
            gap = np.mean([right[i] for i in members]) - np.mean([confidences[i] for i in members])
            error += len(members) / len(labels) * abs(gap)
    return error


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 100])
@pytest.mark.parametrize("classes", [1, 2, 7])
def test_ece_is_the_loop_over_the_bins(bins, classes):
    rng = np.random.default_rng(bins)
    probabilities = np.minimum(rng.dirichlet(np.full(classes, 0.5), size=500), 1.0)
    labels = rng.integers(classes, size=500)
    expected = looped_ece(probabilities.tolist(), labels.tolist(), bins)
    assert ece(probabilities, labels, bins=bins) == pytest.approx(expected, abs=1e-12)


def test_ece_by_hand():
    # Of (0.4, 0.6] and (0.6, 0.8] each holds one image; with [0.6, 0.8) both would share a bin, and the error be 0.15.
    assert ece([[0.6, 0.4], [0.7, 0.3]], [0, 1], bins=5) == pytest.approx((0.4 + 0.7) / 2)
    assert ece(torch.eye(3), torch.arange(3)) == 0
    assert ece(torch.eye(3), torch.tensor([1, 2, 0])) == 1
    assert ece([[1.0004, 0.0]], [0]) == pytest.approx(0.0004)  # the rounding of a softmax
    edges = [[k / 15, 1 - k / 15] for k in range(8, 16)]  # with 15 bins every k/15 is an edge, of the lower bin
    assert ece(edges, [0, 1] * 4) == pytest.approx(looped_ece(edges, [0, 1] * 4, 15), abs=1e-12)


@pytest.mark.parametrize(("n", "classes", "sharpness"), [(1, 2, 1.0), (40, 2, 0.3), (60, 5, 1.0), (30, 10, 0.05)])
def test_smooth_ece_is_the_fixed_point_of_kernel_smoothing(n, classes, sharpness):
    """The kernel with its mirror images as a sum, the integral on a fine grid, the fixed point by SciPy."""
    rng = np.random.default_rng(n)
    probabilities = rng.dirichlet(np.full(classes, sharpness), size=n)
    labels = rng.integers(classes, size=n)
    confidence = probabilities.max(axis=1)
    gaps = (probabilities.argmax(axis=1) == labels) - confidence
    t = np.linspace(0, 1, 4_001)

    def excess(bandwidth):
        smooth = np.zeros_like(t)
        for c, gap in zip(confidence, gaps, strict=True):
            for shift in range(-4, 5, 2):
                smooth += gap / n * (norm.pdf(t, c + shift, bandwidth) + norm.pdf(t, shift - c, bandwidth))
        return np.trapezoid(np.abs(smooth), t) - bandwidth

    assert smooth_ece(probabilities, labels) == pytest.approx(brentq(excess, 1e-3, 1, xtol=1e-6), abs=5e-6)


def test_smooth_ece_by_hand():
    """At one confidence the kernel keeps the whole gap, whatever its bandwidth."""
    for confidence, right, expected in ((0.8, 3, 0.05), (0.6, 0, 0.6), (1.0, 1, 0.75), (0.75, 3, 0.0)):
        labels = [0] * right + [1] * (4 - right)
        assert smooth_ece([[confidence, 1 - confidence]] * 4, labels) == pytest.approx(expected, abs=1e-6)
    assert smooth_ece(torch.eye(3), torch.arange(3)) == pytest.approx(0, abs=1e-6)
    assert smooth_ece([[1.0004, 0.0]], [1]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 7])
def test_brier_and_nll_are_those_of_scikit_learn(classes):
    rng = np.random.default_rng(classes)
    probabilities, labels = rng.dirichlet(np.ones(classes), size=300), rng.integers(classes, size=300)
    every = list(range(classes))
    assert brier(probabilities, labels) == pytest.approx(
        brier_score_loss(labels, probabilities, labels=every, scale_by_half=False), abs=1e-12
    )
    assert nll(probabilities, labels) == pytest.approx(log_loss(labels, probabilities, labels=every), abs=1e-12)
    single = torch.tensor(probabilities, dtype=torch.float32)
    assert brier(single, labels) == pytest.approx(brier(probabilities, labels), abs=1e-6)


def test_brier_and_nll_of_certain_predictions():
    assert (brier(torch.eye(3), torch.arange(3)), nll(torch.eye(3), torch.arange(3))) == (0, 0)
    assert brier(torch.eye(3), torch.tensor([1, 2, 0])) == 2
    assert nll([[1, 0]], [1]) == pytest.approx(-math.log(np.finfo(np.float64).tiny))  # finite
    assert nll(torch.tensor([[1.0, 0.0]]), [1]) == pytest.approx(-math.log(np.finfo(np.float32).tiny))
    assert nll([[1 - 1e-20, 1e-20]], [1]) == pytest.approx(20 * math.log(10))


@pytest.mark.parametrize("function", [accuracy, ece, smooth_ece, brier, nll])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0], r"labels .*\(2,\), got \(1,\)"),
        ([0, 2], r"labels must lie in 0\.\.1, got 0\.\.2"),
        ([-1, 0], r"labels must lie in 0\.\.1, got -1\.\.0"),
        ([0.0, 1.0], "labels must be whole class numbers, got dtype float64"),
        ([[0, 1]], r"labels must be \(N,\).*got \(1, 2\)"),
    ],
)
def test_bad_labels_are_refused(function, labels, message):
    with pytest.raises(InputError, match=message):
        function([[0.5, 0.5], [0.2, 0.8]], labels)


def test_other_bad_arguments_are_refused():
    for call, message in (
        (lambda: ece([[0.5, 0.4]], [0]), "sum to 1"),
        (lambda: ece([[1.5, -0.5]], [0]), "at least 0"),
        (lambda: ece([[math.nan, 1.0]], [0]), "NaN"),
        (lambda: ece([1.0], [0]), r"must be \(N, C\), got \(1,\)"),
        (lambda: ece([[1.0]], [0], bins=0), "bins"),
        (lambda: ece(np.zeros((0, 3)), []), "N at least 1"),
        (lambda: accuracy([], []), "N at least 1"),
        (lambda: accuracy([[math.nan, 1.0]], [0]), "NaN"),
        (lambda: accuracy([0.5], [0]), "whole class numbers"),
        (lambda: aurc([1.0, 2.0], [0, 1]), r"right must be one truth value per score, \(2,\); got int64 \(2,\)"),
        (lambda: aurc([1.0, math.nan], [True, False]), "scores must not hold NaN"),
    ):
        with pytest.raises(InputError, match=message):
            call()
