"""Drift: ranks and p-values against SciPy and naive loops; the guarantees about false alarms, by simulation."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad

from kedge.drift import Martingale, WindowTest, history
from kedge.drift.martingale import JUMPS, first_shares, payoffs, play
from kedge.drift.twosample import ENOUGH, MOST_TIES, p_any, p_up, p_up_permuted, ranks
from kedge.errors import InputError

INF, NAN = math.inf, math.nan

tied = st.lists(st.integers(0, 4).map(float), min_size=2, max_size=12)
spread = st.lists(st.floats(-10, 10), min_size=2, max_size=12)


def normal(rng, size):
    return rng.normal(size=size)


def rounded(rng, size):
    return np.round(rng.normal(size=size))


def saturated(rng, size):
    return np.maximum(rng.normal(size=size), 0.5)  # the lower 69 % tie, which skews the rank sum


def standard_error(share, runs):
    return math.sqrt(share * (1 - share) / runs)


def one(window, calibration):
    return ranks(np.array([window], dtype=float), np.sort(calibration).astype(float))


def every_order(window, calibration):
    """Each choice of the window out of the pooled scores, with the rest."""
    pooled = [*window, *calibration]
    for chosen in itertools.combinations(range(len(pooled)), len(window)):
        rest = set(range(len(pooled))) - set(chosen)
        yield [pooled[i] for i in chosen], [pooled[i] for i in rest]


@given(window=tied | spread, calibration=tied | spread)
def test_statistics_and_the_normal_p_value_are_scipys(window, calibration):
    r = one(window, calibration)
    assert r.distance[0] / (r.n * r.m) == pytest.approx(stats.ks_2samp(window, calibration).statistic, abs=1e-12)
    reference = stats.mannwhitneyu(window, calibration, alternative="greater", method="asymptotic")
    assert r.wins[0] == reference.statistic
    expected = 1.0 if len({*window, *calibration}) == 1 else reference.pvalue  # SciPy divides by 0
    assert p_up(r)[0] == pytest.approx(expected, rel=1e-9)


def test_p_values_and_moments_are_those_of_all_orders():
    for values in (2, 3, 5, 1000):
        rng = np.random.default_rng(values)
        for _ in range(4):
            window, calibration = rng.integers(values, size=4), rng.integers(values, size=6)
            r = one(window, calibration)
            orders = [one(a, b) for a, b in every_order(window, calibration)]  # 210
            distances, wins = (np.array([getattr(o, name)[0] for o in orders]) for name in ("distance", "wins"))
            assert p_any(r)[0] == pytest.approx(np.mean(distances >= r.distance[0]), rel=1e-9)
            assert r.deviation[0] == pytest.approx(wins.std())


def test_without_ties_p_any_is_scipys_exact_one_and_far_tails_keep_their_digits():
    for n, m in ((20, 20), (100, 30), (97, 41)):
        rng = np.random.default_rng(n)
        for shift in (0, 0.5, 1.5):
            window, calibration = rng.normal(loc=shift, size=m), rng.normal(size=n)
            expected = stats.ks_2samp(window, calibration, method="exact").pvalue
            assert p_any(one(window, calibration))[0] == pytest.approx(expected, rel=1e-7)
    far = p_any(one(np.arange(100.0) + 1000, np.arange(900.0)))[0]
    assert far == pytest.approx(2 / math.comb(1000, 100), rel=1e-9)  # 1e-140


def test_without_ties_the_normal_tail_is_on_the_safe_side():
    for n, m, most in ((20, 20, 2.1), (100, 40, 1.25), (400, 100, 1.15)):
        for z in (2.0, 3.0, 3.5):
            wins = round(n * m / 2 + z * math.sqrt(n * m * (n + m + 1) / 12))
            places = np.full(m, wins // m)  # of a window that wins so many pairs, without ties
            places[: wins % m] += 1
            window = places - 0.5 + np.linspace(0, 0.4, m)
            a, b = stats.mannwhitneyu(window, np.arange(n), alternative="greater", method="exact")
            assert a == wins
            assert 1 <= p_up(one(window, np.arange(n)))[0] / b < most


def test_permutations_give_the_hypergeometric_tail_and_that_of_all_orders():
    window, calibration = np.array([1.0] * 4 + [0.0] * 36), np.array([1.0] * 6 + [0.0] * 154)
    exact = stats.hypergeom.sf(3, 200, 10, 40)  # at least 4 of the 10 ones among 40 of 200
    several = np.array([1.0, 1.0, 3.0, 0.0]), np.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0])
    wins = np.array([one(a, b).wins[0] for a, b in every_order(*several)])  # 330; ties rank in their middle
    for scores, p, draws in (
        ((window, calibration), exact, 200 * math.ceil(ENOUGH / exact)),
        (several, np.mean(wins >= one(*several).wins[0]), 9999),
    ):
        drawn = [p_up_permuted(*scores, draws, np.random.default_rng(seed)) for seed in range(40)]
        relative = 1 / math.sqrt(ENOUGH * len(drawn))  # waiting for the 50th hit: negative binomial
        assert np.mean(drawn) == pytest.approx(p, rel=3 * relative + 1 / ENOUGH)
    few = p_up_permuted(window, calibration, 99, np.random.default_rng(0))
    assert (few * 100) == pytest.approx(round(few * 100))
    assert few >= 0.01  # never below 1 / (draws + 1)


def test_permuted_p_values_are_valid():
    for draws in (19, 400):  # without and with an early stop
        rng, runs = np.random.default_rng(0), 1000
        p = np.array([p_up_permuted(saturated(rng, 20), saturated(rng, 30), draws, rng) for _ in range(runs)])
        for level in (0.05, 0.2):
            assert level / 2 <= np.mean(p <= level) <= level + 3 * standard_error(level, runs)


def test_ties_are_the_share_of_the_rank_variance_that_they_remove():
    rng = np.random.default_rng(0)
    for window, calibration in ((normal(rng, 100), normal(rng, 1000)), (saturated(rng, 30), saturated(rng, 50))):
        pooled = np.append(window, calibration)
        expected = 1 - stats.rankdata(pooled).var() / stats.rankdata(pooled, "ordinal").var()
        assert one(window, calibration).ties[0] == pytest.approx(expected, abs=1e-12)
    assert one(np.round(normal(rng, 100), 3), np.round(normal(rng, 1000), 3)).ties[0] < MOST_TIES
    assert one(np.round(normal(rng, 100), 1), np.round(normal(rng, 1000), 1)).ties[0] > MOST_TIES


def test_each_comparison_is_scipys_of_that_window():
    for decimals, tolerance in ((9, 1e-6), (1, 3 / math.sqrt(ENOUGH))):  # the latter by permutations
        rng = np.random.default_rng(0)
        calibration, stream = np.round(normal(rng, 150), decimals), np.round(normal(rng, 100), decimals)
        compared = WindowTest(calibration, window=30, every=7, horizon=100).update(stream)
        assert [c.index for c in compared] == [29, 36, 43, 50, 57, 64, 71, 78, 85, 92, 99]
        for c in compared:
            window = stream[c.index - 29 : c.index + 1]
            up = stats.mannwhitneyu(window, calibration, alternative="greater", method="asymptotic")
            assert c.ks == pytest.approx(stats.ks_2samp(window, calibration).statistic)
            assert c.auroc == pytest.approx(up.statistic / (30 * 150))
            assert c.p_up == pytest.approx(up.pvalue, rel=tolerance)
            assert c.p == min(c.p_any, c.p_up)


def test_with_few_values_the_p_value_is_that_of_permutations_and_valid():
    """Of -1, 0 and 1: skewed, symmetric in large steps, and symmetric with heavy tails. The normal tail is too thin."""
    for low, zero, high, up in ((0, 97, 3, 3), (0, 50, 50, 16), (40, 1120, 40, 3)):
        calibration = np.repeat([-1.0, 0.0, 1.0], [low, zero, high])
        window = np.repeat([0.0, 1.0], [20 - up, up])
        (compared,) = WindowTest(calibration, window=20, horizon=20).update(window)
        counts = [(a, b) for a in range(21) for b in range(21 - a) if b - a >= up]
        sizes = [low, zero + 20 - up, high + up]
        exact = sum(stats.multivariate_hypergeom.pmf([a, 20 - a - b, b], sizes, 20) for a, b in counts)
        assert compared.p_up == pytest.approx(exact, rel=3 / math.sqrt(ENOUGH))
        assert p_up(one(window, calibration))[0] < 0.65 * exact
    # Over all orders of the same scores; the normal tail reaches this level of 2.6 % in 4.2 % of them.
    pooled, runs, small = np.repeat([0.0, 1.0], 60), 4000, 0
    level = float(p_up(one(np.repeat([0.0, 1.0], [6, 14]), np.repeat([0.0, 1.0], [54, 46])))[0]) + 1e-9
    for run in range(runs):
        scores = np.random.default_rng(run).permutation(pooled)
        small += WindowTest(scores[20:], window=20, horizon=20, seed=run).update(scores[:20])[0].p_up <= level
    assert small / runs <= level + 3 * standard_error(level, runs)


def test_the_settings_bound_the_permutations_and_share_alpha_among_the_tests_of_the_horizon():
    (compared,) = WindowTest([0.0] * 97 + [1.0] * 3, window=20, horizon=20, draws=99).update([1.0] * 20)
    assert (compared.p_up, compared.alarm) == (1 / 100, True)  # by the distance
    test = WindowTest(range(20), window=40, every=10, horizon=100, alpha=0.07)
    assert test.tests == len(test.update(range(100))) == 7
    assert test.threshold == pytest.approx(0.07 / 14)
    assert (WindowTest(range(20)).every, WindowTest(range(20)).tests) == (25, 397)


def test_the_alarm_is_raised_by_the_first_small_p_value_and_stays_and_equal_scores_raise_none():
    rng = np.random.default_rng(0)
    stream = np.concatenate([normal(rng, 200), 2 + normal(rng, 60), normal(rng, 200)])
    test = WindowTest(normal(rng, 200), window=40, every=10, horizon=1000)
    compared = test.update(stream)
    small = [c.p <= test.threshold for c in compared]
    assert not small[-1]  # over by now
    assert test.since == compared[small.index(True)].index
    assert [c.alarm for c in compared] == [c.index >= test.since for c in compared]
    test, martingale = WindowTest(np.ones(50)), Martingale(np.ones(50))
    for c in test.update(np.ones(300)):
        assert (c.ks, c.auroc, c.p_any, c.p_up, c.alarm) == (0, 0.5, pytest.approx(1), 1, False)
    p = [bet.p_value for bet in martingale.update(np.ones(300))]
    assert stats.kstest(p, "uniform").pvalue > 0.01  # all chance
    assert not martingale.alarm


@pytest.mark.parametrize(
    ("kind", "draw", "n", "stream", "runs", "least", "options"),
    [
        (WindowTest, normal, 200, 400, 150, 0.4, {"window": 40, "horizon": 400}),  # 37 tests, each sharing 30 scores
        (WindowTest, rounded, 200, 400, 150, 0.2, {"window": 40, "horizon": 400}),
        (WindowTest, saturated, 100, 400, 150, 0.1, {"window": 40, "horizon": 400}),
        (WindowTest, normal, 40, 400, 150, 0.1, {"window": 40, "horizon": 400}),
        *((Martingale, d, 20, 100, 80, 0, {"bounded": b}) for d in (normal, saturated) for b in (False, True)),
    ],
)
def test_any_false_alarm_has_probability_alpha(kind, draw, n, stream, runs, least, options):
    alpha, alarms = 0.2, 0
    for run in range(runs):
        rng = np.random.default_rng([run, n])
        instrument = kind(draw(rng, n), alpha=alpha, seed=run, **options)
        instrument.update(draw(rng, stream))
        alarms += instrument.alarm
    assert alarms / runs <= alpha + 3 * standard_error(alpha, runs)
    assert alarms / runs >= least * alpha  # the bound is not idle, though it is looser for few calibration scores


def test_windows_notice_a_shift_of_one_deviation_within_75_images_and_scores_that_narrow_or_fall():
    delays = []
    for run in range(30):
        rng = np.random.default_rng(run)
        test = WindowTest(normal(rng, 500))  # 100 images, every 25, alpha = 0.01 over 10,000
        test.update(np.append(normal(rng, 200), 1 + normal(rng, 100)))
        delays.append(INF if test.since is None else test.since - 199)
    assert np.mean(np.array(delays) <= 75) >= 0.95
    assert min(delays) > 0
    rng = np.random.default_rng(0)
    calibration = normal(rng, 500)
    for drifted in (normal(rng, 100) / 4, normal(rng, 100) - 1):  # which only the distance notices
        (compared,) = WindowTest(calibration).update(drifted)
        assert compared.alarm
        assert compared.p_up > 0.1
    (compared,) = WindowTest(calibration).update(normal(rng, 100) + 0.75)
    assert compared.p_up < compared.p_any  # and a shift upwards is what the rank sum is for


@pytest.mark.parametrize("draw", [normal, rounded])
def test_p_values_and_wealth_are_those_of_the_definition(draw):
    rng, smoothing = np.random.default_rng(1), np.random.Generator(np.random.PCG64(5))
    past, stream = draw(rng, 30).tolist(), draw(rng, 60).tolist()
    bets = Martingale(past, seed=5).update(stream)
    money = {(j, b): 1 / 24 for j in JUMPS.ravel().tolist() for b in range(6)}
    for score, bet in zip(stream, bets, strict=True):
        theta = 1 - smoothing.random()
        p = (sum(s > score for s in past) + theta * (1 + sum(s == score for s in past))) / (len(past) + 1)
        past.append(score)
        assert bet.p_value == pytest.approx(p, rel=1e-12)
        factors = [1, 2 * (1 - p), 0.5 * p**-0.5, 2 * p, 6 * p * (1 - p), 3 * (1 - 2 * p) ** 2]
        paid = {(j, b): money[j, b] * factors[b] for j, b in money}
        money = {(j, b): (1 - j) * paid[j, b] + j / 6 * sum(paid[j, c] for c in range(6)) for j, b in paid}
        assert bet.log_wealth == pytest.approx(math.log(sum(money.values())), abs=1e-9)


def p_values_of(calibration, stream, seed, **options):
    martingale = Martingale(calibration, seed=seed, **options)
    return np.array([martingale._p_value(score) for score in stream])  # what `update` bets on


@pytest.mark.parametrize(("draw", "bounded"), [(normal, False), (rounded, False), (normal, True)])
def test_p_values_are_uniform_and_independent_from_the_first_on(draw, bounded):
    runs, length = 2500, 4
    p = np.empty((runs, length))
    for run in range(runs):
        scores = draw(np.random.default_rng([run, 1]), 3 + length)
        p[run] = p_values_of(np.sort(scores[:3]), scores[3:], seed=run, bounded=bounded)
    assert stats.kstest(p.ravel(), "uniform").pvalue > 0.001
    for a, b in itertools.combinations(range(length), 2):
        cells = np.histogram2d(p[:, a], p[:, b], bins=4, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > 0.001  # 1/16 each: uniform and independent at once


def test_p_values_against_one_fixed_calibration_set_would_raise_false_alarms():
    """Why the past is part of the comparison: the fixed set's accidents look like drift, the longer the surer."""
    runs, level, rejected = 100, 0.05, np.zeros(2)
    for run in range(runs):
        rng = np.random.default_rng(run)
        calibration, stream = normal(rng, 100), normal(rng, 400)
        above = 100 - np.searchsorted(np.sort(calibration), stream)
        fixed = (above + rng.random(400)) / 101
        for i, p in enumerate((fixed, p_values_of(calibration, stream, seed=run))):
            rejected[i] += stats.kstest(p, "uniform").pvalue <= level
    fixed, growing = rejected / runs
    assert fixed > 0.35  # not 0.05
    assert growing <= level + 3 * standard_error(level, runs)


def test_every_bet_is_fair_so_the_wealth_ever_reaches_1_over_alpha_with_probability_alpha():
    for bet in range(6):
        mean, _ = quad(lambda p, bet=bet: payoffs(np.array([p]))[0, bet], 0, 1)
        assert mean == pytest.approx(1)
    assert (payoffs(np.linspace(1e-9, 1, 1001)) >= 0).all()
    games, rounds, rng = 1500, 1000, np.random.default_rng(0)
    shares, log_wealth, highest = np.stack([first_shares()] * games), np.zeros(games), np.zeros(games)
    for _ in range(rounds):
        shares, growth = play(shares, 1 - rng.random(games))
        log_wealth += np.log(growth)
        highest = np.maximum(highest, log_wealth)
    assert shares.sum(axis=(1, 2)) == pytest.approx(1)
    for alpha in (0.2, 0.05):
        reached = np.mean(highest >= -math.log(alpha))
        assert alpha / 3 <= reached <= alpha + 3 * standard_error(alpha, games)


def test_the_martingale_notices_drift_within_some_images():
    for drift, clean, within in (
        (lambda x: x + 1, 0, 60),
        (lambda x: x + 1, 1000, 75),
        (lambda x: x + 3, 300, 12),
        (lambda x: x - 1, 300, 80),
        (lambda x: x / 3, 300, 110),
        (lambda x: x * 3, 300, 60),
    ):
        noticed, runs = 0, 12
        for run in range(runs):
            rng = np.random.default_rng([run, 3])
            martingale = Martingale(normal(rng, 1000), seed=run)
            martingale.update(np.append(normal(rng, clean), drift(normal(rng, within))))
            noticed += martingale.alarm and martingale.since >= clean
        assert noticed >= 11


def test_with_a_bound_it_is_the_martingale_of_distances_in_half_precision():
    rng = np.random.default_rng(0)
    for scale, place in ((1e-7, 0.0), (1e-3, 0.9), (1.0, -3.0), (1e3, 0.0)):
        calibration, stream = place + scale * normal(rng, 200), place + scale * normal(rng, 100)
        bounded = Martingale(calibration, bounded=True)
        center = bounded._past.center
        rest = calibration[calibration != center]
        assert len(rest) == 199
        exact = Martingale((rest - center).astype(np.float16))
        assert bounded.update(stream) == exact.update((stream - center).astype(np.float16))
    beyond = Martingale([0.0, 0.0], bounded=True).update([1e9, 1e300, 1e5])
    assert beyond == Martingale([0.0]).update([65_504.0] * 3)  # where half precision ends all tie


def test_with_a_bound_drift_is_noticed_at_any_scale_and_place_in_memory_that_does_not_grow():
    for scale, place in ((1e-4, 1.0), (1.0, 0.0), (10.0, 1000.0)):
        rng = np.random.default_rng(0)
        martingale = Martingale(place + scale * normal(rng, 500), bounded=True)
        before = martingale._past._counts.nbytes
        martingale.update(place + scale * (1 + normal(rng, 100)))
        assert martingale.alarm
        assert martingale._past._counts.nbytes == before <= 2**19
        assert sum(martingale.state()["past"][2]) == 599


def test_wealth_is_a_float_of_any_size_and_no_draw_of_the_smoothing_pays_without_end():
    martingale = Martingale(np.zeros(10_000))
    (*_, last) = martingale.update(np.arange(1, 1001))  # each a new record
    assert 800 < last.log_wealth < INF  # e to that power is no float
    assert martingale.since < 5
    martingale = Martingale([1.0, 2.0])
    martingale._rng = SimpleNamespace(random=lambda: 0.0)  # the smallest
    assert [bet.p_value for bet in martingale.update([0.0, 9.0])] == [1.0, 0.25]


def instruments(calibration):
    return [
        WindowTest(calibration, window=30, every=4, horizon=200, seed=3),
        Martingale(calibration, seed=3),
        Martingale(calibration, seed=3, bounded=True),
    ]


@pytest.mark.parametrize("draw", [normal, saturated])  # of which the latter takes permutations
def test_batches_of_any_size_and_a_restart_give_the_same_states(draw):
    rng = np.random.default_rng(0)
    calibration, stream = draw(rng, 60), np.append(draw(rng, 60), 1 + draw(rng, 60))
    for number, whole in enumerate(instruments(calibration)):
        states = whole.update(stream)
        assert whole.alarm
        for sizes in (range(120), [0, 7, 7, 50, 113], [10], [29, 30], [90, 120]):
            parts, collected = instruments(calibration)[number], []
            for part in np.split(stream, sizes):
                collected += parts.update(part if len(part) != 1 else part[0])
                if len(sizes) < 10:
                    parts = type(parts).restore(json.loads(json.dumps(parts.state())))
            assert collected == states
            assert (parts.alarm, parts.since, parts.seen) == (whole.alarm, whole.since, whole.seen)
            assert parts.state() == whole.state()


def test_history_is_both_instruments():
    rng = np.random.default_rng(0)
    calibration, stream = normal(rng, 200), np.append(normal(rng, 100), 1 + normal(rng, 100))
    h = history(stream, calibration, window=40, every=5, alpha=0.02, seed=4)
    test = WindowTest(calibration, window=40, every=5, horizon=200, alpha=0.02, seed=4)
    martingale = Martingale(calibration, alpha=0.02, seed=4)
    compared, bets = test.update(stream), martingale.update(stream)
    fields = {"p_values": (bets, "p_value"), "windows": (compared, "index"), "p_any": (compared, "p_any")}
    for name, (states, field) in (fields | {"log_wealth": (bets, "log_wealth"), "p_up": (compared, "p_up")}).items():
        assert getattr(h, name).tolist() == [getattr(state, field) for state in states]
    assert (h.threshold, h.window_since, h.wealth_since) == (test.threshold, test.since, martingale.since)
    assert h.window_since is not None
    assert h.log_wealth[h.wealth_since] >= h.log_limit > h.log_wealth[h.wealth_since - 1]
    assert history(stream, calibration, window=40, horizon=1000).threshold == 0.01 / 2 / 97
    for length in (0, 1, 99):  # shorter than the window
        h = history(np.zeros(length), np.zeros(30))
        assert (len(h.log_wealth), len(h.windows), h.window_since, h.wealth_since) == (length, 0, None, None)


@pytest.mark.parametrize("seed", range(6))
def test_the_start_of_a_change_is_estimated_near_it(seed):
    rng = np.random.default_rng(seed)
    calibration = normal(rng, 300)
    moved = history(np.append(normal(rng, 200), 1.5 + normal(rng, 80)), calibration, window=40)
    assert abs(moved.start - 200) <= 15
    assert history(3 + normal(rng, 60), calibration, window=40).start <= 3
    windows = replace(moved, wealth_since=None)  # as if that test had raised no alarm
    assert windows.start == moved.window_since - 39
    assert replace(windows, window_since=None).start is None


def test_evidence_without_drift_is_as_rare_as_it_says():
    rng, runs = np.random.default_rng(5), 150
    chances = [history(normal(rng, 60), normal(rng, 40), window=20).chance for _ in range(runs)]
    for share in (0.05, 0.2, 0.5):
        assert np.mean(np.array(chances) <= share) <= share + 2 * standard_error(share, runs)
    h = history(2 + normal(rng, 100), normal(rng, 100), window=20)
    tests = (100 - 20) // 5 + 1
    by_windows = 2 * tests * min(*h.p_any, *h.p_up)
    assert h.chance == pytest.approx(2 * min(math.exp(-h.log_wealth.max()), by_windows))
    assert history(np.zeros(3), np.zeros(30)).chance <= 1


def test_tensors_lists_and_whole_numbers_are_scores_and_the_callers_arrays_are_left_alone():
    scores = torch.arange(40, dtype=torch.float32).requires_grad_()
    for make in (lambda c: WindowTest(c, window=20, horizon=50), Martingale):
        states = make(list(range(40))).update(scores.detach().numpy())
        assert make(scores).update(scores) == states
        assert make(scores.bfloat16()).update(range(40)) == states
    calibration, stream = np.arange(30.0)[::-1].copy(), np.arange(25.0)
    test, copy = (WindowTest(calibration, window=20, every=1, horizon=100) for _ in range(2))
    test.update(stream)
    copy.update(stream)
    stream[:] = 99
    assert test.update(1) == copy.update(1)
    assert calibration[0] == 29


BAD = [
    ([0.0, NAN], "must be finite; 1 of 2"),
    ([INF, -INF], "must be finite; 2 of 2"),
    (np.zeros((2, 2)), r"must be \(N,\).*got \(2, 2\)"),
    (["a"], "must hold real numbers"),
    ([[1.0], [1.0, 2.0]], "must be"),
]


def test_bad_scores_are_refused_and_change_nothing():
    for scores, message in BAD:
        for instrument in instruments(range(40)):
            before = instrument.state()
            with pytest.raises(InputError, match=f"scores {message}"):
                instrument.update(scores)
            assert instrument.state() == before
            with pytest.raises(InputError, match=f"calibration {message}"):
                type(instrument)(scores)
        for name, arguments in (("scores", (scores, range(40))), ("calibration", ([1.0], scores))):
            with pytest.raises(InputError, match=f"{name} {message}"):
                history(*arguments)


def test_bad_settings_are_refused():
    both = [("alpha", 0), ("alpha", 1.0), ("seed", -1), ("calibration", [])]
    windows = [("window", 19), ("every", 0), ("horizon", 99), ("draws", 0), ("calibration", range(19))]
    for kind, wrong in ((WindowTest, both + windows), (Martingale, both)):
        for name, value in wrong:
            with pytest.raises(InputError, match=f"{name} must"):
                kind(**{"calibration": range(30)} | {name: value})


def test_a_foreign_state_is_refused():
    test, martingale, _ = instruments(range(40))
    without = {key: value for key, value in martingale.state().items() if key != "past"}
    for kind, state, message in (
        (WindowTest, martingale.state(), r"state must be from state\(\)"),
        (Martingale, without, "past is missing or unknown"),
        (WindowTest, test.state() | {"recent": [NAN]}, "recent must be finite"),
        (Martingale, martingale.state() | {"shares": [[1.0]]}, "start anew"),
    ):
        with pytest.raises(InputError, match=message):
            kind.restore(state)
