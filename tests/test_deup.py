"""DEUP: what the predictor sees of an image, the errors that it learns from, its fit, and the prediction as score."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, spearmanr
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.func import grad, hessian

import helpers
import kedge
from kedge.detectors import Cost
from kedge.detectors.deup import DEUP, log_density
from kedge.detectors.error_predictor import derivatives, fit_predictor, misfit, newton, perceptron
from kedge.detectors.gaussians import ClassStatistics
from kedge.errors import ArchitectureError, FileFormatError, InputError, NotReadyError
from kedge.models.ensemble import Ensemble
from kedge.pixels import to_unit
from kedge.seeds import seeded


def images(n=60, seed=0) -> torch.Tensor:
    return helpers.images(n, channels=1, side=4, seed=seed)


def labelled(n=60, seed=0, classes=3) -> kedge.ImageSet:
    generator = torch.Generator().manual_seed(100 + seed)
    return kedge.ImageSet(images(n, seed), torch.randint(0, classes, (n,), generator=generator), "toy")


def dense() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def network(kind="unanchored") -> kedge.Classifier:
    options = {"mean": 0.5, "std": 0.25}
    if kind == "anchored":
        return kedge.anchor(dense(), init="fresh", seed=1, **options).eval()
    return kedge.Classifier(dense(), **options).eval()


def ready() -> DEUP:
    return DEUP(network(), hidden=6).fit(labelled()).calibrate(labelled(80, seed=1))


def forward(net: kedge.Classifier, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Logits, penultimate vectors and per_anchor, layer by layer."""
    with torch.no_grad():
        z = (to_unit(x, torch.float64) - 0.5) / 0.25
        if not isinstance(net, kedge.Anchored):
            features = net.network[2](net.network[1](net.network[0](z)))
            return net.network[3](features).numpy(), features.numpy(), None
        each = []
        for anchor in net.anchors:
            alone = copy.deepcopy(net)
            alone.set_anchors(anchor[None])
            each.append(alone.features(to_unit(x, torch.float64), ["3:in"])[1]["3:in"])
        per_anchor = torch.stack([net.network[3](features) for features in each])
        return per_anchor.mean(dim=0).numpy(), torch.stack(each).mean(dim=0).numpy(), per_anchor.numpy()


def naive_log_density(features: np.ndarray, train: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A mixture of Gaussians, as scipy computes it."""
    classes = sorted(set(labels.tolist()))
    means = {c: train[labels == c].mean(axis=0) for c in classes}
    centred = np.stack([f - means[c] for f, c in zip(train, labels.tolist(), strict=True)])
    covariance = centred.T @ centred / len(train)
    parts = [
        math.log((labels == c).mean()) + multivariate_normal(means[c], covariance).logpdf(features) for c in classes
    ]
    return logsumexp(np.stack(parts), axis=0)


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_the_features_are_density_entropy_energy_and_the_disagreement_of_anchors(kind):
    detector, train = DEUP(network(kind)).fit(labelled()), labelled()
    x = images(9, seed=5)
    logits, features, per_anchor = forward(detector.net, x)
    _, known, _ = forward(detector.net, train.images)
    with torch.no_grad():
        given, phi = detector.describe(to_unit(x, torch.float64))
    assert given.numpy() == pytest.approx(logits, rel=1e-9)
    assert phi.shape == (9, 3 if kind == "unanchored" else 4)
    assert detector.cost == Cost(forward=1 if kind == "unanchored" else 5)
    assert phi[:, 0].numpy() == pytest.approx(naive_log_density(features, known, train.labels.numpy()), rel=1e-8)
    for i, row in enumerate(logits):
        p = [math.exp(v) / sum(math.exp(w) for w in row) for v in row]
        assert phi[i, 1].item() == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-9)
        assert phi[i, 2].item() == pytest.approx(-math.log(sum(math.exp(v) for v in row)), rel=1e-9)
        if per_anchor is not None:
            sigmoids = 1 / (1 + np.exp(-per_anchor[:, i]))  # (K, C)
            spread = sum(math.sqrt(sum((s - column.mean()) ** 2 for s in column) / 4) for column in sigmoids.T)
            assert phi[i, 3].item() == pytest.approx(spread, rel=1e-9)


def test_the_density_of_features_that_do_not_vary_everywhere_is_that_within_where_they_do():
    generator = torch.Generator().manual_seed(0)
    plane, labels = torch.randn(200, 2, generator=generator, dtype=torch.float64), torch.arange(200) % 2
    plane[:, 0] += 3 * labels
    axes = torch.linalg.qr(torch.randn(4, 2, generator=generator, dtype=torch.float64)).Q  # (4, 2), orthonormal
    statistics = ClassStatistics(2, 4)
    statistics.add(plane @ axes.T + 7, labels)
    result = log_density(plane[:5] @ axes.T + 7, statistics.gaussians(1e-9), statistics.counts / 200)
    expected = naive_log_density(plane[:5].numpy(), plane.numpy(), labels.numpy())
    assert result.numpy() == pytest.approx(expected, rel=1e-6)


def test_the_errors_are_the_cross_entropies_of_held_out_images():
    detector, held_out = DEUP(network()).fit(labelled()), labelled(50, seed=3)
    detector.fit_held_out(held_out.images, held_out.labels)
    logits, _, _ = forward(detector.net, held_out.images)
    errors = [
        -math.log(math.exp(row[label]) / sum(math.exp(v) for v in row))
        for row, label in zip(logits, held_out.labels.tolist(), strict=True)
    ]
    logarithms = np.log(np.maximum(errors, 1e-5))
    assert detector.predictor.errors.tolist() == pytest.approx([logarithms.mean(), logarithms.std()], rel=1e-9)
    with torch.no_grad():
        _, phi = detector.describe(to_unit(held_out.images, torch.float64))
    expected = [phi.numpy().mean(axis=0), phi.numpy().std(axis=0)]
    assert detector.predictor.features.numpy() == pytest.approx(np.stack(expected), rel=1e-9)


def test_the_errors_on_training_images_have_no_part_in_it():
    """Renaming the classes of the training set makes the network wrong there, and leaves the density as it is."""
    renamed = kedge.ImageSet(labelled().images, (labelled().labels + 1) % 3, "toy")
    honest, poisoned = DEUP(network(), hidden=6).fit(labelled()), DEUP(network(), hidden=6).fit(renamed)
    for detector in (honest, poisoned):
        detector.calibrate(labelled(80, seed=1))
    x = images(9, seed=5)
    torch.testing.assert_close(poisoned.score(x), honest.score(x), rtol=1e-7, atol=0)
    held_out = labelled(80, seed=1)
    other = kedge.ImageSet(held_out.images, (held_out.labels + 1) % 3, "toy")
    assert not torch.allclose(poisoned.calibrate(other).score(x), honest.score(x), rtol=1e-2)


def test_images_without_a_label_are_left_out():
    held_out = labelled(40, seed=3)
    labels = torch.cat([held_out.labels, torch.full((10,), -1)])
    first, second = (DEUP(network(), hidden=6).fit(labelled()) for _ in range(2))
    first.fit_held_out(held_out.images, held_out.labels)
    second.fit_held_out(torch.cat([held_out.images, images(10, seed=7)]), labels)
    assert second.score(images(9)).equal(first.score(images(9)))


def problem(n=300, seed=0, noise=0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """The error is a function of the first feature, the log-density, but not a linear one, and of no other."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, 3, generator=generator, dtype=torch.float64) * torch.tensor([20.0, 0.1, 3.0]) - 40
    logarithm = -4 + 3 / (1 + (phi[:, 0] / 10 + 4).exp()) + noise * torch.randn(n, generator=generator).double()
    return phi, logarithm.exp()


def fitted(phi, errors, seed=0):
    return fit_predictor(phi, errors, hidden=8, seed=seed, rounding=1e-6)


def standardised(phi, errors) -> tuple[torch.Tensor, torch.Tensor]:
    target = errors.clamp_min(1e-5).log()
    return (phi - phi.mean(dim=0)) / phi.std(dim=0, correction=0), (target - target.mean()) / target.std(correction=0)


def test_the_perceptron_is_two_layers_and_the_misfit_is_the_one_by_hand():
    first, last, z = torch.randn(4, 5), torch.randn(6), torch.randn(7, 3)
    for row, output in zip(z.tolist(), perceptron(z, first, last).tolist(), strict=True):
        hidden = [math.tanh(sum(row[f] * first[f, h].item() for f in range(3)) + first[3, h].item()) for h in range(5)]
        expected = sum(hidden[h] * last[h].item() for h in range(5)) + last[5].item()
        assert output == pytest.approx(expected, rel=1e-4)
    # At z = 0 the output is its bias; the residuals are 1 and -1, the squared weights 9 + 1 + 4 + 4, for two images.
    first, last = torch.tensor([[3.0, -1.0], [0.0, 0.0]]), torch.tensor([2.0, 2.0, 1.0])
    assert misfit(torch.zeros(2, 1), torch.tensor([0.0, 2.0]), first, last).item() == (1 + 1 + 18) / 2


def test_gradient_and_hessian_are_the_derivatives_of_the_misfit():
    z, target = torch.randn(11, 3, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    first, last = torch.randn(4, 5, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def loss(weights):
        return misfit(z, target, weights[:20].view(4, 5), weights[20:])

    weights = torch.cat([first.flatten(), last])
    slope, bend = derivatives(z, target, first, last)
    torch.testing.assert_close(slope, grad(loss)(weights), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(bend, hessian(loss)(weights), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_is_a_minimum(seed):
    phi, errors = problem(noise=1.0)
    predictor = fitted(phi, errors, seed=seed)
    slope, bend = derivatives(*standardised(phi, errors), predictor.first, predictor.last)
    assert slope.abs().max() < 1e-8
    assert torch.linalg.eigvalsh(bend).min() > -1e-8


def test_a_saddle_point_is_left():
    """With all weights zero but a bias the gradient vanishes only along some directions; downhill leads on."""
    z, target = standardised(*problem())
    first, last = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    first[0, 0] = 1e-3
    at = newton(z, target, first, last)
    assert misfit(z, target, *at) < 0.5 * misfit(z, target, first, last)


def test_predictions_follow_the_error_better_than_a_line_or_a_constant_and_stay_bounded():
    phi, errors = problem()
    z, target = standardised(phi, errors)
    design = np.column_stack([z.numpy(), np.ones(len(z))])
    line = design @ np.linalg.lstsq(design, target.numpy(), rcond=None)[0]
    predictor = fitted(phi, errors)
    assert misfit(z, target, predictor.first, predictor.last) < ((line - target.numpy()) ** 2).mean()  # with penalty
    fresh, actual = problem(2000, seed=1)
    assert spearmanr(predictor(fresh), actual).statistic > 0.95
    assert ((predictor(fresh) - actual) ** 2).mean() < 0.1 * ((errors.mean() - actual) ** 2).mean()
    far = predictor(torch.tensor([[-1e30, 0.0, 0.0], [1e30, 0.0, 0.0], [-1e6, 1e6, 1e6]]))
    assert (far <= math.exp(predictor.errors[0] + predictor.errors[1] * predictor.last.abs().sum())).all()
    assert far[0] > far[1]  # the density is least where the error is largest


def test_the_seed_decides_and_torch_s_own_generator_has_no_part_in_it():
    phi, errors = problem(60, noise=1.0)
    before = torch.get_rng_state()
    first = fitted(phi, errors)
    torch.manual_seed(5)
    again, other = fitted(phi, errors), fitted(phi, errors, seed=1)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, vars(again)[name]) for name, value in vars(first).items())
    assert not torch.equal(other.first, first.first)


def test_a_fit_does_not_magnify_rounding():
    phi, errors = problem(100, noise=1.0)
    nudge = 1e-7 * phi.std(dim=0) * torch.randn(phi.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = fitted(phi, errors), fitted(phi + nudge, errors)
    torch.testing.assert_close(theirs(phi), ours(phi), rtol=1e-5, atol=0)


def test_a_feature_that_never_changes_counts_for_nothing():
    phi, errors = problem()
    noise = 1e-7 * torch.randn(len(phi), generator=torch.Generator().manual_seed(1)).double()
    fixed = torch.cat([phi, (0.5 + noise)[:, None]], dim=1)
    predictor = fitted(fixed, errors)
    elsewhere = fixed.clone()
    elsewhere[:, 3] = 9.0
    torch.testing.assert_close(predictor(elsewhere), predictor(fixed), rtol=1e-3, atol=0)


def test_errors_that_are_all_the_same_are_predicted_as_they_are():
    phi, _ = problem(20)
    for error, expected in ((0.3, 0.3), (1.0, 1.0), (0.0, 1e-5)):  # what is smaller than 1e-5 counts as that
        predictor = fitted(phi, torch.full((20,), error))
        assert predictor(phi).tolist() == pytest.approx([expected] * 20)
    assert fitted(phi, torch.ones(20)).errors.tolist() == [0.0, 1.0]  # log 1 everywhere, divided by nothing


def test_the_score_is_the_predicted_error():
    detector = ready()
    x = images(9, seed=5)
    with torch.no_grad():
        logits, phi = detector.describe(to_unit(x, torch.float64))
    predictor = detector.predictor
    z = (phi - predictor.features[0]) / predictor.features[1]
    output = perceptron(z, predictor.first, predictor.last)
    expected = (predictor.errors[0] + predictor.errors[1] * output).exp()
    result = detector(x)
    assert result.score.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    torch.testing.assert_close(result.logits, logits)
    assert predictor.first.shape == (4, 6)
    assert DEUP(network()).state() == {}
    state = detector.state()
    for name, value in state.items():
        for wrong in (value[..., :-1], torch.full_like(value, math.nan)):
            with pytest.raises(FileFormatError, match="the file has"):
                detector.load_state(state | {name: wrong})
    with pytest.raises(NotReadyError, match=r"call calibrate\(held_out\)"):
        detector.fit(labelled()).score(x)


def test_images_unlike_the_training_images_score_higher_where_errors_rise_with_distance():
    """The network predicts class 0 for every image, so only the density can tell where it is wrong."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double()
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].bias.copy_(torch.tensor([2.0, -2.0]))

    def data(n, seed):
        generator = torch.Generator().manual_seed(seed)
        size = torch.rand(n, 1, 1, 1, generator=generator).double()
        x = 0.5 + 0.5 * size * (torch.rand(n, 1, 4, 4, generator=generator).double() - 0.5)
        return x, ((x - 0.5).square().sum(dim=(1, 2, 3)) > 0.1).long()

    x, y = data(300, 0)
    detector = DEUP(net, hidden=8).fit([(image, 0) for image in x])
    detector.calibrate(list(zip(x, y.tolist(), strict=True)))
    fresh, wrong = data(500, 1)
    scores = detector.score(fresh)
    assert 0.2 < wrong.double().mean() < 0.8
    errors = np.log1p(np.exp(np.where(wrong.bool(), 4.0, -4.0)))
    assert ((scores.numpy() - errors) ** 2).mean() < 0.5 * errors.var()
    assert roc_auc_score(wrong, scores) > 0.95


def test_anchors_that_do_not_disagree_add_nothing_but_noise_that_is_ignored():
    """With init="preserve" an anchored network gives the same logits under every anchor, up to rounding."""
    net = kedge.anchor(dense().float(), mean=0.5, std=0.25).eval()
    detector = DEUP(net, hidden=6).fit(labelled()).calibrate(labelled(80, seed=1))
    assert detector.predictor.features[1, 3] == 1
    x = images(30, seed=5)
    torch.testing.assert_close(detector.score(x, batch_size=4), detector.score(x), rtol=1e-4, atol=0)


def test_sets_networks_and_arguments_that_do_not_fit_are_named():
    for options, message in (({"hidden": 0}, "hidden must be"), ({"head": "2"}, "head must name a linear layer")):
        with pytest.raises(InputError, match=message):
            DEUP(network(), **options)
    some = [(image, -1 if i == 5 else i % 3) for i, image in enumerate(images())]
    few = kedge.ImageSet(images(3), torch.arange(3), "few")
    rows = nn.Sequential(nn.Flatten(2), nn.Linear(16, 3), nn.Flatten())
    broken, single, detector = network(), network("anchored"), DEUP(network()).fit(labelled())
    broken.network[1].weight.data.fill_(math.nan)
    single.set_anchors(images(1).double() / 255)
    for net, train_set, message in (
        (network(), images(), "train_set must have a label for each image"),
        (network(), some, "train_set must have a label for each image"),
        (network(), labelled(classes=4), r"labels must lie in 0\.\.2, the classes of the network; got 0\.\.3"),
        (network(), few, "at least two images of a class.*got 3 images of 3"),
        (Ensemble([dense(), dense()]), labelled(), "an ensemble has no layers to read"),
        (rows, labelled(), r"the head '1' must take a vector per image, not \(60, 1, 16\)"),
        (broken, labelled(), "features must be finite"),
    ):
        with pytest.raises(InputError, match=message):
            DEUP(net).fit(train_set)
    with pytest.raises(InputError, match="at least two anchors"):
        DEUP(single).fit(labelled()).calibrate(labelled(80, seed=1))
    with pytest.raises(ArchitectureError, match="the logits are not the output of '1'"):
        DEUP(network(), head="1").fit(labelled())
    for held_out, message in ((images(), "held_out must have labels"), (labelled(classes=4), "labels must lie in")):
        with pytest.raises(InputError, match=message):
            detector.calibrate(held_out)
    detector.net.network[3].bias.data.fill_(math.inf)
    with pytest.raises(InputError, match="the errors of held-out images must be finite"):
        detector.calibrate(labelled(80, seed=1))
