"""Mahalanobis: squared distances to the closest class mean, against scipy, scikit-learn and naive autograd."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import OAS, EmpiricalCovariance
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from helpers import images, labelled, layer_maps, vector_network
from kedge.anchoring.sampling import choose_per_image
from kedge.data.leakage import fingerprints
from kedge.detectors.gaussians import oas, squared_distances
from kedge.detectors.logistic import logistic_regression
from kedge.detectors.mahalanobis import Mahalanobis
from kedge.detectors.registry import make
from kedge.errors import InputError, NotReadyError
from kedge.models import build
from kedge.models.ensemble import Ensemble
from kedge.seeds import seeded

LAYERS = ("stage1", "stage2", "stage3", "flatten")


def network(dtype=torch.float32) -> nn.Module:
    """A narrow network, so that no covariance is singular."""
    with seeded(0):
        net = build("compact", width=2, classes=4)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
    return net.to(dtype).eval()


def flat(width: int = 3, classes: int = 3) -> nn.Module:
    """A network whose features are its inputs."""
    return vector_network(torch.ones(classes, width))


def line(*values: float) -> torch.Tensor:
    """Vectors of one feature, (N, 1)."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def vectors(n=40, width=3, classes=3, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated vectors, around a mean for each class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    noise = rng.normal(size=(n, width)) @ rng.normal(size=(width, width))
    return torch.from_numpy(noise + 3 * rng.normal(size=(classes, width))[labels]), torch.from_numpy(labels)


def features(net: nn.Module, x: torch.Tensor, layers=LAYERS, anchors=None) -> list[torch.Tensor]:
    """The features (N, D) of each layer, averaged over space."""
    return [maps.mean(dim=2) for maps in layer_maps(net, x, layers, anchors)[1]]


def means_and_precision(values: np.ndarray, labels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The definition: a mean for each class, one covariance of what remains, its inverse."""
    means = {c: values[labels == c].mean(axis=0) for c in sorted(set(labels.tolist()))}
    centred = np.stack([row - means[c] for row, c in zip(values, labels.tolist(), strict=True)])
    fitted = EmpiricalCovariance(assume_centered=True).fit(centred)
    return list(means.values()), fitted.precision_


def closest(values: np.ndarray, means: list[np.ndarray], precision: np.ndarray) -> np.ndarray:
    return np.array([min(mahalanobis(row, mean, precision) ** 2 for mean in means) for row in values])


@torch.no_grad()
def distances(net: nn.Module, train: kedge.ImageSet, test: torch.Tensor) -> list[np.ndarray]:
    """The definition's squared distances of test images, for each layer."""
    pairs = zip(*(features(net, x.double() / 255) for x in (train.images, test)), strict=True)
    return [closest(b.numpy(), *means_and_precision(a.numpy(), train.labels.numpy())) for a, b in pairs]


# The distance.


@pytest.mark.parametrize(
    ("x", "y", "test", "expected"),
    [
        ([0, 2, 10, 12], [0, 0, 1, 1], [1, 5, 8, 14], [0, 16, 9, 9]),  # means 1 and 11, variance 1
        ([0, 2, 10, 12], [0, 0, 2, 2], [0, 6], [1, 25]),  # no images of class 1
        ([0, 2, 10], [0, 0, 1], [11], [1.5]),  # one of class 1: variance (1 + 1 + 0) / 3
    ],
)
def test_one_feature_by_hand(x, y, test, expected):
    detector = Mahalanobis(flat(1)).fit(TensorDataset(line(*x), torch.tensor(y)))
    assert detector.score(line(*test)).tolist() == pytest.approx(expected)
    assert len(detector.gaussians["1:in"].means) == 2


def test_layers_are_averaged_over_space_and_their_distances_summed():
    net, train, test = network(torch.float64), labelled(60), images(9, seed=5)
    detector = Mahalanobis(net).fit(train)
    assert detector.layers == LAYERS
    parts = distances(net, train, test)
    assert detector.score(test).numpy() == pytest.approx(sum(parts), rel=1e-6)
    for name, part in zip(LAYERS, parts, strict=True):
        assert Mahalanobis(net, layers=[name]).fit(train).score(test).numpy() == pytest.approx(part, rel=1e-6)


@pytest.mark.parametrize("width", [3, 6])
def test_the_precision_is_scikit_learn_s_also_of_a_singular_covariance(width):
    """A feature that never changes and one that is the sum of two others leave the covariance singular."""
    x, y = vectors(width=3)
    if width == 6:
        x = torch.cat([x, torch.full((len(x), 1), 7.0).double(), x[:, :1] + x[:, 1:2], x[:, 2:] * 1e-3], dim=1)
    detector = Mahalanobis(flat(width)).fit(TensorDataset(x, y))
    gaussians = detector.gaussians["1:in"]
    means, precision = means_and_precision(x.numpy(), y.numpy())
    assert gaussians.whitening.shape == (width, 3)
    np.testing.assert_allclose((gaussians.whitening @ gaussians.whitening.T).numpy(), precision, rtol=1e-6, atol=1e-9)
    assert gaussians.centre.allclose(x.mean(dim=0))
    tests = x[:5] + torch.randn(5, width).double()
    assert detector.score(tests).numpy() == pytest.approx(closest(tests.numpy(), means, precision), rel=1e-6)
    constant = vector_network(torch.zeros(3, width), torch.ones(3))  # a layer that never changes counts nothing
    assert not Mahalanobis(constant, layers=["1"]).fit(TensorDataset(x, y)).score(x).any()


@pytest.mark.parametrize("shrinkage", [0.05, 1e-17])  # with and without a variance in every direction
def test_a_shrunk_covariance_is_inverted_where_it_can_be(shrinkage):
    x, y = vectors(width=3)
    x = torch.cat([x, x[:, :1] + x[:, 1:2]], dim=1)  # singular
    gaussians = Mahalanobis(flat(4), shrinkage=shrinkage).fit(TensorDataset(x, y)).gaussians["1:in"]
    centred = np.concatenate([x[y == c] - x[y == c].mean(dim=0) for c in y.unique()])
    covariance = centred.T @ centred / len(x)
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / 4 * np.eye(4)
    precision = np.linalg.inv(shrunk) if shrinkage > 0.01 else np.linalg.pinv(covariance, rcond=1e-12, hermitian=True)
    assert gaussians.whitening.shape == (4, 4 if shrinkage > 0.01 else 3)
    np.testing.assert_allclose((gaussians.whitening @ gaussians.whitening.T).numpy(), precision, rtol=1e-9, atol=1e-12)


# Of the last layer: MDS, RMDS, MDS++ and RMDS++.


def relative_scores(train, labels, test, *, normalize=False, relative=True, share=OAS):
    """The definition, a class at a time, with scikit-learn's estimate of the share; both Gaussians have one ridge."""
    if normalize:
        train, test = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (train, test))
    means = [train[labels == c].mean(axis=0) for c in np.unique(labels)]
    residuals = np.concatenate([train[labels == c] - mean for c, mean in zip(np.unique(labels), means, strict=True)])
    s = share if share is not OAS else OAS(assume_centered=True).fit(residuals).shrinkage_
    ridge = s * np.mean(residuals**2) * np.eye(train.shape[1])
    precision = np.linalg.pinv((1 - s) * residuals.T @ residuals / len(train) + ridge)
    centre = train.mean(axis=0)
    background = np.linalg.pinv((1 - s) * (train - centre).T @ (train - centre) / len(train) + ridge)
    near = [min((z - m) @ precision @ (z - m) for m in means) for z in test]
    return np.array(near) - (np.array([(z - centre) @ background @ (z - centre) for z in test]) if relative else 0)


@pytest.mark.parametrize("n", [40, 12])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mds", {"relative": False}),
        ("rmds", {}),
        ("mds++", {"relative": False, "normalize": True}),
        ("rmds++", {"normalize": True}),
    ],
)
def test_variants_are_their_definitions_with_scikit_learn_s_oas_also_for_fewer_images_than_features(name, options, n):
    train, labels = vectors(n, width=20)
    test = 2 * vectors(9, width=20, seed=1)[0]
    expected = relative_scores(train.numpy(), labels.numpy(), test.numpy(), **options)
    detector = make(name, flat(20)).fit(TensorDataset(train, labels))
    assert detector.score(test).numpy() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shrinkage_is_the_share_of_the_mean_variance(share):
    train, labels = vectors(60)
    test = vectors(9, seed=1)[0]
    expected = relative_scores(train.numpy(), labels.numpy(), test.numpy(), share=share)
    detector = Mahalanobis(flat(), layers="last", relative=True, shrinkage=share).fit(TensorDataset(train, labels))
    assert detector.score(test).numpy() == pytest.approx(expected, rel=1e-8)


def test_a_relative_distance_by_hand():
    """Means 1 and 11 with variance 1; all of them have mean 6 and variance 26."""
    data = TensorDataset(line(0, 2, 10, 12), torch.tensor([0, 0, 1, 1]))
    detector = Mahalanobis(flat(1), relative=True, shrinkage=0).fit(data)
    assert detector.score(line(1, 6, 14)).tolist() == pytest.approx([-25 / 26, 25, 9 - 64 / 26])


def test_the_shrinkage_falls_with_the_number_of_images():
    covariance = torch.linspace(0.1, 2, 50).double().diag()
    shares = [oas(covariance, n) for n in (5, 50, 500, 5000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert shares[-1] < 0.05
    assert oas(torch.eye(4).double(), 100) == 1  # the same in all directions: nothing changes
    assert oas(torch.zeros(4, 4).double(), 100) == 1


def test_relative_distances_do_not_fall_in_directions_without_variance():
    """Training images vary in 10 of 40 features: a difference in the others is as far from the classes as from all."""
    train, labels = vectors(30, width=10)
    train = F.pad(train, (0, 30))
    far = train + F.pad(torch.ones(30, 30).double(), (10, 0))
    detector = make("rmds", flat(40)).fit(TensorDataset(train, labels))
    assert detector.score(far).tolist() == pytest.approx(detector.score(train).tolist(), rel=1e-6)


def test_scaled_features_do_not_depend_on_their_length():
    train, labels = vectors(60)
    detector = make("rmds++", flat()).fit(TensorDataset(train, labels))
    assert detector.score(7 * train[:5]).numpy() == pytest.approx(detector.score(train[:5]).numpy())


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, False),  # all stages
        ({"layers": "last"}, True),
        ({"layers": "last", "epsilon": 0.01}, False),
        ({"layers": "last", "combine": "logistic", "outliers": []}, False),
        ({"layers": ["fc:in"]}, False),  # a name that is given is read as it is
    ],
)
def test_the_last_layer_alone_is_what_extracted_features_are(options, takes):
    assert Mahalanobis(network(), **options).takes_features == takes


def test_the_last_layer_is_found_by_running_the_network():
    """The linear layer that is registered last is not the head here."""

    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.first = nn.Linear(8, 3), nn.Linear(3, 8)

        def forward(self, x):
            return self.head(self.first(x))

    x, y = vectors()
    detector = Mahalanobis(Swapped().double()).fit(TensorDataset(x, y))
    assert detector.layers == ("head:in",)
    assert detector.config()["head"] == "head"


# Learning in one pass.


@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_a_large_offset_costs_no_digits(offset):
    """Sums of squares near 1e16 would leave nothing of a variance near one."""
    x, y = vectors()
    far, near = x + offset, (x + offset) - offset  # rounded alike
    expected = Mahalanobis(flat(3)).fit(TensorDataset(near, y)).score(near)
    loader = DataLoader(TensorDataset(far, y), batch_size=7)
    assert Mahalanobis(flat(3)).fit(loader).score(far).numpy() == pytest.approx(expected.numpy(), rel=1e-6)


def test_rounding_errors_are_not_taken_for_a_direction():
    """Six features of two inputs: in float32 they vary in four more directions by rounding alone."""
    with seeded(0):
        net = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 3))
        net[0].bias.data += 50
    x, y = torch.randn(200, 2), torch.arange(200) % 3
    detector = Mahalanobis(net, layers=["0"]).fit(TensorDataset(x, y))
    assert detector.gaussians["0"].whitening.shape == (6, 2)
    tests = 3 * torch.randn(30, 2)
    means, precision = means_and_precision(x.double().numpy(), y.numpy())  # distances do not change by a linear map
    assert detector.score(tests).numpy() == pytest.approx(closest(tests.double().numpy(), means, precision), rel=1e-2)


# Moving the images.


def moved_scores(net: nn.Module, train: kedge.ImageSet, test: torch.Tensor, epsilon: float) -> list[float]:
    """Algorithm 1, an image and a layer at a time."""
    with torch.no_grad():
        learned = [
            [torch.tensor(np.stack(part)) for part in means_and_precision(z.numpy(), train.labels.numpy())]
            for z in features(net, train.images.double() / 255)
        ]

    def distance(pixels, name, means, precision):
        z = features(net, pixels[None], [name])[0][0]
        return torch.stack([(z - mean) @ precision @ (z - mean) for mean in means]).min()

    totals = []
    for image in test.double() / 255:
        total = 0.0
        for name, gaussians in zip(LAYERS, learned, strict=True):
            pixels = image.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(distance(pixels, name, *gaussians), pixels)
            total += float(distance(image - epsilon * gradient.sign(), name, *gaussians).detach())
        totals.append(total)
    return totals


def test_each_layer_moves_the_image_towards_its_own_closest_class():
    net, train, test = network(torch.float64), labelled(60), images(4, seed=5)
    expected = moved_scores(net, train, test, 0.004)
    still = Mahalanobis(net).fit(train).score(test)
    assert Mahalanobis(net, epsilon=0.004).fit(train).score(test).numpy() == pytest.approx(expected, rel=1e-5)
    assert not np.allclose(still, expected, rtol=1e-2)


# Anchored networks.


def test_an_anchored_network_gives_the_mean_features_over_its_anchors():
    net = kedge.anchor(network(torch.float64), init="fresh", seed=3)
    train, test = labelled(30), images(4, seed=5)
    net.set_anchors(images(2, seed=8))
    expected = sum(distances(net, train, test))
    assert Mahalanobis(net).fit(train).score(test).numpy() == pytest.approx(expected, rel=1e-5)


def test_a_moved_image_keeps_the_anchors_of_the_image_it_was():
    """Anchors chosen by an image's pixels would otherwise change with the pixels."""
    net = kedge.anchor(network(torch.float64), init="fresh", seed=3)
    net.set_anchors(images(20, seed=8), per_image=2)
    train, x, layers = labelled(30), images(4, seed=5).double() / 255, ["stage3"]
    detector = Mahalanobis(net, layers=layers, epsilon=0.02).fit(train)
    gaussians = detector.gaussians["stage3"]
    expected = []
    for image in x:
        own = net.anchors[choose_per_image(image[None], 20, 2, net.options.seed)[:, 0]]
        pixels = image.clone().requires_grad_()
        z = features(net, pixels[None], layers, own)[0]
        (gradient,) = torch.autograd.grad(squared_distances(z, gaussians).sum(), pixels)
        with torch.no_grad():
            z = features(net, (image - 0.02 * gradient.sign())[None], layers, own)[0]
            expected.append(float(squared_distances(z, gaussians)))
    assert detector.score(x).numpy() == pytest.approx(expected, rel=1e-6)


# Weights for the layers, learned against outliers.


def spread(n=300, seed=0, shift=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3 == 0
    x = rng.normal(size=(n, 3)) * [1, 100, 0.01] + shift * y[:, None] * [1, 50, 0.02] + [0, 1000, -5]
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("n", [15, 300])
@pytest.mark.parametrize(("shift", "penalty"), [(0.0, 1.0), (1.0, 1.0), (50.0, 1.0), (50.0, 1e-4)])  # apart or not
def test_the_regression_is_scikit_learn_s(shift, penalty, n):
    x, y = spread(n, shift=shift)
    scaler = StandardScaler().fit(x.numpy())
    oracle = LogisticRegression(C=1 / penalty, tol=1e-12, max_iter=100000).fit(scaler.transform(x.numpy()), y.numpy())
    weights, bias = logistic_regression(x, y, penalty=penalty)
    expected = oracle.decision_function(scaler.transform(x.numpy()))
    assert (x @ weights + bias).numpy() == pytest.approx(expected, rel=1e-5 if penalty == 1 else 1e-4, abs=1e-5)


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


def outlying(n=50, seed=20) -> torch.Tensor:
    return images(n, seed=seed) // 4  # darker than the rest


def test_outliers_weigh_the_layers_by_a_logistic_regression():
    net, train, held_out, outliers = network(torch.float64), labelled(60), images(60, seed=3), outlying()
    detector = Mahalanobis(net, outliers=outliers, epsilon=0.002).fit(train)
    assert detector.combine == "logistic"
    assert detector.learns_held_out
    detector.calibrate(held_out)
    half = held_out[fingerprints(held_out)[:, 0] % 2 == 0]  # the half that calibrate gives to the method
    alone = [Mahalanobis(net, layers=[name], epsilon=0.002).fit(train) for name in LAYERS]
    inside, outside, x = (
        np.stack([each.score(data).numpy() for each in alone], axis=1) for data in (half, outliers, images(9, seed=6))
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
    detector = Mahalanobis(net, outliers=outliers).fit(labelled(60))
    assert detector.outliers.equal(net.outliers)  # nothing was learned from the others yet
    with pytest.raises(NotReadyError, match=r"no weights for its layers yet: call calibrate\(held_out\), or"):
        detector.score(images())
    detector.calibrate(images(60, seed=3)).save(tmp_path / "weighed.kedge")
    again = kedge.load(tmp_path / "weighed.kedge")
    assert detector.outliers.equal(again.outliers)
    assert again.outliers.equal(torch.cat([net.outliers, fingerprints(outliers)]))
    assert again.score(images(9)).equal(detector.score(images(9)))
    with pytest.raises(InputError, match=r"a file does not keep them: calibrate a new Mahalanobis\(net, outliers="):
        again.calibrate(images(60, seed=3))
    with pytest.raises(InputError, match=r'combine="logistic" needs outliers'):
        again.fit(labelled(60))


def test_outliers_come_through_the_same_preprocessing():
    large = outlying().repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    preprocess = kedge.Preprocess((3, 8, 8), resize="nearest", fit="stretch")
    detectors = [Mahalanobis(network(), outliers=given) for given in (outlying(), large)]
    for detector in detectors:
        detector.fit(labelled(60), preprocess=preprocess).calibrate(images(60, seed=3))
    assert detectors[0].score(images(9)).equal(detectors[1].score(images(9)))


# What goes wrong.


class Sums(nn.Module):
    """A network with a layer whose output has no channels."""

    def __init__(self):
        super().__init__()
        self.total, self.fc = nn.Flatten(0), nn.Linear(1, 2)

    def forward(self, x):
        return self.fc(self.total(x.sum(dim=(1, 2, 3), keepdim=True))[:, None])


X, Y = vectors()


@pytest.mark.parametrize(
    ("net", "options", "data", "message"),
    [
        (flat(), {}, X, "train_set must have a label for each image"),
        (flat(), {}, [(row, -1 if i == 5 else 0) for i, row in enumerate(X)], "a label for each image"),
        (flat(), {}, TensorDataset(X, Y + 1), r"labels must lie in 0\.\.2, the classes of the network; got 1\.\.3"),
        (flat(), {}, TensorDataset(X[:1], torch.arange(1)), "two images of a class.*got 1 of 1 classes"),
        (flat(), {}, TensorDataset(X[:3], torch.arange(3)), "two images of a class.*got 3 of 3 classes"),
        (network(), {"layers": ["stage9"]}, labelled(60), "has no layer 'stage9'; did you mean"),
        (network(), {"combine": "logistic"}, labelled(60), 'combine="logistic" needs outliers'),
        (Ensemble([network()]), {}, labelled(60), "an ensemble has no layers to read"),
        (Sums(), {"layers": ["total"]}, labelled(60), r"layer 'total' must give .*; it gives \(60,\)"),
    ],
)
def test_what_cannot_be_fitted_is_refused(net, options, data, message):
    with pytest.raises(InputError, match=message):
        Mahalanobis(net, **options).fit(data)
