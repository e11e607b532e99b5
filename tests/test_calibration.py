"""The promises of the thresholds, by simulation; their arithmetic, against exact fractions and SciPy."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from scipy.stats import beta, binom

from kedge.calibration import allowed, fit_temperature, is_ood, p_values, threshold
from kedge.errors import InputError, KedgeWarning

INF, NAN = math.inf, math.nan

tied = st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF]), min_size=1, max_size=60)
spread = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=30)
shares = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
quick = settings(max_examples=100, derandomize=True, deadline=None)


def quiet_threshold(*args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KedgeWarning)
        return threshold(*args)


def exact_p(calibration, score):
    return Fraction(1 + sum(c >= score for c in calibration), len(calibration) + 1)


# p-values and decisions.


@given(calibration=tied | spread, scores=tied | spread)
@quick
def test_p_values_are_the_counted_share(calibration, scores):
    p = p_values(torch.tensor(calibration), torch.tensor(scores))
    assert p.dtype == torch.float64
    assert p.tolist() == [float(exact_p(calibration, s)) for s in scores]


@given(calibration=tied | spread, scores=tied | spread, alpha=shares)
@quick
def test_is_ood_is_the_p_value_compared_in_exact_arithmetic(calibration, scores, alpha):
    flags = is_ood(torch.tensor(calibration), torch.tensor(scores), alpha)
    assert flags.tolist() == [exact_p(calibration, s) <= 1 - Fraction(str(alpha)) for s in scores]


@given(calibration=tied | spread, scores=tied | spread, alpha=shares, delta=st.none() | shares)
@quick
def test_is_ood_is_a_score_above_the_threshold(calibration, scores, alpha, delta):
    calibration, scores = torch.tensor(calibration), torch.tensor([*scores, *calibration, INF, -INF])
    flags = is_ood(calibration, scores, alpha, delta)
    assert flags.dtype == torch.bool
    assert flags.equal(scores > quiet_threshold(calibration, alpha, delta))


def test_order_dtype_and_shape():
    calibration = torch.tensor([3.0, 1.0, 2.0])
    scores = torch.tensor([[0.0, 1.0], [2.5, 4.0]])
    p = p_values(calibration, scores)
    assert p.tolist() == [[1.0, 1.0], [0.5, 0.25]]
    assert calibration.tolist() == [3.0, 1.0, 2.0]  # left alone
    assert p_values(calibration.sort().values, scores).equal(p)
    assert p_values(calibration.bfloat16(), scores.half().T.requires_grad_()).equal(p.T)
    assert p_values(calibration, torch.tensor(2)).item() == 0.75  # {3, 2} of three reach 2
    assert p_values(calibration, torch.empty(0)).shape == (0,)


def test_a_float32_score_is_not_rounded_onto_a_float64_calibration_score():
    calibration = torch.tensor([0.1] * 19, dtype=torch.float64)  # as float32, 0.1 lies just above it
    assert is_ood(calibration, torch.tensor([0.1]), alpha=0.05).tolist() == [True]


# The promises. The score is uniform on [0, 1], so the chance to flag an ID image is 1 - threshold.


@pytest.mark.parametrize(("n", "alpha"), [(19, 0.95), (25, 0.95), (99, 0.95), (200, 0.95), (50, 0.8)])
def test_on_average_over_calibration_sets_at_most_1_minus_tpr_of_id_is_flagged(n, alpha):
    draws = 2000
    calibration = torch.rand(draws, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    flagged = np.array([1 - threshold(row, alpha) for row in calibration])
    error = flagged.std() / math.sqrt(draws)
    assert flagged.mean() <= 1 - alpha + 3 * error
    assert flagged.mean() >= 1 - alpha - 1 / (n + 1) - 3 * error  # and wastes less than one rank


def test_the_average_promise_holds_for_fresh_images_and_tied_scores():
    """Whole scores tie often; ties make the rule flag fewer images, never more."""
    generator = torch.Generator().manual_seed(0)
    calibration = torch.randint(30, (2000, 60), generator=generator)
    fresh = torch.randint(30, (2000, 20), generator=generator)
    flagged = torch.stack([is_ood(c, f, 0.9) for c, f in zip(calibration, fresh, strict=True)]).double().mean(dim=1)
    assert flagged.mean() <= 0.1 + 3 * flagged.std() / math.sqrt(2000)
    assert flagged.mean() > 0.03


@pytest.mark.parametrize(("n", "delta"), [(59, 0.95), (100, 0.9), (300, 0.9), (300, 0.5)])
def test_with_confidence_the_promise_holds_for_that_share_of_calibration_sets(n, delta):
    draws = 2000
    calibration = torch.rand(draws, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    flagged = np.array([1 - threshold(row, 0.95, delta) for row in calibration])
    kept = np.mean(flagged <= 0.05)
    assert kept >= delta - 3 * math.sqrt(delta * (1 - delta) / draws)
    k = allowed(n, 0.95, delta)
    one_more = np.array([1 - float(row.sort().values[-k - 1]) for row in calibration])
    assert np.mean(one_more <= 0.05) < delta  # the next rank would break it


def test_without_confidence_many_single_calibration_sets_miss():
    """Why ``delta`` exists: the average promise alone is broken by nearly every second set."""
    calibration = torch.rand(1000, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = np.mean([1 - threshold(row, 0.95) <= 0.05 for row in calibration])
    assert 0.4 < kept < 0.65


# The counts.


def test_allowed_reads_the_rate_as_the_decimal_it_is():
    assert (1 - 0.9) * 10 < 1  # floats alone would allow 0 of 9
    assert [allowed(n, 0.95) for n in (1, 18, 19, 38, 39, 999)] == [0, 0, 1, 1, 2, 50]
    assert [allowed(9, alpha) for alpha in (0.9, 0.8, 0.7, 0.6, 0.1)] == [1, 2, 3, 4, 9]


@given(n=st.integers(1, 10**6), thousandths=st.integers(1, 999))
@quick
def test_allowed_is_the_largest_count_whose_share_fits(n, thousandths):
    k = allowed(n, thousandths / 1000)
    assert 1000 * k <= (1000 - thousandths) * (n + 1) < 1000 * (k + 1)


@given(
    n=st.integers(1, 3000),
    alpha=st.sampled_from([0.05, 0.5, 0.9, 0.95, 0.99, 0.999]),
    delta=st.sampled_from([0.013, 0.47, 0.803, 0.901, 0.953, 0.9901, 0.99999]),
)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_allowed_with_confidence_is_the_binomial_bound(n, alpha, delta):
    keeps = binom.sf(np.arange(n + 1) - 1, n, 1 - alpha) >= delta  # by k
    assert allowed(n, alpha, delta) == np.flatnonzero(keeps).max()


@pytest.mark.parametrize("n", [10**4, 10**5, 10**6])
@pytest.mark.parametrize("alpha", [0.5, 0.95, 0.9999])
@pytest.mark.parametrize("delta", [0.1, 0.9, 1 - 1e-10])
def test_allowed_with_confidence_holds_for_large_sets(n, alpha, delta):
    k = allowed(n, alpha, delta)
    if k > 0:
        assert beta.cdf(1 - alpha, k, n + 1 - k) >= delta
    assert beta.cdf(1 - alpha, k + 1, n - k) < delta


# Too few images, bad arguments.


@pytest.mark.parametrize(
    ("alpha", "delta", "needed"),
    [(0.95, None, 19), (0.9, None, 9), (0.99, None, 99), (0.7, None, 3), (0.95, 0.95, 59), (0.9, 0.99, 44)],
)
def test_too_few_scores_flag_nothing_and_the_warning_names_how_many_are_needed(alpha, delta, needed):
    few, enough = torch.zeros(needed - 1), torch.zeros(needed)
    with pytest.warns(KedgeWarning, match=f"{needed - 1} calibration scores.*at least {needed}$"):
        assert threshold(few, alpha, delta) == INF
    assert not is_ood(few, torch.tensor([INF]), alpha, delta).any()
    assert threshold(enough, alpha, delta) == 0  # no warning, which pytest would raise
    assert is_ood(enough, torch.tensor([1.0]), alpha, delta).all()


@given(alpha=st.integers(1, 999).map(lambda i: i / 1000), delta=st.none() | shares)
@quick
def test_the_number_named_is_the_smallest_that_can_flag(alpha, delta):
    if allowed(1, alpha, delta) > 0:
        return
    with pytest.warns(KedgeWarning) as caught:
        threshold(torch.zeros(1), alpha, delta)
    needed = int(str(caught[0].message).split()[-1])
    assert allowed(needed, alpha, delta) >= 1
    assert allowed(needed - 1, alpha, delta) == 0


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.5, 95, NAN])
def test_a_rate_outside_0_to_1_is_refused(alpha):
    for call in (
        lambda: allowed(10, alpha),
        lambda: threshold(torch.zeros(30), alpha),
        lambda: is_ood(torch.zeros(30), torch.zeros(1), alpha),
    ):
        with pytest.raises(InputError, match="alpha"):
            call()


@pytest.mark.parametrize("delta", [0, 1, 2, NAN])
def test_a_confidence_outside_0_to_1_is_refused(delta):
    with pytest.raises(InputError, match="delta"):
        allowed(10, 0.95, delta)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (torch.empty(0), r"calibration must be \(n,\).*got \(0,\)"),
        (torch.zeros(2, 2), r"calibration must be \(n,\).*got \(2, 2\)"),
        (torch.tensor(1.0), r"calibration must be \(n,\).*got \(\)"),
        (torch.tensor([0.0, NAN]), "calibration must not hold NaN; 1 of 2"),
    ],
)
def test_bad_calibration_scores_are_refused(calibration, message):
    for call in (
        lambda: p_values(calibration, torch.zeros(1)),
        lambda: is_ood(calibration, torch.zeros(1), 0.95),
        lambda: threshold(calibration, 0.95),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_nan_score_is_refused():
    for call in (p_values, lambda c, s: is_ood(c, s, 0.95)):
        with pytest.raises(InputError, match="scores must not hold NaN; 1 of 2"):
            call(torch.zeros(30), torch.tensor([NAN, 1.0]))


def test_allowed_needs_a_calibration_set():
    with pytest.raises(InputError, match="n must be"):
        allowed(0, 0.95)


# Temperature.


def drawn_from(logits, temperature, seed):
    """Labels whose true distribution is softmax(logits / temperature)."""
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def loss(logits, labels, temperature):
    rows = log_softmax(logits.double().numpy() / temperature, axis=-1)
    return -rows[np.arange(len(rows)), labels.numpy()].mean()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_a_known_temperature_is_found_again(temperature):
    logits = 3 * torch.randn(5_000, 10, generator=torch.Generator().manual_seed(0))
    labels = drawn_from(logits, temperature, seed=1)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_the_temperature_minimises_the_likelihood_loss(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(300, 4, generator=generator)
    labels = drawn_from(logits, 1.0 + seed, seed)
    best = minimize_scalar(
        lambda log_t: loss(logits, labels, math.exp(log_t)), bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}
    )
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-5)


def test_a_shift_of_the_logits_changes_nothing_and_a_factor_scales_the_temperature():
    logits = torch.randn(500, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = drawn_from(logits, 0.7, seed=3)
    fitted = fit_temperature(logits, labels)
    assert fit_temperature(logits + torch.arange(500)[:, None], labels) == pytest.approx(fitted, rel=1e-9)
    assert fit_temperature(10 * logits, labels) == pytest.approx(10 * fitted, rel=1e-9)


def test_without_an_optimum_inside_the_ends_are_returned():
    logits = torch.eye(3).requires_grad_()
    assert fit_temperature(logits, torch.arange(3)) == 1e-3  # always right: the sharper the better
    assert fit_temperature(-logits, torch.arange(3)) == 1e3  # always wrong: the flatter the better
    assert fit_temperature(torch.ones(3, 3), torch.arange(3)) == 1  # nothing to choose


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"logits must be \(B, C\).*got \(3,\)"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), r"logits must be \(B, C\).*got \(0, 3\)"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), r"labels must be \(2,\).*got \(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2), "whole class numbers.*float32"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), r"labels must lie in 0\.\.2, got 0\.\.3"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), r"labels must lie in 0\.\.2, got -1\.\.0"),
        (torch.tensor([[NAN, 0.0]]), torch.tensor([0]), "logits must be finite; 1 of 2"),
    ],
)
def test_bad_logits_and_labels_are_refused(logits, labels, message):
    with pytest.raises(InputError, match=message):
        fit_temperature(logits, labels)
