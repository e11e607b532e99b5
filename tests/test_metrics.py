"""Detection metrics against scikit-learn and against the loops of their definitions."""

import itertools
import math
import runpy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from kedge import metrics
from kedge.errors import InputError
from kedge.metrics import (
    Estimate,
    Repeated,
    accuracy,
    aupr_in,
    aupr_out,
    aurc,
    auroc,
    detection_metrics,
    dtacc,
    ece,
    fpr95,
    fpr95_ood,
)

INF = math.inf
NAMES = ["auroc", "aupr_in", "aupr_out", "fpr95", "fpr95_ood", "dtacc"]

tied = st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF]), min_size=1, max_size=60)
spread = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=30)
scores = tied | spread
quick = settings(max_examples=100, derandomize=True, deadline=None)


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
    flag_all = 0.5
    return max(
        flag_all,
        *(
            (sum(i <= t for i in inside) / len(inside) + sum(o > t for o in outside) / len(outside)) / 2
            for t in [*inside, *outside]
        ),
    )


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
    "aupr_in": sklearn_aupr_in,
    "aupr_out": sklearn_aupr_out,
    "fpr95": accepted_at_95,
    "fpr95_ood": flagged_at_95,
    "dtacc": best_balanced,
}


@pytest.mark.parametrize("name", NAMES)
@given(inside=scores, outside=scores)
@quick
def test_each_metric_is_its_definition(name, inside, outside):
    assert getattr(metrics, name)(inside, outside) == pytest.approx(ORACLES[name](inside, outside), abs=1e-12)


@pytest.mark.parametrize("decimals", [1, 2, 15])
def test_large_samples_agree_with_scikit_learn(decimals):
    rng = np.random.default_rng(decimals)
    inside, outside = rng.normal(0, 1, 20_000).round(decimals), rng.normal(1, 2, 7_000).round(decimals)
    truth = np.repeat([0, 1], [20_000, 7_000])
    both = np.concatenate([inside, outside])
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(truth, both), abs=1e-12)
    assert aupr_out(inside, outside) == pytest.approx(average_precision_score(truth, both), abs=1e-12)
    assert aupr_in(inside, outside) == pytest.approx(average_precision_score(1 - truth, -both), abs=1e-12)


@given(inside=scores, outside=scores)
@quick
def test_all_six_from_one_sort_are_the_single_ones(inside, outside):
    together = detection_metrics(inside, outside)
    assert list(together) == NAMES
    assert together == {name: Estimate(getattr(metrics, name)(inside, outside), None, None) for name in NAMES}


@given(inside=scores, outside=scores)
@quick
def test_exchanging_the_roles_and_the_sign_exchanges_the_directed_metrics(inside, outside):
    flipped = [-o for o in outside], [-i for i in inside]
    assert fpr95_ood(inside, outside) == fpr95(*flipped)
    assert aupr_out(inside, outside) == aupr_in(*flipped)
    assert auroc(inside, outside) == auroc(*flipped)
    assert dtacc(inside, outside) == dtacc(*flipped)


@pytest.mark.parametrize("n", [1, 2, 19, 20, 21, 40, 60, 100, 140, 180, 220, 999, 1000])
def test_95_percent_is_counted_in_whole_images(n):
    enough = math.ceil(Fraction(95, 100) * n)
    assert fpr95(range(n), range(n)) == enough / n
    assert fpr95_ood(range(n), range(n)) == enough / n


def test_the_benchmark_holds_every_metric_against_scikit_learn():
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "metrics.py"))
    found = script["large"](400, resamples=2)
    assert set(found["by_metric"]) == set(metrics.detection_metrics(np.zeros(2), np.ones(2)))
    assert found["difference"] < script["TOLERANCE"]


def test_perfect_and_inverted_separation():
    assert {name: e.value for name, e in detection_metrics([0, 1], [2, 3]).items()} == {
        "auroc": 1, "aupr_in": 1, "aupr_out": 1, "fpr95": 0, "fpr95_ood": 0, "dtacc": 1,
    }  # fmt: skip
    assert auroc([2, 3], [0, 1]) == 0
    assert fpr95([2, 3], [0, 1]) == fpr95_ood([2, 3], [0, 1]) == 1
    assert dtacc([2, 3], [0, 1]) == 0.5


def test_a_constant_score_tells_nothing():
    values = {name: e.value for name, e in detection_metrics([7] * 30, [7] * 10).items()}
    assert values == {"auroc": 0.5, "aupr_in": 0.75, "aupr_out": 0.25, "fpr95": 1, "fpr95_ood": 1, "dtacc": 0.5}


@given(inside=scores, outside=scores)
@quick
def test_roc_curve_runs_from_none_to_all_flagged_over_the_area_auroc(inside, outside):
    flagged_id, flagged_ood = metrics.roc_curve(inside, outside)
    assert flagged_id[0] == flagged_ood[0] == 0
    assert flagged_id[-1] == flagged_ood[-1] == 1
    assert (np.diff(flagged_id) >= 0).all()
    assert (np.diff(flagged_ood) >= 0).all()
    assert np.trapezoid(flagged_ood, flagged_id) == pytest.approx(pairs_won(inside, outside), abs=1e-12)


# What may be passed.


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        lambda v: np.array(v, dtype=np.float16),
        lambda v: np.array(v, dtype=np.float32),
        lambda v: np.array(v, dtype=np.uint8),
        lambda v: np.array(v)[::-1],
        torch.tensor,
        lambda v: torch.tensor(v, dtype=torch.bfloat16),
        lambda v: torch.tensor(v, dtype=torch.float16),
        lambda v: torch.tensor(v, dtype=torch.float64, requires_grad=True),
    ],
)
def test_lists_arrays_and_tensors_of_any_kind_give_the_same(convert):
    inside, outside = [3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9]
    expected = detection_metrics(np.array(inside, dtype=np.float64), np.array(outside, dtype=np.float64))
    assert detection_metrics(convert(inside), convert(outside)) == expected
    assert detection_metrics(convert(inside), outside) == expected


def test_large_whole_numbers_are_not_rounded_into_ties():
    assert auroc([2**53], [2**53 + 1]) == 1


def test_the_arguments_are_left_alone():
    inside, outside = np.array([3.0, 1.0, 2.0]), torch.tensor([5.0, 4.0])
    detection_metrics(inside, outside, resamples=2)
    assert inside.tolist() == [3, 1, 2]
    assert outside.tolist() == [5, 4]


@pytest.mark.parametrize("name", [*NAMES, "roc_curve", "detection_metrics"])
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
def test_bad_scores_are_refused_by_name(name, bad, message):
    function = getattr(metrics, name)
    with pytest.raises(InputError, match=f"(?s)id_scores.*{message}"):
        function(bad, [1.0])
    with pytest.raises(InputError, match=f"(?s)ood_scores.*{message}"):
        function([1.0], bad)


# Intervals.


@pytest.fixture(scope="module")
def normals():
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, 300).round(1), rng.normal(1, 1, 200).round(1)


def test_intervals_come_from_the_seed_alone(normals):
    first = detection_metrics(*normals, resamples=50, seed=3)
    shuffled = [np.random.default_rng(1).permutation(v) for v in normals]
    assert detection_metrics(*shuffled, resamples=50, seed=3) == first
    assert detection_metrics(*normals, resamples=50, seed=4) != first


def test_intervals_hold_the_value_and_grow_with_the_level(normals):
    narrow = detection_metrics(*normals, resamples=400, level=0.5)
    wide = detection_metrics(*normals, resamples=400, level=0.99)
    for name in NAMES:
        assert wide[name].value == narrow[name].value == getattr(metrics, name)(*normals)
        assert 0 <= wide[name].low <= wide[name].value <= wide[name].high <= 1
        assert wide[name].low <= narrow[name].low <= narrow[name].high <= wide[name].high


def test_intervals_are_those_of_a_bootstrap_that_computes_every_metric_anew(normals):
    """The same draws, taken as scores and given to the oracles."""
    inside, outside = (np.sort(v)[:80] for v in normals)
    rng = np.random.default_rng(11)
    drawn = {name: [] for name in NAMES}
    for _ in range(25):
        redrawn = [v[rng.integers(len(v), size=len(v))] for v in (inside, outside)]
        for name in NAMES:
            drawn[name].append(ORACLES[name](*(v.tolist() for v in redrawn)))
    intervals = detection_metrics(inside, outside, resamples=25, level=0.8, seed=11)
    for name in NAMES:
        low, high = np.quantile(drawn[name], [0.1, 0.9])
        assert intervals[name].low == pytest.approx(low, abs=1e-12)
        assert intervals[name].high == pytest.approx(high, abs=1e-12)


def test_the_interval_is_as_wide_as_delongs_standard_error_says():
    rng = np.random.default_rng(5)
    inside, outside = rng.normal(0, 1, 2000), rng.normal(1, 1, 1000)
    above = (outside[:, None] > inside[None, :]).mean(axis=1)  # per OOD image
    below = (outside[:, None] > inside[None, :]).mean(axis=0)  # per ID image
    error = math.sqrt(above.var(ddof=1) / 1000 + below.var(ddof=1) / 2000)
    interval = detection_metrics(inside, outside, resamples=1000)["auroc"]
    assert (interval.high - interval.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    truth = 0.5 * (1 + math.erf(1 / 2))  # P(N(1, 1) > N(0, 1))
    rng = np.random.default_rng(8)
    covered = 0
    for _ in range(150):
        interval = detection_metrics(rng.normal(0, 1, 100), rng.normal(1, 1, 100), resamples=100, level=0.9)["auroc"]
        covered += interval.low <= truth <= interval.high
    assert covered / 150 == pytest.approx(0.9, abs=3 * math.sqrt(0.9 * 0.1 / 150))


def test_intervals_of_very_many_scores_are_those_of_a_draw_of_each(monkeypatch):
    rng = np.random.default_rng(2)
    sets = rng.normal(0, 1, 12_000), rng.normal(1, 1, 8_000)
    each = detection_metrics(*sets, resamples=400)
    monkeypatch.setattr(metrics.detection, "FULL", 1_000)
    monkeypatch.setattr(metrics.detection, "GRID", 2_000)
    grouped = detection_metrics(*sets, resamples=400)
    assert detection_metrics(*sets, resamples=400) == grouped
    for name in NAMES:
        assert grouped[name].value == each[name].value
        width = each[name].high - each[name].low
        assert (grouped[name].high - grouped[name].low) / width == pytest.approx(1, abs=0.2)
        assert grouped[name].low == pytest.approx(each[name].low, abs=0.15 * width)
        assert grouped[name].high == pytest.approx(each[name].high, abs=0.15 * width)


def test_very_many_scores_with_few_distinct_ones_and_sets_of_unequal_size(monkeypatch):
    rng = np.random.default_rng(2)
    sets = rng.normal(0, 1, 30_000), rng.normal(1, 1, 60).round(1)
    monkeypatch.setattr(metrics.detection, "FULL", 1_000)
    monkeypatch.setattr(metrics.detection, "GRID", 500)
    for name, found in detection_metrics(*sets, resamples=200).items():
        assert 0 <= found.low <= found.value <= found.high <= 1, name


def test_one_score_each_has_an_interval_of_one_point():
    assert detection_metrics([1.0], [2.0], resamples=5)["auroc"] == Estimate(1.0, 1.0, 1.0)


@pytest.mark.parametrize("bad", [{"resamples": -1}, {"resamples": 1.5}, {"level": 1.0}, {"level": 0.0}, {"seed": -1}])
def test_bad_bootstrap_settings_are_refused_by_name(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        detection_metrics([1.0], [2.0], **bad)


# Images that stand several times, or not at all.


def standing(score):
    """Scores with how often each stands, at least one of them once."""
    return st.lists(st.tuples(score, st.integers(0, 3)), min_size=1, max_size=25).filter(lambda p: any(n for _, n in p))


few = standing(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF]))
many = standing(st.floats(allow_nan=False, width=32))


@pytest.mark.parametrize("name", NAMES)
@given(inside=few | many, outside=few | many)
@quick
def test_an_image_that_stands_n_times_counts_n_times(name, inside, outside):
    (id_scores, id_times), (ood_scores, ood_times) = (map(np.array, zip(*p, strict=True)) for p in (inside, outside))
    expected = getattr(metrics, name)(np.repeat(id_scores, id_times), np.repeat(ood_scores, ood_times))
    assert Repeated(id_scores, ood_scores)(id_times, ood_times)[name] == pytest.approx(expected, abs=1e-12)


def test_repeats_by_hand():
    measured = Repeated([5, 1, 2], [3, 2])  # not in order
    once = measured(np.array([1, 1, 1]), np.array([1, 1]))
    assert list(once) == NAMES
    assert once["auroc"] == pytest.approx((2 + 1.5) / 6)  # 3 beats 1 and 2; 2 beats 1 and ties with 2
    weighed = measured(np.array([0, 3, 1]), np.array([2, 1]))  # 1 1 1 2 against 3 3 2
    assert weighed["auroc"] == pytest.approx((4 + 4 + 3.5) / 12)
    assert weighed["fpr95"] == pytest.approx(1 / 3)
    assert measured(np.array([1, 1, 1]), np.array([1, 1])) == once  # one sample leaves the next alone


@pytest.mark.parametrize("convert", [list, tuple, torch.tensor, lambda v: np.array(v, dtype=np.float32)])
def test_repeats_of_lists_arrays_and_tensors_give_the_same(convert):
    inside, outside, times = [3, 1, 4, 1, 5], [9, 2, 6], (np.array([2, 0, 1, 1, 1]), np.array([1, 0, 2]))
    assert Repeated(convert(inside), convert(outside))(*times) == Repeated(np.array(inside), np.array(outside))(*times)


def test_bad_scores_to_repeat_are_refused_by_name():
    with pytest.raises(InputError, match=r"id_scores.*NaN"):
        Repeated([1.0, math.nan], [1.0])
    with pytest.raises(InputError, match=r"ood_scores.*at least one"):
        Repeated([1.0], [])


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
    probabilities = rng.dirichlet(np.full(classes, 0.5), size=500)
    probabilities = np.minimum(probabilities, 1.0)
    labels = rng.integers(classes, size=500)
    expected = looped_ece(probabilities.tolist(), labels.tolist(), bins)
    assert ece(probabilities, labels, bins=bins) == pytest.approx(expected, abs=1e-12)


@given(data=st.lists(st.tuples(st.integers(8, 15), st.booleans()), min_size=1, max_size=40))
@quick
def test_ece_puts_a_confidence_on_an_edge_into_the_lower_bin(data):
    """With 15 bins every k/15 is an edge."""
    probabilities = [[k / 15, 1 - k / 15] for k, _ in data]
    labels = [int(wrong) for _, wrong in data]
    assert ece(probabilities, labels) == pytest.approx(looped_ece(probabilities, labels, 15), abs=1e-12)


def test_ece_by_hand():
    # Of (0.4, 0.6] and (0.6, 0.8] each holds one image; with [0.6, 0.8) both would share a bin, and the error be 0.15.
    assert ece([[0.6, 0.4], [0.7, 0.3]], [0, 1], bins=5) == pytest.approx((0.4 + 0.7) / 2)
    assert ece(torch.eye(3), torch.arange(3)) == 0
    assert ece(torch.eye(3), torch.tensor([1, 2, 0])) == 1


def test_ece_forgives_the_rounding_of_a_softmax():
    assert ece([[1.0004, 0.0]], [0]) == pytest.approx(0.0004)


@pytest.mark.parametrize("function", [accuracy, ece])
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


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([[0.5, 0.4]], "sum to 1"),
        ([[1.5, -0.5]], "at least 0"),
        ([[math.nan, 1.0]], "NaN"),
        ([1.0], r"must be \(N, C\), got \(1,\)"),
    ],
)
def test_bad_probabilities_are_refused(probabilities, message):
    with pytest.raises(InputError, match=message):
        ece(probabilities, [0])


def test_other_bad_arguments_of_accuracy_and_ece():
    with pytest.raises(InputError, match="bins"):
        ece([[1.0]], [0], bins=0)
    with pytest.raises(InputError, match="N at least 1"):
        ece(np.zeros((0, 3)), [])
    with pytest.raises(InputError, match="N at least 1"):
        accuracy([], [])
    with pytest.raises(InputError, match="NaN"):
        accuracy([[math.nan, 1.0]], [0])
    with pytest.raises(InputError, match="whole class numbers"):
        accuracy([0.5], [0])


# Selective classification.


@quick
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=7))
def test_aurc_is_the_mean_over_all_orders_of_equal_scores(pairs):
    """Naively: every order that the scores allow, the error rate of its first n images, for every n."""
    areas = []
    for order in itertools.permutations(pairs):
        if [score for score, _ in order] == sorted(score for score, _ in pairs):
            risks = [sum(not right for _, right in order[:n]) / n for n in range(1, len(order) + 1)]
            areas.append(sum(risks) / len(risks))
    scores, right = zip(*pairs, strict=True)
    assert aurc(scores, right) == pytest.approx(sum(areas) / len(areas))


def test_aurc_asks_for_truth_values():
    with pytest.raises(InputError, match=r"right must be one truth value per score, \(2,\); got int64 \(2,\)"):
        aurc([1.0, 2.0], [0, 1])
    with pytest.raises(InputError, match="scores must not hold NaN"):
        aurc([1.0, float("nan")], [True, False])
