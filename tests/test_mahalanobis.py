"""Mahalanobis: squared distances to the closest class mean, against scipy, scikit-learn and naive autograd."""

import copy

import numpy as np
import pytest
import torch
from kedge.anchoring.per_image import choose_per_image
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import EmpiricalCovariance
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.data.leakage import fingerprints
from kedge.detectors import Cost
from kedge.detectors.gaussians import ClassStatistics, squared_distances
from kedge.detectors.logistic import logistic_regression
from kedge.detectors.mahalanobis import Mahalanobis
from kedge.detectors.registry import DETECTORS
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded

LAYERS = ("stage1", "stage2", "stage3", "flatten")


@pytest.fixture(autouse=True)
def known_to_load(monkeypatch):
    monkeypatch.setitem(DETECTORS, "mahalanobis", Mahalanobis)


def images(n=40, seed=0) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def labelled(n=60, classes=4, seed=0) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), torch.arange(n) % classes)


def network(dtype=torch.float32) -> nn.Module:
    with seeded(0):
        net = build("compact", width=2, classes=4)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
    return net.to(dtype).eval()


def flat(width: int, classes: int = 3, dtype=torch.float64) -> nn.Module:
    """Its head reads the inputs themselves, so they are the features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(width, classes)).to(dtype)


def vectors(n=40, width=3, classes=3, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated vectors, around a mean for each class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    values = (
        rng.normal(size=(n, width)) @ rng.normal(size=(width, width)) + 3 * rng.normal(size=(classes, width))[labels]
    )
    return torch.from_numpy(values), torch.from_numpy(labels)


def pairs(x: torch.Tensor, y: torch.Tensor) -> TensorDataset:
    return TensorDataset(x, y)


def in_unit_range(x: torch.Tensor) -> torch.Tensor:
    return x.double() / 255


def reading(net: nn.Module, layers, run) -> list[torch.Tensor]:
    """What layers give for one image while ``run`` runs, averaged over space."""
    found = {}
    hooks = [
        net.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: found.update({name: out[0]}))
        for name in layers
    ]
    run()
    for hook in hooks:
        hook.remove()
    return [found[name].flatten(1).mean(1) if found[name].ndim == 3 else found[name] for name in layers]


def layer_outputs(net: nn.Module, x: torch.Tensor, layers=LAYERS) -> list[torch.Tensor]:
    """The features (N, D) of each layer, one image at a time."""
    rows = [reading(net, layers, lambda image=image: net(image[None])) for image in x]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def means_and_precision(features: np.ndarray, labels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The definition: a mean for each class, one covariance of what remains, its inverse."""
    means = {c: features[labels == c].mean(axis=0) for c in sorted(set(labels.tolist()))}
    centred = np.stack([row - means[c] for row, c in zip(features, labels.tolist(), strict=True)])
    fitted = EmpiricalCovariance(assume_centered=True).fit(centred)
    return list(means.values()), fitted.precision_


def closest(features: np.ndarray, means: list[np.ndarray], precision: np.ndarray) -> np.ndarray:
    return np.array([min(mahalanobis(row, mean, precision) ** 2 for mean in means) for row in features])


# The distance.


def test_one_feature_by_hand():
    """Two classes at 0, 2 and at 10, 12: means 1 and 11, variance 1."""
    x = torch.tensor([[0.0], [2.0], [10.0], [12.0]]).double()
    detector = Mahalanobis(flat(1)).fit(pairs(x, torch.tensor([0, 0, 1, 1])))
    assert detector.score(torch.tensor([[1.0], [5.0], [8.0], [14.0]]).double()).tolist() == pytest.approx([0, 16, 9, 9])


def test_the_score_is_the_square_of_scipy_s_distance_to_the_closest_class():
    x, y = vectors()
    detector = Mahalanobis(flat(3)).fit(pairs(x, y))
    centred = x.numpy() - np.stack([x[y == c].mean(dim=0).numpy() for c in y.tolist()])
    precision = np.linalg.inv(centred.T @ centred / len(x))
    means = [x[y == c].mean(dim=0).numpy() for c in range(3)]
    tests = 4 * torch.randn(20, 3, dtype=torch.float64)
    assert detector.score(tests).numpy() == pytest.approx(closest(tests.numpy(), means, precision), rel=1e-9)


def test_layers_are_averaged_over_space_and_their_distances_summed():
    net, train, test = network(torch.float64), labelled(), images(9, seed=5)
    detector = Mahalanobis(net).fit(train)
    assert detector.layers == LAYERS
    with torch.no_grad():
        known, new = (layer_outputs(net, in_unit_range(x)) for x in (train.images, test))
    parts = [
        closest(b.numpy(), *means_and_precision(a.numpy(), train.labels.numpy()))
        for a, b in zip(known, new, strict=True)
    ]
    assert detector.score(test).numpy() == pytest.approx(sum(parts), rel=1e-6)
    for name, part in zip(LAYERS, parts, strict=True):
        alone = Mahalanobis(net, layers=[name]).fit(train)
        assert alone.score(test).numpy() == pytest.approx(part, rel=1e-6)
    with torch.no_grad():
        assert detector.outputs(in_unit_range(test)).logits.allclose(net(in_unit_range(test)))


@pytest.mark.parametrize("width", [3, 6])
def test_the_precision_is_scikit_learn_s_also_of_a_singular_covariance(width):
    """A feature that never changes and one that is the sum of two others leave the covariance singular."""
    x, y = vectors(width=3)
    if width == 6:
        x = torch.cat([x, torch.full((len(x), 1), 7.0).double(), x[:, :1] + x[:, 1:2], x[:, 2:] * 1e-3], dim=1)
    detector = Mahalanobis(flat(width)).fit(pairs(x, y))
    found = detector.gaussians["1:in"]
    means, precision = means_and_precision(x.numpy(), y.numpy())
    assert found.whitening.shape == (width, 3)
    np.testing.assert_allclose((found.whitening @ found.whitening.T).numpy(), precision, rtol=1e-6, atol=1e-9)
    assert found.centre.allclose(x.mean(dim=0))
    tests = x[:5] + torch.randn(5, width).double()
    assert detector.score(tests).numpy() == pytest.approx(closest(tests.numpy(), means, precision), rel=1e-6)


def test_a_class_without_images_has_no_gaussian():
    """Class 1 has no images: what lies where nothing was seen is far, and the two others are as they were."""
    x = torch.tensor([[0.0], [2.0], [10.0], [12.0]]).double()
    detector = Mahalanobis(flat(1, classes=3)).fit(pairs(x, torch.tensor([0, 0, 2, 2])))
    assert len(detector.gaussians["1:in"].means) == 2
    assert detector.score(torch.tensor([[0.0], [6.0]]).double()).tolist() == pytest.approx([1, 25])


def test_a_class_may_have_one_image():
    x = torch.tensor([[0.0], [2.0], [10.0]]).double()
    detector = Mahalanobis(flat(1)).fit(pairs(x, torch.tensor([0, 0, 1])))
    assert detector.score(torch.tensor([[11.0]]).double()).tolist() == pytest.approx([1.5])  # variance (1 + 1 + 0) / 3


# Learning in one pass.


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_what_is_learned_does_not_depend_on_the_batches(size):
    x, y = vectors()
    order = torch.randperm(len(x))  # classes come and go
    seen = ClassStatistics(classes=5, width=3)
    for rows in order.split(size):
        seen.add(x[rows], y[rows])
    assert seen.counts.tolist() == [14, 13, 13, 0, 0]
    centred = x.clone()
    for c in range(3):
        assert seen.means[c].allclose(x[y == c].mean(dim=0))
        centred[y == c] -= x[y == c].mean(dim=0)
    assert seen.scatter.allclose(centred.T @ centred)


def test_a_data_loader_of_small_batches_gives_the_same_scores():
    x, y = vectors()
    whole = Mahalanobis(flat(3)).fit(pairs(x, y)).score(x)
    assert Mahalanobis(flat(3)).fit(DataLoader(pairs(x, y), batch_size=3)).score(x).allclose(whole, rtol=1e-9)


@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_a_large_offset_costs_no_digits(offset):
    """Sums of squares near 1e16 would leave nothing of a variance near one."""
    x, y = vectors()
    far, near = x + offset, (x + offset) - offset  # rounded alike
    expected = Mahalanobis(flat(3)).fit(pairs(near, y)).score(near)
    loader = DataLoader(pairs(far, y), batch_size=7)
    assert Mahalanobis(flat(3)).fit(loader).score(far).numpy() == pytest.approx(expected.numpy(), rel=1e-6)


def test_rounding_errors_are_not_taken_for_a_direction():
    """Six features of two inputs: in float32 they vary in four more directions by rounding alone."""
    with seeded(0):
        net = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 3))
        net[0].bias.data += 50
    x, y = torch.randn(200, 2), torch.arange(200) % 3
    detector = Mahalanobis(net, layers=["0"]).fit(pairs(x, y))
    assert detector.gaussians["0"].whitening.shape == (6, 2)
    tests = 3 * torch.randn(30, 2)
    means, precision = means_and_precision(x.double().numpy(), y.numpy())  # distances do not change by a linear map
    assert detector.score(tests).numpy() == pytest.approx(closest(tests.double().numpy(), means, precision), rel=1e-2)


def test_a_layer_that_never_changes_counts_nothing(tmp_path):
    x, y = vectors()
    net = nn.Sequential(nn.ReLU(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        net[1].weight.zero_()
    detector = Mahalanobis(net, layers=["1"]).fit(pairs(x, y))
    assert detector.score(x).tolist() == [0.0] * len(x)
    detector.save(tmp_path / "dead.kedge")
    assert kedge.load(tmp_path / "dead.kedge", model=copy.deepcopy(net)).score(x).tolist() == [0.0] * len(x)


def test_refitting_forgets():
    x, y = vectors()
    other, labels = vectors(seed=1)
    again = Mahalanobis(flat(3)).fit(pairs(other, labels)).fit(pairs(x, y))
    assert again.score(x).equal(Mahalanobis(flat(3)).fit(pairs(x, y)).score(x))


def test_fitting_leaves_the_network_as_it_was():
    net = network().train()
    before = copy.deepcopy(net.state_dict())
    Mahalanobis(net, epsilon=0.01).fit(labelled()).score(images(5))
    assert net.training
    assert all(before[name].equal(value) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


# Moving the images.


def moved_scores(
    net: nn.Module, train: kedge.ImageSet, test: torch.Tensor, epsilon: float, layers=LAYERS
) -> list[float]:
    """Algorithm 1, an image and a layer at a time."""
    totals = []
    with torch.no_grad():
        known = layer_outputs(net, in_unit_range(train.images), layers)
    for image in in_unit_range(test):
        total = 0.0
        for i, name in enumerate(layers):
            means, precision = means_and_precision(known[i].numpy(), train.labels.numpy())
            means, precision = [torch.from_numpy(mean) for mean in means], torch.from_numpy(precision)

            def distance(pixels, name=name, means=means, precision=precision):
                z = layer_outputs(net, pixels[None], [name])[0][0]
                return min(((z - mean) @ precision @ (z - mean) for mean in means), key=lambda d: float(d.detach()))

            pixels = image.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(distance(pixels), pixels)
            total += float(distance(image - epsilon * gradient.sign()).detach())
        totals.append(total)
    return totals


def test_each_layer_moves_the_image_towards_its_own_closest_class():
    net, train, test = network(torch.float64), labelled(), images(4, seed=5)
    expected = moved_scores(net, train, test, 0.004)
    still = Mahalanobis(net).fit(train).score(test)
    assert Mahalanobis(net, epsilon=0.004).fit(train).score(test).numpy() == pytest.approx(expected, rel=1e-5)
    assert not np.allclose(still, expected, rtol=1e-2)


def test_moving_the_image_comes_closer_and_may_leave_the_unit_range():
    """One feature, distance (x - 1)^2: 5 moves to 4.5, also where that is no pixel's value."""
    x = torch.tensor([[0.0], [2.0]]).double()
    detector = Mahalanobis(flat(1), epsilon=0.5).fit(pairs(x, torch.tensor([0, 0])))
    assert detector.score(torch.tensor([[5.0], [-1.0]]).double()).tolist() == pytest.approx([3.5**2, 1.5**2])


def test_the_logits_are_those_of_the_image_as_it_is():
    net, x = network(torch.float64), in_unit_range(images(3))
    detector = Mahalanobis(net, epsilon=0.1).fit(labelled())
    with torch.no_grad():
        out = detector.outputs(x)
        assert out.logits.allclose(net(x))
    assert not out.logits.requires_grad
    assert not out.score.requires_grad


@pytest.mark.parametrize(("epsilon", "forwards", "backwards"), [(0.0, 1, 0), (0.01, 3, 2)])
def test_the_cost_is_what_it_takes(epsilon, forwards, backwards, monkeypatch):
    net = network()
    detector = Mahalanobis(net, layers=["stage1", "flatten"], epsilon=epsilon).fit(labelled())
    calls, gradients, grad = [], [], torch.autograd.grad
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: gradients.append(1) or grad(*a, **k))
    detector.score(images(5))
    assert (len(calls), len(gradients)) == (forwards, backwards)
    assert detector.cost == Cost(forwards, backwards)


def test_the_cost_counts_anchors():
    net = kedge.anchor(network())
    detector = Mahalanobis(net, layers=["stage1", "flatten"], epsilon=0.01).fit(labelled())
    assert detector.cost == Cost(15, 10)


def test_it_moves_images_also_where_gradients_are_off_for_good():
    detector = Mahalanobis(network(), epsilon=0.01).fit(labelled())
    expected = detector.score(images(5))
    with torch.inference_mode():
        assert detector.score(images(5).clone()).equal(expected)


def test_a_first_layer_that_works_in_place_is_no_obstacle():
    with seeded(0):
        net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)).double()
    other = nn.Sequential(nn.ReLU(), copy.deepcopy(net[1]))
    x, y = vectors()
    expected = Mahalanobis(other, layers=["1"], epsilon=0.1).fit(pairs(x.clone(), y)).score(x.clone())
    assert Mahalanobis(net, layers=["1"], epsilon=0.1).fit(pairs(x.clone(), y)).score(x.clone()).allclose(expected)


# Anchored networks.


def anchor_means(net: kedge.anchoring.Anchored, x: torch.Tensor, anchors: torch.Tensor, layers=LAYERS) -> list:
    """The features of one image at a time under one anchor at a time, averaged over the anchors."""
    under = []
    for anchor in anchors:
        single = copy.deepcopy(net)
        single.set_anchors(anchor[None])
        rows = [
            reading(single.network, layers, lambda image=image, f=single: f.per_anchor_logits(image[None]))
            for image in x
        ]
        under.append([torch.stack(column) for column in zip(*rows, strict=True)])
    return [torch.stack(each).mean(dim=0) for each in zip(*under, strict=True)]


def test_an_anchored_network_gives_the_mean_features_over_its_anchors():
    net = kedge.anchor(network(torch.float64), init="fresh", seed=3)
    train, test = labelled(30), images(4, seed=5)
    net.set_anchors(images(2, seed=8))
    detector = Mahalanobis(net).fit(train)
    with torch.no_grad():
        known, new = (anchor_means(net, in_unit_range(x), net.anchors) for x in (train.images, test))
    expected = sum(
        closest(b.numpy(), *means_and_precision(a.numpy(), train.labels.numpy()))
        for a, b in zip(known, new, strict=True)
    )
    assert detector.score(test).numpy() == pytest.approx(expected, rel=1e-5)


def test_a_moved_image_keeps_the_anchors_of_the_image_it_was():
    """Anchors chosen by an image's pixels would otherwise change with the pixels."""
    net = kedge.anchor(network(torch.float64), init="fresh", seed=3)
    net.set_anchors(images(20, seed=8), per_image=2)
    train, x, layers = labelled(30), in_unit_range(images(4, seed=5)), ["stage3"]
    detector = Mahalanobis(net, layers=layers, epsilon=0.02).fit(train)
    gaussians = detector.gaussians["stage3"]
    expected = []
    for image in x:
        own = net.anchors[choose_per_image(image[None], 20, 2, net.options.seed)[:, 0]]
        pixels = image.clone().requires_grad_()
        z = anchor_means(net, pixels[None], own, layers)[0]
        (gradient,) = torch.autograd.grad(squared_distances(z, gaussians).sum(), pixels)
        with torch.no_grad():
            z = anchor_means(net, (image - 0.02 * gradient.sign())[None], own, layers)[0]
            expected.append(float(squared_distances(z, gaussians)))
    assert detector.score(x).numpy() == pytest.approx(expected, rel=1e-6)


# Weights for the layers, learned against outliers.


def spread(n=300, seed=0, shift=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3 == 0
    x = rng.normal(size=(n, 3)) * [1, 100, 0.01] + shift * y[:, None] * [1, 50, 0.02] + [0, 1000, -5]
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("n", [15, 300])
@pytest.mark.parametrize("shift", [0.0, 1.0, 50.0])  # apart not at all, partly, wholly
def test_the_regression_is_scikit_learn_s(shift, n):
    x, y = spread(n, shift=shift)
    scaler = StandardScaler().fit(x.numpy())
    oracle = LogisticRegression(C=1.0, tol=1e-12, max_iter=10000).fit(scaler.transform(x.numpy()), y.numpy())
    weights, bias = logistic_regression(x, y)
    expected = oracle.decision_function(scaler.transform(x.numpy()))
    assert (x @ weights + bias).numpy() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_regression_takes_a_smaller_penalty():
    x, y = spread(shift=50.0)
    scaler = StandardScaler().fit(x.numpy())
    oracle = LogisticRegression(C=1e4, tol=1e-12, max_iter=100000).fit(scaler.transform(x.numpy()), y.numpy())
    weights, bias = logistic_regression(x, y, penalty=1e-4)
    expected = oracle.decision_function(scaler.transform(x.numpy()))
    assert (x @ weights + bias).numpy() == pytest.approx(expected, rel=1e-4)


def test_the_regression_converges_where_whole_newton_steps_do_not():
    x = [[-2.774818, -8.760445], [-74.30396, -1751.8622], [-274.2995, 0.026315713], [-0.02968889, -0.7422775]]
    x, y = torch.tensor([*x, [0.27724043, -0.8805841]]).double(), torch.tensor([0, 0, 0, 1, 0]).double()
    weights, bias = logistic_regression(x, y, penalty=1e-6)
    std = x.std(dim=0, correction=0)
    beta = torch.cat([weights * std, bias[None] + weights @ x.mean(dim=0)]).requires_grad_()
    margins = (x - x.mean(dim=0)) / std @ beta[:2] + beta[2]
    loss = nn.functional.softplus(margins * (1 - 2 * y)).sum() + 1e-6 / 2 * (beta[:2] ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, beta)
    assert gradient.abs().max() < 1e-9


def test_a_column_that_never_changes_gets_no_weight():
    x, y = spread()
    weights, bias = logistic_regression(x, y)
    wider, other = logistic_regression(torch.cat([x, torch.full_like(x[:, :1], 5.0)], dim=1), y)
    assert wider[:3].allclose(weights)
    assert wider[3] == 0
    assert other.isclose(bias)


def outlying(n=50, seed=20) -> torch.Tensor:
    return images(n, seed) // 4  # darker than the rest


def test_outliers_weigh_the_layers_by_a_logistic_regression():
    net, train, held_out, outliers = network(torch.float64), labelled(), images(60, seed=3), outlying()
    detector = Mahalanobis(net, outliers=outliers, epsilon=0.002).fit(train)
    assert detector.combine == "logistic"
    assert detector.learns_held_out
    detector.calibrate(held_out)
    mine = held_out[fingerprints(held_out)[:, 0] % 2 == 0]  # the half that calibrate gives to the method
    alone = [Mahalanobis(net, layers=[name], epsilon=0.002).fit(train) for name in LAYERS]
    inside, outside, x = (
        np.stack([each.score(data).numpy() for each in alone], axis=1) for data in (mine, outliers, images(9, seed=6))
    )
    both = np.concatenate([inside, outside])
    scaler = StandardScaler().fit(both)
    truth = np.arange(len(both)) >= len(inside)
    oracle = LogisticRegression(C=1.0, tol=1e-12, max_iter=10000).fit(scaler.transform(both), truth)
    expected = oracle.decision_function(scaler.transform(x))
    assert detector.score(images(9, seed=6)).numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert detector.score(outlying(seed=21)).mean() > detector.score(images(50, seed=22)).mean()


def test_the_outliers_are_remembered_as_having_been_used(tmp_path):
    net, outliers = kedge.Classifier(network()), outlying()
    net.outliers = fingerprints(images(3, seed=30))  # the network itself was trained with some
    detector = Mahalanobis(net, outliers=outliers).fit(labelled())
    assert detector.outliers.equal(net.outliers)  # nothing was learned from the others yet
    detector.calibrate(images(60, seed=3))
    expected = torch.cat([net.outliers, fingerprints(outliers)])
    assert detector.outliers.equal(expected)
    detector.save(tmp_path / "weighed.kedge")
    again = kedge.load(tmp_path / "weighed.kedge")
    assert again.outliers.equal(expected)
    assert again.score(images(9)).equal(detector.score(images(9)))
    assert again(images(9)).is_ood.equal(detector(images(9)).is_ood)
    with pytest.raises(InputError, match=r"a file does not keep them: calibrate a new Mahalanobis\(net, outliers="):
        again.calibrate(images(60, seed=3))
    with pytest.raises(InputError, match=r'combine="logistic" needs outliers'):
        again.fit(labelled())
    assert Mahalanobis(network()).fit(labelled()).outliers is None


def test_outliers_come_through_the_same_preprocessing():
    large = outlying().repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    preprocess = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    kept = [
        Mahalanobis(network(), outliers=given).fit(labelled(), preprocess=preprocess).calibrate(images(60, seed=3))
        for given in (outlying(), large)
    ]
    assert kept[0].score(images(9)).equal(kept[1].score(images(9)))


def test_weights_come_with_calibration_and_go_with_a_new_fit():
    detector = Mahalanobis(network(), outliers=outlying()).fit(labelled())
    with pytest.raises(NotReadyError, match=r"no weights for its layers yet: call calibrate\(held_out\)"):
        detector.score(images())
    detector.calibrate(images(60, seed=3)).score(images())
    detector.fit(labelled())
    assert detector.outliers is None
    with pytest.raises(NotReadyError, match="no weights for its layers yet"):
        detector.score(images())


# Behind the six verbs.


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.01, "layers": ["stage2", "fc:in"]}])
@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_saved_and_loaded_it_scores_the_same(kind, options, tmp_path):
    net = network() if kind == "plain" else kedge.anchor(network(), init="fresh", seed=1)
    detector = Mahalanobis(net, **options).fit(labelled()).calibrate(images(40, seed=3))
    detector.save(tmp_path / "saved.kedge")
    again = kedge.load(tmp_path / "saved.kedge")
    assert again.config() == detector.config()
    assert again.score(images(9, seed=4)).equal(detector.score(images(9, seed=4)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("epsilon", [0.0, 0.01])
def test_a_score_does_not_depend_on_the_batch(dtype, tolerance, epsilon):
    detector = Mahalanobis(network(dtype), epsilon=epsilon).fit(labelled())
    x = images(11, seed=4)
    expected = detector.score(x)
    assert detector.score(x, batch_size=3).allclose(expected, rtol=tolerance)
    assert detector.score(x.flip(0)).flip(0).allclose(expected, rtol=tolerance)


def test_inputs_like_none_seen_are_flagged():
    x, y = vectors(300)
    detector = Mahalanobis(flat(3)).fit(pairs(x[:200], y[:200])).calibrate(x[200:])
    assert detector(x + 30).is_ood.all()
    assert detector(x[:200]).is_ood.double().mean() < 0.1


# What goes wrong.


def test_every_image_must_have_a_label_that_the_network_knows():
    x, y = vectors()
    for unlabelled in (x, [(row, -1 if i == 5 else 0) for i, row in enumerate(x)]):
        with pytest.raises(InputError, match=r"train_set must have a label for each image.*ImageSet with labels"):
            Mahalanobis(flat(3)).fit(unlabelled)
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.2, the classes of the network; got 1\.\.3"):
        Mahalanobis(flat(3)).fit(pairs(x, y + 1))


@pytest.mark.parametrize("n", [1, 3])
def test_one_class_must_have_two_images(n):
    x, _ = vectors(n)
    with pytest.raises(InputError, match=rf"at least two images of a class.*got {n} of {n} classes"):
        Mahalanobis(flat(3)).fit(pairs(x, torch.arange(n)))


def test_features_must_be_finite():
    net = flat(3)
    x, y = vectors()
    with torch.no_grad():
        net[1].weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"the features of layer '1' must be finite; 40 of 120"):
        Mahalanobis(net, layers=["1"]).fit(pairs(x, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "stage1"}, r"layers must be a sequence of names; got 'stage1'"),
        ({"layers": [1]}, r"layers must be a sequence of names; got \[1\]"),
        ({"layers": []}, r"layers must be at least one name, and each once; got \[\]"),
        ({"layers": ["fc", "fc"]}, r"each once; got \['fc', 'fc'\]"),
        ({"epsilon": -0.1}, r"epsilon must lie in \[0, 1\]; got -0.1"),
        ({"combine": "mean"}, r"combine must be one of 'equal', 'logistic'; got 'mean'"),
        ({"combine": "equal", "outliers": []}, r'outliers are of no use to combine="equal"'),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        Mahalanobis(network(), **options)


def test_layers_must_be_there_and_give_features():
    with pytest.raises(InputError, match="has no layer 'stage9'; did you mean"):
        Mahalanobis(network(), layers=["stage9"]).fit(labelled())
    with pytest.raises(InputError, match='combine="logistic" needs outliers to weigh the layers by'):
        Mahalanobis(network(), combine="logistic").fit(labelled())
    with pytest.raises(ArchitectureError, match="no linear layer"):
        Mahalanobis(nn.Sequential(nn.Conv2d(3, 2, 8), nn.Flatten()))
    with pytest.raises(InputError, match="an ensemble has no layers to read"):
        Mahalanobis(kedge.models.ensemble.Ensemble([network()])).fit(labelled())

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.total, self.fc = nn.Flatten(0), nn.Linear(1, 2)

        def forward(self, x):
            return self.fc(self.total(x.sum(dim=(1, 2, 3), keepdim=True))[:, None])

    with pytest.raises(InputError, match=r"layer 'total' must give \(B, channels, \.\.\.\); it gives \(60,\)"):
        Mahalanobis(Sums(), layers=["total"]).fit(labelled())
