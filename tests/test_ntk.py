"""The neural tangent kernel of unanchored and anchored inputs, against finite networks, loops and worked-out orders."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.func import grad, vmap
from torch.nn.functional import normalize

from kedge.errors import InputError
from kedge.studies.theory import disagreement as by_distance
from kedge.studies.theory.approximation import approximation_errors
from kedge.studies.theory.disagreement import EDGES, ENSEMBLE, PER_ANCHOR, decision_tau, trained_with
from kedge.studies.theory.ntk import (
    anchored_kernel,
    approximate_anchored_kernel,
    dot_shift,
    dual_weights,
    effective_rank,
    encode,
    gamma,
    h_ntk,
    initial_kernel,
    on_sphere,
    predict,
    spectrum,
)
from kedge.studies.theory.page import EXPECTED, findings, ntk_page, run_ntk
from kedge.studies.theory.study import kernel_spectra, ntk_study, rank_correlation
from kedge.studies.theory.toy import ensemble, one_network, one_per_anchor, toy_problem, with_bias
from test_report import check


def rows(n, d, seed=0, unit=False):
    drawn = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normalize(drawn, dim=1) if unit else drawn


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance)


def naive_kernel(a, b):
    """The homogeneous kernel of two vectors, from the definition, with arccos."""
    dot, norms = float(a @ b), float(a.norm() * b.norm())
    return dot * (math.pi - math.acos(max(-1.0, min(1.0, dot / norms)))) / (2 * math.pi)


def network(weights, signs, a):
    """The two-layer network on one input."""
    return (signs * (weights @ a).relu()).sum() / math.sqrt(len(signs))


def finite(width, d, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(width, d, generator=generator, dtype=torch.float64)
    signs = 2.0 * torch.randint(2, (width,), generator=generator).double() - 1
    return weights, signs


# --- the kernel -------------------------------------------------------------------------------------------------------


def test_the_kernel_is_the_mean_product_of_gradients_of_wide_networks():
    x = rows(6, 3, seed=1) * torch.tensor([0.5, 1.0, 1.0, 2.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    anchors = rows(6, 3, seed=2)
    for inputs in (x, encode(x, anchors)):
        result, chunks, width = torch.zeros(6, 6, dtype=torch.float64), 4, 50_000
        for chunk in range(chunks):
            weights, signs = finite(width, inputs.shape[1], seed=chunk)
            gradients = vmap(grad(network), (None, None, 0))(weights, signs, inputs).flatten(1)  # (6, width * D)
            result += gradients @ gradients.T / chunks
        # A unit adds a . b times an indicator, whose deviation is at most one half.
        noise = (inputs @ inputs.T).abs() / 2 / math.sqrt(chunks * width)
        assert bool(((result - h_ntk(inputs, inputs)).abs() <= 5 * noise).all())


def test_at_known_angles_the_kernel_is_known():
    a = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    half, root = 0.5, math.sqrt(0.75)
    b = torch.tensor([[3, 0], [half, root], [0, 5], [-half, root], [-1, 0], [0, 0]], dtype=torch.float64)
    close(h_ntk(a, b), [[3, 1 / 3, 0, -1 / 6, 0, 0]])  # at 0, 60, 90, 120 and 180 degrees, and for no input at all
    angle = 1e-9  # loses no digits
    a, b = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64).split(1)
    assert float(0.5 - h_ntk(a, b)) == pytest.approx(angle / (2 * math.pi), rel=1e-6)


def test_the_kernel_is_its_definition_homogeneous_and_on_the_sphere_the_paper_s():
    a, b = rows(5, 4), rows(7, 4, seed=1)
    close(h_ntk(a, b), [[naive_kernel(one, other) for other in b] for one in a])
    close(h_ntk(3 * a, b / 2), 1.5 * h_ntk(a, b))
    a, b = normalize(a, dim=1), normalize(b, dim=1)
    close(h_ntk(a, b), on_sphere(a @ b.T))


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_kernels_are_positive_semidefinite(seed):
    x = rows(30, 2, seed)  # many more inputs than dimensions
    c = rows(30, 2, seed + 100)
    pairs = encode(torch.cat([x, x, x]), torch.cat([c, c.flip(0), c[:1].expand_as(x)]))
    for kernel in (h_ntk(x, x), anchored_kernel(x, x, c[0]), h_ntk(pairs, pairs), initial_kernel(pairs, pairs)):
        eigenvalues = torch.linalg.eigvalsh(kernel)
        assert float(eigenvalues[0]) >= -1e-13 * float(eigenvalues[-1])
        close(kernel, kernel.T)


def test_the_initial_kernel_is_the_covariance_of_untrained_networks():
    x = rows(4, 3, seed=3)
    weights, signs = finite(400_000, 3, seed=0)
    units = (x @ weights.T).relu() * signs  # (4, width)
    noise = (x.norm(dim=1)[:, None] * x.norm(dim=1)) * math.sqrt(1.5 / 400_000)  # E relu^4 = 3/2
    assert bool(((units @ units.T / 400_000 - initial_kernel(x, x)).abs() <= 5 * noise).all())
    close(initial_kernel(x, x).diagonal(), x.square().sum(dim=1) / 2)


# --- pairs and the approximations -------------------------------------------------------------------------------------


def test_pairs_hold_the_anchor_first_and_a_bias_is_a_coordinate_that_is_one():
    x, c = rows(3, 2), rows(3, 2, seed=1)
    assert torch.equal(encode(x, x), torch.cat([x, torch.zeros_like(x)], dim=1))
    assert torch.equal(encode(x, c[0]), torch.cat([c[:1].expand(3, 2), x - c[0]], dim=1))
    close(encode(with_bias(x), with_bias(c)), torch.cat([c, torch.ones(3, 1), x - c, torch.zeros(3, 1)], dim=1))


def test_the_anchored_kernel_is_that_of_pairs_whose_dot_product_falls_by_the_shift():
    x, z, c = rows(4, 3), rows(5, 3, seed=1), rows(1, 3, seed=2)[0]
    expected = [[naive_kernel(torch.cat([c, a - c]), torch.cat([c, b - c])) for b in z] for a in x]
    close(anchored_kernel(x, z, c), expected)
    close(encode(x, c) @ encode(z, c).T, x @ z.T - dot_shift(x, z, c))
    close(dot_shift(x, z, c), [[float(c @ (a + b - 2 * c)) for b in z] for a in x])


def test_gamma_is_the_paper_s_with_the_missing_factor():
    x, z, c = rows(4, 3, unit=True), rows(5, 3, seed=1, unit=True), 0.1 * rows(1, 3, seed=2)[0]
    result = gamma(x, z, c)
    for (i, a), (j, b) in itertools.product(enumerate(x), enumerate(z)):
        u, cv = float(a @ b), float(c @ (a + b - 2 * c))
        second = cv * (math.pi - math.acos(u)) / (2 * math.pi)
        third = cv * (u - cv) / (2 * math.pi * math.sqrt(1 - (u - cv) ** 2))
        assert float(result[i, j]) == pytest.approx(second + third, rel=1e-12)
    close(approximate_anchored_kernel(x, z, c), h_ntk(x, z) - result)
    for length in (1.0, 0.1):  # on the diagonal the first-order form is exact
        close(
            gamma(x, x, length * c, "first order").diagonal(),
            (h_ntk(x, x) - anchored_kernel(x, x, length * c)).diagonal(),
        )


# A pair of points and a direction for the anchor; lengths that halve.
X, Z = (torch.tensor([v], dtype=torch.float64) for v in ([1.0, 0.0, 0.0], [0.6, 0.8, 0.0]))
TOWARDS = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
LENGTHS = [2.0**-k for k in range(8, 14)]


@pytest.mark.parametrize(
    ("ratio", "z", "error", "smallest"),
    [
        # The paper's form against its own formula, against the exact kernel, and there on the diagonal.
        (
            4,
            Z,
            lambda z, c: on_sphere(X @ z.T - dot_shift(X, z, c)) - approximate_anchored_kernel(X, z, c),
            lambda d: -((0.6 - d) ** 2) * d**2 / (4 * math.pi * (1 - (0.6 - d) ** 2) ** 1.5),
        ),
        (
            2,
            Z,
            lambda z, c: approximate_anchored_kernel(X, z, c) - anchored_kernel(X, z, c),
            lambda d: -(0.6**2) * d / (2 * math.pi * 0.8),
        ),
        (math.sqrt(2), X, lambda z, c: approximate_anchored_kernel(X, z, c) - anchored_kernel(X, z, c), None),
        # The first-order form against the exact kernel.
        (4, Z, lambda z, c: approximate_anchored_kernel(X, z, c, "first order") - anchored_kernel(X, z, c), None),
    ],
)
def test_errors_fall_with_the_anchor_s_length_at_the_worked_out_orders(ratio, z, error, smallest):
    errors = [float(error(z, length * TOWARDS)) for length in LENGTHS]
    assert [a / b for a, b in itertools.pairwise(errors)] == pytest.approx([ratio] * 5, rel=0.02)
    if smallest:
        assert errors[-1] == pytest.approx(smallest(float(dot_shift(X, z, LENGTHS[-1] * TOWARDS))), rel=1e-3)


def test_where_inputs_and_pairs_all_have_unit_norm_gamma_is_zero():
    # |x| = 1 and |[c, x - c]| = 1 together say c . x = |c|^2: the circle at the height of c.
    c = torch.tensor([0.0, 0.0, 0.6], dtype=torch.float64)
    turn = torch.linspace(0.3, 5.5, 7, dtype=torch.float64)
    x = torch.stack([0.8 * turn.cos(), 0.8 * turn.sin(), torch.full_like(turn, 0.6)], dim=1)
    close(encode(x, c).norm(dim=1), torch.ones(7))
    close(anchored_kernel(x, x, c), h_ntk(x, x))
    close(gamma(x, x, c, "first order"), torch.zeros(7, 7))
    different = ~torch.eye(7, dtype=torch.bool)
    close(gamma(x, x, c)[different], torch.zeros(42))


def test_the_paper_s_form_has_no_value_where_the_dot_product_is_no_cosine():
    # An anchor on the sphere: the dot product is 1 + (x - c) . (z - c).
    x = torch.tensor([[0.8, 0.6], [0.6, 0.8], [0.6, -0.8]], dtype=torch.float64)
    c = torch.tensor([1.0, 0.0], dtype=torch.float64)
    beyond = [[float((a - c) @ (b - c)) >= 0 for b in x] for a in x]
    assert gamma(x, x, c).isnan().tolist() == beyond
    assert beyond[0] == [True, True, False]
    assert not bool(gamma(x, x, c, "first order").isnan().any())


# --- the predictor ----------------------------------------------------------------------------------------------------


def test_the_prediction_is_the_formula_s():
    x, z, y = rows(6, 3), rows(4, 3, seed=1), rows(6, 2, seed=2)
    first, test = rows(6, 2, seed=3), rows(4, 2, seed=4)
    kernel, cross = h_ntk(x, x).numpy(), h_ntk(z, x).numpy()
    inverse = np.linalg.inv(kernel + 0.1 * np.eye(6))
    expected = test.numpy() - cross @ inverse @ (first - y).numpy()
    options = {"ridge": 0.1, "initial_train": first, "initial_test": test}
    close(predict(h_ntk(x, x), h_ntk(z, x), y, **options), expected, 1e-10)
    close(predict(h_ntk(x, x), h_ntk(z, x), y, ridge=0.1), cross @ inverse @ y.numpy(), 1e-10)
    close(predict(h_ntk(x, x), h_ntk(z, x), y[:, 0], ridge=0.1), (cross @ inverse @ y.numpy())[:, 0], 1e-10)
    close(predict(h_ntk(x, x), h_ntk(x, x), y), y, 1e-9)  # without a ridge it fits the training inputs


def test_a_wide_network_ends_there_after_gradient_descent():
    x, z = with_bias(rows(5, 2, seed=5)), with_bias(rows(4, 2, seed=6))
    y = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    kernel = h_ntk(x, x)
    width = 20_000
    weights, signs = finite(width, 3, seed=7)

    def outputs(inputs):
        return (inputs @ weights.T).relu() @ signs / math.sqrt(width)

    started = outputs(x), outputs(z)
    rate = 1.0 / float(spectrum(kernel)[0])
    for _ in range(400):
        active = (x @ weights.T > 0).double() * (outputs(x) - y)[:, None]  # (5, width)
        weights = weights - rate * signs[:, None] * (active.T @ x) / math.sqrt(width)
    close(outputs(x), y, 1e-3)
    expected = predict(kernel, h_ntk(z, x), y, initial_train=started[0], initial_test=started[1])
    assert float((outputs(z) - expected).abs().max()) < 0.03
    assert float((outputs(z) - started[1]).abs().max()) > 0.3


def test_the_spectrum_is_numpy_s_from_the_top():
    kernel = h_ntk(rows(6, 3), rows(6, 3))
    close(spectrum(kernel), np.sort(np.linalg.eigvalsh(kernel.numpy()))[::-1].copy())
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)


EYE, ZERO = torch.eye(3), torch.zeros(3)
SQUARES = [torch.eye(2)] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: h_ntk(ZERO, EYE), r"a must be \(N, D\).*got \(3,\): for images"),
        (lambda: h_ntk(EYE, ZERO), r"b must be \(N, D\).*got \(3,\)"),
        (lambda: h_ntk(torch.zeros(1, 3), torch.zeros(1, 4)), r"one length; got \(1, 3\) and \(1, 4\): encode both"),
        (lambda: encode(torch.zeros(4, 3), torch.zeros(2, 3)), r"anchors must be .* got \(2, 3\): pick"),
        (lambda: encode(ZERO, ZERO), r"x must be \(N, D\)"),
        (lambda: anchored_kernel(EYE, EYE, EYE), r"c must be one anchor, \(3,\); got \(3, 3\)"),
        (lambda: dot_shift(EYE, EYE, torch.zeros(2)), r"c must be one anchor, \(3,\); got \(2,\)"),
        (lambda: gamma(2 * EYE, EYE, ZERO), "x must have rows of unit norm; got norms from 2"),
        (lambda: gamma(EYE, 2 * EYE, ZERO), "z must have rows of unit norm; .*normalize"),
        (lambda: gamma(EYE, EYE, ZERO, "third"), "form must be one of 'paper', 'first order'"),
        (lambda: dual_weights(EYE, torch.zeros(2)), r"kernel must be \(N, N\) for N targets; got \(3, 3\) and 2"),
        (lambda: dual_weights(torch.ones(2, 3), torch.zeros(2)), r"kernel must be \(N, N\)"),
        (lambda: dual_weights(torch.ones(2, 2), torch.zeros(2)), "positive definite; .* parallel .* ridge"),
        (lambda: dual_weights(EYE, ZERO, ridge=-1.0), r"ridge must lie in \[0, inf\]; got -1.0"),
        (lambda: predict(EYE, EYE, ZERO, initial_test=ZERO), "belong together"),
        (lambda: toy_problem(1), "n must be a whole number of at least 2; got 1"),
        (lambda: toy_problem(held_out=0), "held_out must be"),
        (lambda: toy_problem(noise=-1.0), "noise must lie in"),
        (lambda: one_network(*SQUARES, per_input=3, generator=torch.Generator()), "at most the 2 training"),
        (lambda: one_network(*SQUARES, per_input=0, generator=torch.Generator()), "per_input must be"),
        (lambda: ntk_study(anchors=1), "anchors must be a whole number of at least 2; got 1"),
        (lambda: ntk_study(anchors=41), "anchors must be at most the 40 training points; got 41"),
        (lambda: ntk_study(repeats=0), "repeats must be"),
        (lambda: ntk_study(grid=1), "grid must be"),
        (lambda: approximation_errors(points=2), "points must be"),
    ],
)
def test_a_wrong_argument_is_an_error(call, message):
    with pytest.raises(InputError, match=message):
        call()


# --- the toy problem --------------------------------------------------------------------------------------------------


def circle(points):
    """Centre and radius of the circle through points, from |p|^2 = 2 p . centre + constant."""
    system = torch.cat([2 * points, torch.ones_like(points[:, :1])], dim=1)
    solved = torch.linalg.lstsq(system, points.square().sum(dim=1)[:, None])
    assert float((system @ solved.solution)[:, 0].sub(points.square().sum(dim=1)).abs().max()) < 1e-9
    *centre, constant = solved.solution[:, 0].tolist()
    return centre, math.sqrt(constant + centre[0] ** 2 + centre[1] ** 2)


def test_the_toy_problem_is_two_half_circles_of_unit_size():
    problem = toy_problem(400, 300, noise=0.0, seed=1)
    close(problem.x.mean(dim=0), [0, 0])
    assert float(problem.x.square().sum(dim=1).mean()) == pytest.approx(1)
    assert problem.y.sum() == 0
    assert problem.held_out.shape == (300, 2)
    for points, y in ((problem.x, problem.y), (problem.held_out, problem.held_out_y)):
        (upper, one), (lower, other) = circle(points[y > 0]), circle(points[y < 0])
        assert one == pytest.approx(other)
        assert [(b - a) / one for a, b in zip(upper, lower, strict=True)] == pytest.approx([1, 0.5])
        assert bool((points[y > 0][:, 1] >= upper[1]).all())
        assert bool((points[y < 0][:, 1] <= lower[1]).all())


@pytest.fixture(scope="module")
def small():
    problem = toy_problem(10, 6, seed=2)
    return with_bias(problem.x), problem.y, with_bias(problem.held_out)


def test_one_network_is_a_regression_on_pairs_with_random_anchors(small):
    x, y, points = small
    anchors = x[:3]
    result = one_network(x, y, points, anchors, per_input=4, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    pairs, targets = [], []
    for one, label in zip(x, y, strict=True):
        for k in torch.randperm(10, generator=generator)[:4]:
            pairs.append(torch.cat([x[k], one - x[k]]))
            targets.append(float(label))
    gram = np.array([[naive_kernel(a, b) for b in pairs] for a in pairs])
    weights = np.linalg.solve(gram, np.array(targets))
    for row, c in zip(result, anchors, strict=True):
        cross = np.array([[naive_kernel(torch.cat([c, p - c]), b) for b in pairs] for p in points])
        close(row, cross @ weights, 1e-6)


def test_a_network_that_met_every_anchor_agrees_with_itself_on_training_points_alone(small):
    x, y, points = small
    options = {"per_input": len(x), "generator": torch.Generator()}
    close(one_network(x, y, x, x, **options), y.expand(10, 10), 1e-7)
    assert float(one_network(x, y, points, x, **options).std(dim=0).max()) > 1e-3


def test_a_network_per_anchor_is_a_regression_for_each(small):
    x, y, points = small
    result = one_per_anchor(x, y, points, x[:3])
    for row, c in zip(result, x[:3], strict=True):
        expected = anchored_kernel(points, x, c).numpy() @ np.linalg.solve(anchored_kernel(x, x, c).numpy(), y.numpy())
        close(row, expected, 1e-9)
    close(one_per_anchor(x, y, x, x[:3]), y.expand(3, 10), 1e-9)


def test_far_away_one_network_s_anchors_disagree_by_a_constant_and_networks_per_anchor_without_bound(small):
    x, y, _ = small
    turn = torch.arange(8, dtype=torch.float64)
    circle = torch.stack([turn.cos(), turn.sin()], dim=1)
    far, further = (with_bias(radius * circle) for radius in (1e4, 2e4))
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    one = [one_network(x, y, p, x[:4], per_input=6, generator=g) for p, g in zip((far, further), seeds, strict=True)]
    close(one[1].std(dim=0), one[0].std(dim=0), 1e-3)
    assert float(one[0].std(dim=0).min()) > 1e-3
    close(one[1].mean(dim=0) / one[0].mean(dim=0), torch.full((8,), 2.0), 1e-2)  # while the output itself grows
    assert float(decision_tau(one[1]).max()) < 1e-6  # and so all anchors are sure
    each = [one_per_anchor(x, y, points, x[:4]) for points in (far, further)]
    close(each[1].std(dim=0) / each[0].std(dim=0), torch.full((8,), 2.0), 1e-2)


def test_the_ensemble_is_that_of_networks_from_random_initial_weights(small):
    x, y, points = small
    mean, deviation = ensemble(x, y, points)
    draws, width = 4000, 300
    weights, signs = finite(draws * width, 3, seed=1)
    inputs = torch.cat([x, points])
    units = (inputs @ weights.T).relu() * signs  # (16, draws * width)
    initial = units.unflatten(1, (draws, width)).sum(dim=2) / math.sqrt(width)  # (16, draws)
    kernels, targets = (h_ntk(x, x), h_ntk(points, x)), y[:, None].expand(-1, draws)
    ends = predict(*kernels, targets, initial_train=initial[:10], initial_test=initial[10:])
    close(ends.std(dim=1) / deviation, torch.ones(6), 0.08)  # the ratio's own deviation is 0.011
    assert bool(((ends.mean(dim=1) - mean).abs() < 5 * deviation / math.sqrt(draws)).all())
    close(ensemble(x, y, x)[1], torch.zeros(10), 1e-6)


# --- the study --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study():
    return ntk_study(seed=1, anchors=3, repeats=1, grid=11)


def test_orders_come_out_as_expected_for_any_points():
    for seed in range(3):
        result = approximation_errors(points=40, seed=seed)
        assert set(result.orders) == set(EXPECTED)
        for kind, order in result.orders.items():
            assert order == pytest.approx(float(Fraction(EXPECTED[kind])), abs=0.05), (seed, kind)
        assert result.smallest["exact"] > 0 > result.smallest["exact gamma"]
        assert 0 < result.defined < 1
        assert result.unexplained["first order"] < 0.01 < 0.1 < result.unexplained["paper"]


def test_the_decisions_are_the_predictors_on_the_grid(study):
    axis, x = study.decisions.axis, with_bias(study.problem.x)
    point = torch.stack([axis[7], axis[2]])[None]
    values = one_per_anchor(x, study.problem.y, with_bias(point), with_bias(study.anchors))[:, 0]
    close(study.decisions.values[PER_ANCHOR][:, 2, 7], values)
    close(study.decisions.deviation[PER_ANCHOR][2, 7], values.std())
    close(study.decisions.deviation[ENSEMBLE][2, 7], ensemble(x, study.problem.y, with_bias(point))[1][0])
    for name, result in study.decisions.agreement.items():
        flat = [study.decisions.deviation[key].flatten().numpy() for key in (name, ENSEMBLE)]
        assert result == pytest.approx(spearmanr(*flat).statistic)
    a, b = rows(20, 1)[:, 0], rows(20, 1, seed=1)[:, 0]
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)


def test_the_spectra_are_those_of_the_kernels(study):
    x = study.problem.x
    lifted = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    plain = np.array([[naive_kernel(a, b) for b in lifted] for a in lifted])
    close(study.spectra.unanchored, np.linalg.eigvalsh(plain)[::-1].copy(), 1e-6)
    kernels = [anchored_kernel(lifted, lifted, with_bias(c[None])[0]) for c in study.anchors]
    close(study.spectra.shared, torch.stack([torch.linalg.eigvalsh(k).flip(0) for k in kernels]))
    gaps = [float((a - b).norm()) for a, b in itertools.combinations(kernels, 2)]
    assert study.spectra.apart == pytest.approx(np.mean(gaps) / np.mean([float(k.norm()) for k in kernels]))
    # Each pair of a permutation: the trace is half the sum of |c|^2 + 1 + |x - c|^2.
    generator = torch.Generator().manual_seed(1)
    c = x[torch.randperm(len(x), generator=generator)]
    assert float(study.spectra.own.sum()) == pytest.approx(float((c.square() + (x - c).square()).sum() + len(x)) / 2)
    assert kernel_spectra(x, study.anchors, seed=1).ranks == study.spectra.ranks


def test_disagreement_is_measured_by_distance_from_the_nearest_training_point(study):
    problem, anchors = study.problem, study.anchors
    around = by_distance.circles()
    distance = [min(math.dist(p, q) for q in problem.x.tolist()) for p in around.tolist()]
    x = with_bias(problem.x)
    beyond = one_per_anchor(x, problem.y, with_bias(around), with_bias(anchors))
    inside = one_per_anchor(x, problem.y, with_bias(problem.held_out), with_bias(anchors))
    tau = [2 * values.sigmoid().std(dim=0) for values in (inside, beyond)]
    result = study.disagreement
    for band, (low, high) in enumerate(itertools.pairwise(EDGES)):
        chosen = [i for i, d in enumerate(distance) if low <= d < high]
        assert result.deviation[PER_ANCHOR][band] == pytest.approx(float(beyond.std(dim=0)[chosen].mean()))
        assert result.tau[PER_ANCHOR][band] == pytest.approx(float(tau[1][chosen].mean()))
    assert result.held_out[PER_ANCHOR]["deviation"] == pytest.approx(float(inside.std(dim=0).mean()))
    assert result.held_out[PER_ANCHOR]["tau"] == pytest.approx(float(tau[0].mean()))
    outside = [i for i, d in enumerate(distance) if 0.5 <= d < 4]
    above = float((tau[1][outside][:, None] > tau[0]).double().mean())
    assert result.separates[PER_ANCHOR]["tau"] == pytest.approx(above)
    assert result.spans[PER_ANCHOR]["tau"] == pytest.approx([above, above])  # there is one draw
    right = (inside.mean(dim=0) > 0) == (problem.held_out_y > 0)
    assert result.accuracy[PER_ANCHOR] == pytest.approx(float(right.double().mean()))
    held_out = [result.held_out[trained_with(n)]["deviation"] for n in by_distance.PER_INPUT]
    assert held_out == sorted(held_out, reverse=True)  # it falls with anchors in training, and grows with the distance
    for name in (PER_ANCHOR, ENSEMBLE):
        assert result.deviation[name] == sorted(result.deviation[name])
        assert result.grows[name] == study.repeats
    for seed in range(20):  # every band holds points
        distance = torch.cdist(around, by_distance.draw_problem(seed, 2)[0].x).amin(dim=1)
        assert all(int(((distance >= a) & (distance < b)).sum()) >= 5 for a, b in itertools.pairwise(EDGES)), seed


def test_the_study_is_plain_data_and_comes_from_its_seed(study):
    plain = study.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain == ntk_study(seed=1, anchors=3, repeats=1, grid=11).as_dict()
    assert plain["anchors"] != ntk_study(seed=2, anchors=3, repeats=1, grid=2).as_dict()["anchors"]
    assert np.array(plain["decisions"]["values"][PER_ANCHOR]).shape == (3, 11, 11)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_sound_and_says_what_was_found(tmp_path, capsys):
    study = run_ntk(tmp_path / "new", 3, anchors=4, repeats=1, grid=13)
    assert capsys.readouterr().out == ""
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["report.html", "study.json"]
    text = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    read = check(text)
    drawn = [attrs for attrs in read.all("svg") if "role" in attrs]
    assert len(drawn) == 1 + 1 + 2 * 3 + 3 + 2 + 1  # spectra, boundaries, decisions, deviations, distances, errors
    assert len({attrs["aria-label"] for attrs in drawn}) == len(drawn)
    shown = read.text.replace("\N{NO-BREAK SPACE}", " ")
    for words in findings(study):
        assert words in shown
    for words in ("kedge reproduce ntk", "Exact and approximate kernel", "Limits of this study", PER_ANCHOR):
        assert words in shown
    for name, values in study.disagreement.held_out.items():
        assert f"{name} {values['deviation']:.3f}" in shown
    assert f"{study.decisions.agreement[PER_ANCHOR]:.2f} for a network per anchor" in shown
    kept = json.loads((tmp_path / "new" / "study.json").read_text())
    assert kept["record"]["seed"] == 3
    assert ntk_page(study, kept["record"]) == text  # the same study gives the same bytes
    assert {key: value for key, value in kept.items() if key != "record"} == study.as_dict()
