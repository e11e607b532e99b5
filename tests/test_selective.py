"""Metrics of the classifier and the detector together, against every order of tied images, loops and scikit-learn."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from kedge import metrics
from kedge.errors import InputError
from kedge.evaluation.paired import redraw
from kedge.metrics import COUNTED, METRICS, Repeated, augrc, aurc, auroc, detection_metrics, oscr, scod_aurc, scod_risk

JOINT = [name for name in COUNTED if METRICS[name].joint]
few = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=7)
inside = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 0, 1, -1])), min_size=1, max_size=30)
outside = st.lists(st.integers(0, 9), min_size=1, max_size=30)


# The definitions.


def orders(pairs):
    """Every order of (score, cost) that the scores allow: the costs, first to last answered."""
    ascending = sorted(score for score, _ in pairs)
    for order in itertools.permutations(pairs):
        if [score for score, _ in order] == ascending:
            yield [cost for _, cost in order]


def mean_risk(pairs):
    """The mean cost of the first n images, for every n, in every order."""
    areas = [np.mean([sum(costs[:n]) / n for n in range(1, len(costs) + 1)]) for costs in orders(pairs)]
    return sum(areas) / len(areas)


def looped_scod_aurc(id_scores, ood_scores, right, ood_cost=1.0):
    """One image after the other; those of equal scores each cost their mean."""
    pairs = [(s, 1.0 - r) for s, r in zip(id_scores, right, strict=True) if r >= 0] + [
        (s, ood_cost) for s in ood_scores
    ]
    total, risks = 0.0, []
    for score in sorted({s for s, _ in pairs}):
        costs = [cost for s, cost in pairs if s == score]
        for _ in costs:
            total += sum(costs) / len(costs)
            risks.append(total / (len(risks) + 1))
    return sum(risks) / len(risks)


def looped_oscr(id_scores, ood_scores, right):
    known = [(s, r) for s, r in zip(id_scores, right, strict=True) if r >= 0]
    won = sum(r * ((s < o) + (s <= o)) / 2 for s, r in known for o in ood_scores)
    return won / len(known) / len(ood_scores)


ORACLES = {"scod_aurc": looped_scod_aurc, "oscr": looped_oscr}


# Errors of the classifier alone.


@given(few)
def test_aurc_is_the_mean_over_all_orders_of_equal_scores(pairs):
    scores, right = zip(*pairs, strict=True)
    assert aurc(scores, right) == pytest.approx(mean_risk([(s, not r) for s, r in pairs]), abs=1e-12)


@given(few)
def test_augrc_is_the_area_under_the_errors_of_all_images_in_all_orders(pairs):
    """Straight lines from no image answered to one, two, ... all of them."""
    areas = []
    for costs in orders([(s, not r) for s, r in pairs]):
        errors = [sum(costs[:n]) / len(costs) for n in range(len(costs) + 1)]
        areas.append(sum((a + b) / 2 for a, b in itertools.pairwise(errors)) / len(costs))
    scores, right = zip(*pairs, strict=True)
    assert augrc(scores, right) == pytest.approx(sum(areas) / len(areas), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=2, max_size=80))
def test_augrc_follows_from_accuracy_and_the_auroc_of_errors(pairs):
    """Equation 7 of Traub et al.: (1 - AUROC) acc (1 - acc) + (1 - acc)^2 / 2."""
    scores, right = map(np.array, zip(*pairs, strict=True))
    assume(0 < right.sum() < len(right))
    acc = right.mean()
    expected = (1 - roc_auc_score(~right, scores)) * acc * (1 - acc) + (1 - acc) ** 2 / 2
    assert augrc(scores, right) == pytest.approx(expected, abs=1e-12)


def test_areas_of_many_images_are_those_of_a_plain_loop():
    """More than 31 images answered, where harmonic numbers come from a series; with and without ties."""
    rng = np.random.default_rng(0)
    for scores in (rng.normal(size=5_000), rng.integers(0, 40, 5_000), np.zeros(5_000)):
        right = rng.random(5_000) < 0.7
        share = {s: 1 - right[scores == s].mean() for s in np.unique(scores)}
        costs = np.array([share[s] for s in np.sort(scores)])
        expected = np.mean(np.cumsum(costs) / np.arange(1, 5_001))
        assert aurc(scores, right) == pytest.approx(expected, abs=1e-12)


# Errors of both.


@pytest.mark.parametrize("name", JOINT)
@given(inside=inside, outside=outside)
def test_each_joint_metric_is_its_definition(name, inside, outside):
    scores, right = zip(*inside, strict=True)
    assume(max(right) >= 0)
    expected = ORACLES[name](scores, outside, right)
    assert getattr(metrics, name)(scores, outside, np.array(right)) == pytest.approx(expected, abs=1e-12)
    together = detection_metrics(scores, outside, np.array(right))
    assert together[name].value == getattr(metrics, name)(scores, outside, torch.tensor(right))
    assert {n: together[n] for n in metrics.DETECTION_METRICS} == detection_metrics(scores, outside)


@given(inside=few, outside=st.lists(st.integers(0, 4), max_size=3), ood_cost=st.sampled_from([0.5, 1.0, 3.0]))
def test_scod_is_the_mean_cost_over_all_orders(inside, outside, ood_cost):
    inside, outside = inside[:4], outside or [2]
    scores, right = zip(*inside, strict=True)
    pairs = [(s, 1.0 - r) for s, r in inside] + [(s, ood_cost) for s in outside]
    assert scod_aurc(scores, outside, right, ood_cost=ood_cost) == pytest.approx(mean_risk(pairs), abs=1e-12)
    for n in range(1, len(pairs) + 1):
        expected = np.mean([sum(costs[:n]) / n for costs in orders(pairs)])
        risk = scod_risk(scores, outside, right, coverage=n / len(pairs), ood_cost=ood_cost)
        assert risk == pytest.approx(expected, abs=1e-9)


@given(inside=inside, outside=outside)
def test_joint_metrics_agree_with_those_of_one_task(inside, outside):
    scores, known = zip(*inside, strict=True)
    right = np.array(known) == 1
    assert scod_aurc(scores, outside, right) == pytest.approx(
        aurc([*scores, *outside], [*right.tolist(), *[False] * len(outside)]), abs=1e-12
    )  # an OOD image is never right
    perfect = np.ones(len(scores), dtype=bool)
    assert oscr(scores, outside, perfect) == auroc(scores, outside)
    assert oscr([0] * len(scores), [1], right) == pytest.approx(right.mean())
    assert oscr(scores, outside, right) == pytest.approx(oscr(scores, outside * 3, right), abs=1e-12)  # openness
    if right.any():
        ids = np.array(scores)[right]
        truth = np.repeat([0, 1], [len(ids), len(outside)])
        expected = right.mean() * roc_auc_score(truth, [*ids, *outside])
        assert oscr(scores, outside, right) == pytest.approx(expected, abs=1e-12)


def test_scod_risk_by_hand_and_as_a_share_of_costs():
    scores, other, right = [1, 2, 4], [3, 5], [True, False, True]
    assert scod_risk(scores, other, right, coverage=1) == pytest.approx(3 / 5)
    assert scod_risk(scores, other, right, coverage=0.4) == pytest.approx(1 / 2)
    assert scod_risk(scores, other, right, coverage=0.7) == pytest.approx(2 / 3.5)  # half of the fourth, at no cost
    # Narasimhan et al. with c_fn = 0.75: of all five answered, one is wrong and two are OOD.
    assert scod_risk(scores, other, right, coverage=1, ood_cost=3) / 4 == pytest.approx((0.25 * 1 + 0.75 * 2) / 5)


# Resamples.


def test_intervals_are_those_of_a_bootstrap_that_computes_every_metric_anew():
    """The same draws of images, given to the oracles; labels do not change the intervals of the other metrics."""
    rng = np.random.default_rng(0)
    scores, other = rng.normal(0, 1, 60).round(1), np.sort(rng.normal(1, 1, 40).round(1))
    right = rng.choice([1, 1, 1, 0, -1], 60)
    order = np.lexsort((-right, scores))
    scores, right = scores[order], right[order]
    rng, drawn = np.random.default_rng(11), {name: [] for name in JOINT}
    for _ in range(25):
        ids, oods = rng.integers(60, size=60), rng.integers(40, size=40)
        for name in JOINT:
            drawn[name].append(ORACLES[name](scores[ids].tolist(), other[oods].tolist(), right[ids].tolist()))
    shuffled = rng.permutation(60)
    intervals = detection_metrics(scores[shuffled], other, right[shuffled], resamples=25, level=0.8, seed=11)
    for name in JOINT:
        low, high = np.quantile(drawn[name], [0.1, 0.9])
        assert intervals[name].low == pytest.approx(low, abs=1e-12)
        assert intervals[name].high == pytest.approx(high, abs=1e-12)
    without = detection_metrics(scores, other, resamples=25, level=0.8, seed=11)
    assert {name: intervals[name] for name in without} == without


def test_intervals_of_very_many_scores_are_those_of_a_draw_of_each(monkeypatch):
    rng = np.random.default_rng(2)
    scores, other = rng.normal(0, 1, 12_000), rng.normal(1, 1, 8_000)
    right = np.where(rng.random(12_000) < 0.1, -1, rng.random(12_000) < 1 / (1 + np.exp(scores - 2)))
    each = detection_metrics(scores, other, right, resamples=400)
    monkeypatch.setattr(metrics, "FULL", 1_000)
    monkeypatch.setattr(metrics, "GRID", 2_000)
    grouped, unlabelled = (detection_metrics(scores, other, known, resamples=400) for known in (right, None))
    assert {name: grouped[name] for name in unlabelled} == unlabelled
    for name in JOINT:
        assert grouped[name].value == each[name].value
        width = each[name].high - each[name].low
        assert grouped[name].low == pytest.approx(each[name].low, abs=0.15 * width)
        assert grouped[name].high == pytest.approx(each[name].high, abs=0.15 * width)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Errors that do not depend on the score: OSCR is the accuracy times the AUROC of N(0, 1) and N(1, 1)."""
    truth, rng, covered, runs = 0.8 * 0.5 * (1 + math.erf(1 / 2)), np.random.default_rng(8), 0, 150
    for _ in range(runs):
        right = rng.random(100) < 0.8
        estimate = detection_metrics(rng.normal(0, 1, 100), rng.normal(1, 1, 100), right, resamples=100, level=0.9)
        covered += estimate["oscr"].low <= truth <= estimate["oscr"].high
    assert covered / runs == pytest.approx(0.9, abs=3 * math.sqrt(0.9 * 0.1 / runs))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 0, -1]), st.integers(0, 3)), min_size=1, max_size=20))
def test_an_image_that_stands_n_times_counts_n_times(images):
    scores, right, times = map(np.array, zip(*images, strict=True))
    assume(right[times > 0].max(initial=-1) >= 0)
    other, other_times = np.array([1, 3, 3, 5]), np.array([2, 0, 1, 1])
    counts = Repeated(scores, other, right)(times, other_times)
    stood = (np.repeat(each, times).tolist() for each in (scores, right))
    ids, known = stood
    for name in JOINT:
        expected = ORACLES[name](ids, np.repeat(other, other_times).tolist(), known)
        assert COUNTED[name](counts) == pytest.approx(expected, abs=1e-12)


def test_paired_resamples_redraw_the_labels_with_their_images():
    """Two detectors, two OOD sets; images without a label are drawn like all others."""
    rng, sizes = np.random.default_rng(1), (20, 9, 7)
    scores = [[rng.integers(0, 9, n) for n in sizes] for _ in range(2)]
    right = [[rng.choice([1, 1, 0, -1], 20)] * 2 for _ in range(2)]
    drawn = redraw(scores, resamples=4, seed=3, right=right, metrics=JOINT)
    assert drawn.shape == (4, 2, 2, len(JOINT))
    rng = np.random.default_rng(3)
    for values in drawn:
        rows = [rng.integers(n, size=n) for n in sizes]
        for d, ood, (m, name) in itertools.product(range(2), (1, 2), enumerate(JOINT)):
            ids, oods = (scores[d][place][rows[place]].tolist() for place in (0, ood))
            expected = ORACLES[name](ids, oods, right[d][0][rows[0]].tolist())
            assert values[d, ood - 1, m] == pytest.approx(expected, abs=1e-12)


def test_bad_arguments_are_refused_by_name():
    for call, message in (
        (
            lambda: oscr([1.0, 2.0], [3.0], [True]),
            r"right must be one truth value per ID image, \(2,\).*got bool \(1,\)",
        ),
        (lambda: oscr([1.0, 2.0], [3.0], [0.0, 1.0]), "got float64"),
        (lambda: oscr([1.0, 2.0], [3.0], [2, 1]), "1, 0 and -1"),
        (lambda: oscr([1.0, 2.0], [3.0], [-1, -1]), "right must be known for at least one image"),
        (lambda: scod_risk([1.0], [2.0], [True], coverage=0), "coverage must be above 0"),
        (lambda: scod_risk([1.0], [2.0], [True], coverage=1.1), "coverage must lie in"),
        (lambda: scod_aurc([1.0], [2.0], [True], ood_cost=-1), "ood_cost must lie in"),
        (lambda: augrc([1.0, 2.0], [0, 1]), r"right must be one truth value per score, \(2,\); got int64 \(2,\)"),
    ):
        with pytest.raises(InputError, match=message):
            call()
