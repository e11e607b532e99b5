"""Rules of combination against SciPy and plain loops."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from kedge.detectors.rules import (
    RULES,
    by_moments,
    by_quantiles,
    correlation,
    log_p_values,
    normal_scores,
    raising_weights,
)


def scores(n=40, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, dtype=torch.float64, generator=generator)
    return z + 0.5 * z[:, :1] ** 2  # skewed and correlated


def learned(z):
    return {"knots": z.sort(dim=0).values, "correlation": correlation(z)}


def test_standardisation_is_by_mean_and_deviation_or_by_median_and_quartiles():
    z = scores()
    for (centre, scale), expected in (
        (by_moments(z), (z.numpy().mean(0), z.numpy().std(0, ddof=1))),
        (by_quantiles(z), (np.median(z, axis=0), stats.iqr(z, axis=0, scale="normal"))),
    ):
        np.testing.assert_allclose(centre, expected[0])
        np.testing.assert_allclose(scale, expected[1], rtol=1e-7)


def test_a_score_that_never_varies_is_left_as_it_is():
    same = torch.full((9, 1), 3.0, dtype=torch.float64)
    assert by_moments(same) == by_quantiles(same) == (3.0, 1.0)
    assert log_p_values(same, same).isfinite().all()


def test_the_p_value_of_a_held_out_score_is_its_rank_and_the_tail_is_exponential():
    x = scores(60, 1)[:, 0].sort().values  # a tail of six
    ranks = (60 - torch.arange(60)) / 61
    p = log_p_values(x[:, None], x[:, None])[:, 0].exp()
    torch.testing.assert_close(p[:54], ranks[:54].double())
    excess = float((x[54:] - x[53]).mean())
    for beyond in (0.1, 3.0, 1000.0):
        found = float(log_p_values((x[53] + beyond).view(1, 1), x[:, None]))
        assert found == pytest.approx(math.log(7 / 61) - beyond / excess)
    middle = log_p_values(((x[10] + x[11]) / 2).view(1, 1), x[:, None]).exp()
    assert float(middle) == pytest.approx(math.sqrt(50 * 49) / 61)


@pytest.mark.parametrize("n", [6, 20, 300])
def test_a_larger_score_always_has_a_smaller_p_value(n):
    x = scores(n, 1)
    grid = torch.linspace(float(x.min()) - 5, float(x.max()) + 50, 2000, dtype=torch.float64)[:, None]
    log_p = log_p_values(torch.cat([grid, x]).sort(dim=0).values, x.sort(dim=0).values)[:, 0]
    assert (log_p.diff() < 0).all()
    assert (log_p < 0).all()


def test_p_values_of_fresh_scores_are_nearly_uniform():
    knots, fresh = scores(300, 1).sort(dim=0).values, scores(5000, 1, seed=1)
    p = log_p_values(fresh, knots).exp()[:, 0]
    assert stats.kstest(p.numpy(), "uniform").statistic < 0.06


def test_normal_scores_are_those_of_scipy():
    log_p = torch.tensor([-1e4, -700.0, -50.0, -3.0, math.log(0.5), -0.1, -1e-9], dtype=torch.float64)
    z = normal_scores(log_p)
    np.testing.assert_allclose(stats.norm.logsf(z.numpy()), log_p.numpy(), rtol=1e-9)


def test_fisher_stouffer_and_the_smallest_are_those_of_scipy():
    z, fresh = scores(), scores(seed=1)
    state = learned(z)
    p = log_p_values(fresh, state["knots"]).exp().numpy()
    for rule, method in (("fisher", "fisher"), ("stouffer", "stouffer"), ("max", "tippett")):
        found = RULES[rule].combine(RULES[rule].evidence(fresh, state), state).numpy()
        expected = [stats.combine_pvalues(row, method=method) for row in p]
        if rule == "max":
            np.testing.assert_allclose(np.exp(-found), [each.pvalue for each in expected], rtol=1e-9)
        else:
            np.testing.assert_allclose(found, [each.statistic for each in expected], rtol=1e-9)


def test_a_part_that_is_surer_than_on_any_known_image_does_not_outweigh_another():
    z = torch.tensor([[1.0, 2.0], [9.0, -50.0], [9.0, -2.0], [-3.0, -4.0]], dtype=torch.float64)
    assert RULES["sum"].combine(z, {}).tolist() == [3, 7, 7, -4]


def test_the_smallest_p_value_keeps_its_order_where_it_is_tiny():
    evidence = torch.tensor([[29.0, 1.0], [30.0, 1.0], [30.1, 1.0], [900.0, 1.0]], dtype=torch.float64)
    found = RULES["max"].combine(evidence, {})
    torch.testing.assert_close(found, evidence[:, 0] - math.log(2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("d", [2, 3])
def test_the_one_sided_distance_is_that_to_the_nearest_point_without_a_raised_score(d):
    z, state = scores(30, d, seed=2), learned(scores(200, d))
    found = RULES["mahalanobis"].combine(z, state)
    factor = np.linalg.cholesky(np.linalg.inv(state["correlation"].numpy())).T  # |F (z - a)|^2
    for row, distance in zip(z.numpy(), found.tolist(), strict=True):
        # a = -b with b >= 0: minimise |F z + F b|
        _, nearest = optimize.nnls(factor, -factor @ row)
        expected = nearest if (row > 0).any() else row.max()
        assert distance == pytest.approx(expected, abs=1e-7)


def test_the_copula_is_the_one_sided_distance_of_normal_scores():
    z, rule = scores(), RULES["copula"]
    state = learned(z)
    evidence = rule.evidence(z, state)
    torch.testing.assert_close(evidence, normal_scores(log_p_values(z, state["knots"])))
    assert torch.equal(rule.combine(evidence, state), RULES["mahalanobis"].combine(evidence, state))


def test_the_correlation_is_shrunk_less_the_more_images_there_are():
    z = scores(4000)
    expected = np.corrcoef(z.T.numpy())
    np.testing.assert_allclose(correlation(z), expected, atol=0.01)
    few = correlation(z[:8])
    assert few.diagonal().allclose(torch.ones(3, dtype=torch.float64))
    assert (few - torch.eye(3)).norm() < (torch.tensor(np.corrcoef(z[:8].T.numpy())) - torch.eye(3)).norm()


def test_learned_weights_leave_out_a_part_that_speaks_for_outliers():
    inside = scores(100, 3)
    outside = scores(100, 3, seed=1) + torch.tensor([2.0, 0.0, -2.0])
    weights = raising_weights(inside, outside)
    assert weights[0] > 0 == weights[2]
    assert (weights >= 0).all()
    assert torch.equal(raising_weights(inside, inside - 1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_rises_with_every_score(name):
    rule, z = RULES[name], scores(200)
    state = {**learned(z), "centre": z.mean(0), "scale": z.std(0), "weights": torch.tensor([1.0, 2.0, 0.5])}
    before = rule.combine(rule.evidence(z, state), state)
    for part in range(3):
        raised = z.clone()
        raised[:, part] += 0.3
        assert (rule.combine(rule.evidence(raised, state), state) >= before - 1e-9).all()
