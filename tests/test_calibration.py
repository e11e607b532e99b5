"""The guarantees of the thresholds, by simulation; their arithmetic, against exact fractions and SciPy."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from scipy.stats import beta, binom

from kedge.calibration import allowed, fit_temperature, is_ood, p_values, temperature_of_known, threshold
from kedge.errors import InputError, KedgeWarning

INF, NAN = math.inf, math.nan

tied = st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF]), min_size=1, max_size=60)
varied = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=30)
shares = st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99])


def quiet_threshold(*args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KedgeWarning)
        return threshold(*args)


def exact_p(calibration, score):
    return Fraction(1 + sum(c >= score for c in calibration), len(calibration) + 1)


def uniform(draws, n, seed):
    """Calibration sets of scores uniform on [0, 1]: the chance to flag an ID image is then 1 - threshold."""
    return torch.rand(draws, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# p-values and decisions.


@given(calibration=tied | varied, scores=tied | varied, alpha=shares)
def test_p_values_and_flags_are_those_of_the_definition_in_exact_arithmetic(calibration, scores, alpha):
    p = p_values(torch.tensor(calibration), torch.tensor(scores))
    assert p.dtype == torch.float64
    assert p.tolist() == [float(exact_p(calibration, s)) for s in scores]
    flags = is_ood(torch.tensor(calibration), torch.tensor(scores), alpha)
    assert flags.tolist() == [exact_p(calibration, s) <= Fraction(str(alpha)) for s in scores]


@given(calibration=tied | varied, scores=tied | varied, alpha=shares, delta=st.none() | shares)
def test_an_image_is_flagged_if_its_score_is_above_the_threshold(calibration, scores, alpha, delta):
    calibration, scores = torch.tensor(calibration), torch.tensor([*scores, *calibration, INF, -INF])
    flags = is_ood(calibration, scores, alpha, delta)
    assert flags.dtype == torch.bool
    assert flags.equal(scores > quiet_threshold(calibration, alpha, delta))


def test_order_dtype_and_shape():
    calibration = torch.tensor([3.0, 1.0, 2.0])
    scores = torch.tensor([[0.0, 1.0], [2.5, 4.0]])
    p = p_values(calibration, scores)
    assert p.tolist() == [[1.0, 1.0], [0.5, 0.25]]
    assert calibration.tolist() == [3.0, 1.0, 2.0]  # unchanged
    assert p_values(calibration.sort().values, scores).equal(p)
    assert p_values(calibration.bfloat16(), scores.half().T.requires_grad_()).equal(p.T)
    assert p_values(calibration, torch.tensor(2)).item() == 0.75  # {3, 2} of three reach 2
    assert p_values(calibration, torch.empty(0)).shape == (0,)


def test_a_float32_score_is_not_rounded_onto_a_float64_calibration_score():
    calibration = torch.tensor([0.1] * 19, dtype=torch.float64)  # as float32, 0.1 lies just above it
    assert is_ood(calibration, torch.tensor([0.1]), alpha=0.05).tolist() == [True]


# The guarantees.


@pytest.mark.parametrize(("n", "alpha"), [(19, 0.05), (25, 0.05), (99, 0.05), (200, 0.05), (50, 0.2)])
def test_on_average_over_calibration_sets_at_most_alpha_of_id_is_flagged(n, alpha):
    flagged = np.array([1 - threshold(row, alpha) for row in uniform(2000, n, seed=n)])
    error = flagged.std() / math.sqrt(2000)
    assert flagged.mean() <= alpha + 3 * error
    assert flagged.mean() >= alpha - 1 / (n + 1) - 3 * error  # and wastes less than one rank


def test_the_average_guarantee_holds_for_fresh_images_and_tied_scores():
    """Whole scores tie often; ties make the rule flag fewer images, never more."""
    generator = torch.Generator().manual_seed(0)
    calibration = torch.randint(30, (2000, 60), generator=generator)
    fresh = torch.randint(30, (2000, 20), generator=generator)
    flagged = torch.stack([is_ood(c, f, 0.1) for c, f in zip(calibration, fresh, strict=True)]).double().mean(dim=1)
    assert flagged.mean() <= 0.1 + 3 * flagged.std() / math.sqrt(2000)
    assert flagged.mean() > 0.03


@pytest.mark.parametrize(("n", "delta"), [(59, 0.05), (100, 0.1), (300, 0.1), (300, 0.5)])
def test_with_delta_the_guarantee_holds_for_a_share_1_minus_delta_of_calibration_sets(n, delta):
    calibration = uniform(2000, n, seed=n)
    kept = np.mean([1 - threshold(row, 0.05, delta) <= 0.05 for row in calibration])
    assert kept >= 1 - delta - 3 * math.sqrt(delta * (1 - delta) / 2000)
    k = allowed(n, 0.05, delta)
    one_more = np.array([1 - float(row.sort().values[-k - 1]) for row in calibration])
    assert np.mean(one_more <= 0.05) < 1 - delta  # the next rank would break it


# The counts.


@given(n=st.integers(1, 10**6), thousandths=st.integers(1, 999))
def test_allowed_is_the_largest_count_whose_share_fits(n, thousandths):
    k = allowed(n, thousandths / 1000)
    assert 1000 * k <= thousandths * (n + 1) < 1000 * (k + 1)


@given(
    n=st.integers(1, 3000),
    alpha=st.sampled_from([0.95, 0.5, 0.1, 0.05, 0.01, 0.001]),
    delta=st.sampled_from([0.987, 0.53, 0.197, 0.099, 0.047, 0.0099, 0.00001]),
)
def test_allowed_with_delta_is_the_binomial_bound(n, alpha, delta):
    keeps = binom.sf(np.arange(n + 1) - 1, n, alpha) >= 1 - delta  # by k
    assert allowed(n, alpha, delta) == np.flatnonzero(keeps).max()


@pytest.mark.parametrize("n", [10**4, 10**5, 10**6])
@pytest.mark.parametrize("alpha", [0.5, 0.05, 0.0001])
@pytest.mark.parametrize("delta", [0.9, 0.1, 1e-10])
def test_allowed_with_delta_holds_for_large_sets(n, alpha, delta):
    k = allowed(n, alpha, delta)
    if k > 0:
        assert beta.sf(alpha, k, n + 1 - k) <= delta
    assert beta.sf(alpha, k + 1, n - k) > delta


# Too few images, bad arguments.


@pytest.mark.parametrize(
    ("alpha", "delta", "needed"),
    [(0.05, None, 19), (0.1, None, 9), (0.01, None, 99), (0.3, None, 3), (0.05, 0.05, 59), (0.1, 0.01, 44)],
)
def test_too_few_scores_flag_nothing_and_the_warning_names_how_many_are_needed(alpha, delta, needed):
    few, enough = torch.zeros(needed - 1), torch.zeros(needed)
    with pytest.warns(KedgeWarning, match=f"{needed - 1} calibration scores.*at least {needed} held-out images$"):
        assert threshold(few, alpha, delta) == INF
    assert not is_ood(few, torch.tensor([INF]), alpha, delta).any()
    assert threshold(enough, alpha, delta) == 0  # no warning, which pytest would raise
    assert is_ood(enough, torch.tensor([1.0]), alpha, delta).all()


def test_of_halved_images_the_warning_names_how_many_to_split():
    """A random half of that many holds as many as the threshold needs in 99 of 100 cases, and of fewer in less."""
    for alpha, delta in ((0.05, None), (0.01, None), (0.05, 0.05)):
        with pytest.warns(KedgeWarning, match="about half of which the method learns from") as caught:
            threshold(torch.zeros(1), alpha, delta, halved=True)
        needed = int(str(caught[0].message).split("at least ")[1].split()[0])
        fewest = next(n for n in range(1, 1000) if allowed(n, alpha, delta))
        assert binom.sf(fewest - 1, needed, 0.5) >= 0.99 > binom.sf(fewest - 1, needed - 4, 0.5)


@given(alpha=st.integers(1, 999).map(lambda i: i / 1000), delta=st.none() | shares)
def test_the_number_named_is_the_smallest_that_can_flag(alpha, delta):
    if allowed(1, alpha, delta) > 0:
        return
    with pytest.warns(KedgeWarning) as caught:
        threshold(torch.zeros(1), alpha, delta)
    needed = int(str(caught[0].message).split()[-3])
    assert allowed(needed, alpha, delta) >= 1
    assert allowed(needed - 1, alpha, delta) == 0


@pytest.mark.parametrize("value", [0, 1, -0.1, 95, NAN])
def test_alpha_and_delta_outside_0_to_1_are_refused(value):
    zeros = torch.zeros(30)
    for call in (lambda: allowed(10, value), lambda: threshold(zeros, value), lambda: is_ood(zeros, zeros, value)):
        with pytest.raises(InputError, match="alpha"):
            call()
    with pytest.raises(InputError, match="delta"):
        allowed(10, 0.05, value)


def test_bad_scores_are_refused():
    calls = (p_values, lambda c, s: is_ood(c, s, 0.05), lambda c, s: threshold(c, 0.05))
    for wrong in (torch.empty(0), torch.zeros(2, 2), torch.tensor(1.0), torch.tensor([0.0, NAN])):
        for call in calls:
            with pytest.raises(InputError, match="calibration"):
                call(wrong, torch.zeros(1))
    for call in calls[:2]:
        with pytest.raises(InputError, match="scores must not hold NaN; 1 of 2"):
            call(torch.zeros(30), torch.tensor([NAN, 1.0]))
    with pytest.raises(InputError, match="n must be"):
        allowed(0, 0.05)


# Temperature.


def drawn_from(logits, temperature, seed):
    """Labels whose true distribution is softmax(logits / temperature)."""
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def loss(logits, labels, temperature):
    rows = log_softmax(logits.double().numpy() / temperature, axis=-1)
    return -rows[np.arange(len(rows)), labels.numpy()].mean()


@pytest.mark.parametrize("seed", range(5))
def test_the_temperature_minimises_the_likelihood_loss(seed):
    logits = 5 * torch.randn(300, 4, generator=torch.Generator().manual_seed(seed))
    labels = drawn_from(logits, 1.0 + seed, seed)
    best = minimize_scalar(
        lambda log_t: loss(logits, labels, math.exp(log_t)), bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}
    )
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-5)


def test_without_an_optimum_inside_the_ends_are_returned():
    logits = torch.eye(3).requires_grad_()
    assert fit_temperature(logits, torch.arange(3)) == 1e-3  # always right: the sharper the better
    assert fit_temperature(-logits, torch.arange(3)) == 1e3  # always wrong: the flatter the better
    assert fit_temperature(torch.ones(3, 3), torch.arange(3)) == 1  # nothing to choose


def test_only_images_with_a_label_count_and_only_if_one_is_misclassified():
    logits = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    labels = drawn_from(logits, 2.0, seed=1)
    some = torch.where(torch.arange(200) % 3 == 0, -1, labels)
    assert temperature_of_known(logits, some) == fit_temperature(logits[some >= 0], labels[some >= 0])
    assert temperature_of_known(logits, logits.argmax(dim=1)) == 1
    assert temperature_of_known(logits, torch.full((200,), -1)) == 1


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), [0, 0, 0], "logits must be"),
        (torch.zeros(0, 3), [], "logits must be"),
        (torch.zeros(2, 3), [0, 0, 0], "labels must be"),
        (torch.zeros(2, 3), [0.0, 0.0], "whole class numbers"),
        (torch.zeros(2, 3), [0, 3], r"labels must lie in 0\.\.2"),
        (torch.zeros(2, 3), [-1, 0], r"labels must lie in 0\.\.2"),
        (torch.tensor([[NAN, 0.0]]), [0], "logits must be finite"),
    ],
)
def test_bad_logits_and_labels_are_refused(logits, labels, message):
    with pytest.raises(InputError, match=message):
        fit_temperature(logits, torch.tensor(labels))
