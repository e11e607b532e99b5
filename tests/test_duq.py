"""DUQ: kernel values, a loss with a gradient penalty, centroids that follow the images, and the distance as score."""

import copy
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import images, labelled
from kedge.detectors import Cost
from kedge.detectors.trained.duq import DUQ, RBFHead, gradient_penalty, kernel_cross_entropy, log1mexp
from kedge.pixels import to_unit
from kedge.seeds import seeded
from kedge.studies.demo import demo_data
from kedge.training import Recipe, recipe, train
from method_helpers import small, step_of

DATA = labelled(48, classes=2, channels=1)


def linear(classes=3, **options) -> kedge.Classifier:
    """An RBF head on the normalised pixels themselves, two channels of two pixels, in double precision."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, classes)).double()
    net = kedge.Classifier(net, mean=[0.5, 0.25], std=[0.25, 2.0])
    return DUQ.prepare(net, **({"centroid_size": 3, "length_scale": 1.5, "gamma": 0.9} | options))


def batch(n=7, classes=3, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 2, 1, 2, generator=generator, dtype=torch.float64), torch.arange(n) % classes


def kernels(head: RBFHead, features: np.ndarray) -> np.ndarray:
    """K_c of each image, by the paper's formula."""
    weight, centroids = head.weight.detach().numpy(), head.centroids.numpy()
    values = np.zeros((len(features), len(weight)))
    for i, f in enumerate(features):
        for c in range(len(weight)):
            squared = sum((weight[c, e] @ f - centroids[c, e]) ** 2 for e in range(len(weight[c])))
            values[i, c] = math.exp(-squared / len(weight[c]) / (2 * head.length_scale**2))
    return values


def normalised(x: torch.Tensor) -> np.ndarray:
    mean, std = np.array([0.5, 0.25]), np.array([0.25, 2.0])
    return ((x.numpy() - mean[None, :, None, None]) / std[None, :, None, None]).reshape(len(x), -1)


def test_the_kernel_by_hand_and_by_the_paper_s_formula():
    head = RBFHead(nn.Linear(2, 2), 2, length_scale=0.5, gamma=0.9, seed=0)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]]]))
        head.centroids.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        logits = head(torch.tensor([[1.0, 1.0]]))
    # The first class maps to (1, 1), (0, -1) from its centroid; the second to (2, 0), (2, -1) off.
    # The mean squares are 1/2 and 5/2, over 2 * 0.25.
    assert logits.tolist() == [[-1.0, -5.0]]
    net, (x, _) = linear(), batch()
    with torch.no_grad():
        assert net(x).exp().numpy() == pytest.approx(kernels(net.network[1], normalised(x)), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_keeps_its_digits_at_both_ends(dtype):
    getcontext().prec = 60
    values = [-1e-30, -1e-6, -1e-3, -0.5, -0.6931, -0.6932, -1.0, -5.0, -30.0, -80.0]
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    expected = [float((1 - Decimal(value).exp()).ln()) for value in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=8 * torch.finfo(dtype).eps, abs=0)
    (slope,) = torch.autograd.grad(log1mexp(x).sum(), x)
    assert slope.tolist() == pytest.approx([-1 / math.expm1(-value) for value in x.tolist()], rel=1e-6, abs=0)


def naive_cross_entropy(k: np.ndarray, labels: list[int]) -> float:
    terms = [
        -math.log(k[i, c]) if c == label else -math.log(1 - k[i, c])
        for i, label in enumerate(labels)
        for c in range(k.shape[1])
    ]
    return sum(terms) / len(terms)


def naive_gradients(head: RBFHead, features: np.ndarray) -> np.ndarray:
    """The gradient of the sum of K_c with respect to the features, in closed form."""
    weight, centroids, k = head.weight.detach().numpy(), head.centroids.numpy(), kernels(head, features)
    gradients = np.zeros_like(features)
    for i, f in enumerate(features):
        for c in range(len(weight)):
            inner = weight[c].T @ (weight[c] @ f - centroids[c])
            gradients[i] -= k[i, c] * inner / (weight.shape[1] * head.length_scale**2)
    return gradients


@pytest.mark.parametrize("penalty", [0.0, 0.5, 3.0])
def test_the_loss_is_the_binary_cross_entropy_and_a_penalty_on_gradients_at_the_normalised_image(penalty):
    net, (x, y) = linear(), batch()
    head, features = net.network[1], normalised(x)
    lengths = [math.sqrt(sum(g**2)) for g in naive_gradients(head, features)]
    expected = naive_cross_entropy(kernels(head, features), y.tolist())
    expected += penalty * sum((length - 1) ** 2 for length in lengths) / len(lengths)
    for smoothing in (0.0, 0.3):  # which is not used
        result = DUQ.loss(penalty=penalty).loss(step_of(net, x, y, label_smoothing=smoothing))
        assert result.value.item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(result.logits, net(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_values_of_one_and_of_zero_give_finite_losses_and_gradients(dtype):
    logits = torch.tensor([[0.0, 0.0], [-1e5, -1e5], [0.0, -1e5]], dtype=dtype, requires_grad=True)
    loss = kernel_cross_entropy(logits, torch.tensor([0, 0, 0]))
    (gradient,) = torch.autograd.grad(loss, logits)
    floor = -math.log(torch.finfo(dtype).eps)  # for the other class at K = 1
    assert loss.item() == pytest.approx((floor + 1e5) / 6, rel=1e-6)
    assert torch.isfinite(gradient).all()
    assert gradient[1].tolist() == pytest.approx([-1 / 6, 0.0])  # pulled in even where K underflows


def test_the_penalty_can_be_trained_against():
    """Its own gradient, a second derivative, agrees with finite differences."""
    net, (x, y) = linear(), batch()
    loss, weight = DUQ.loss(penalty=2.0), net.network[1].weight
    (gradient,) = torch.autograd.grad(loss.loss(step_of(net, x, y)).value, weight)
    numeric = torch.zeros_like(weight)
    for index in np.ndindex(*weight.shape):
        values = []
        for move in (1e-6, -1e-6):
            moved = copy.deepcopy(net)
            moved.network[1].weight.data[index] += move
            values.append(loss.loss(step_of(moved, x, y)).value.item())
        numeric[index] = (values[0] - values[1]) / 2e-6
    torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-8)
    flat = torch.zeros(2, 3, requires_grad=True)  # an image without a gradient
    (gradient,) = torch.autograd.grad(gradient_penalty(flat), flat)
    assert gradient.tolist() == [[0.0] * 3] * 2
    net = kedge.Classifier(DUQ.prepare(small(dropout=0.3)), mean=0.5, std=0.25).train()  # batch norm, pooling, dropout
    x = to_unit(images(8, channels=1))
    DUQ.loss().loss(step_of(net, x, torch.arange(8) % 2)).value.backward()
    assert not x.requires_grad
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert net.network.prep[0].weight.grad.abs().max() > 0


def test_centroids_are_the_running_means_of_their_images_embeddings():
    net, gamma = linear(gamma=0.9), 0.9
    head = net.network[1]
    weight = head.weight.detach().numpy()
    counts = np.full(3, 1 - gamma)  # a first centroid weighs as much as one image
    sums = head.centroids.numpy().copy() * (1 - gamma)
    for number in range(5):
        x, y = batch(n=6, classes=2 if number < 4 else 3, seed=number)
        DUQ.loss().after_step(step_of(net, x, y))
        for c in range(3):
            own = [weight[c] @ f for f, label in zip(normalised(x), y.tolist(), strict=True) if label == c]
            counts[c] = gamma * counts[c] + (1 - gamma) * len(own)
            sums[c] = gamma * sums[c] + (1 - gamma) * sum(own)
        assert head.centroids.numpy() == pytest.approx(sums / counts[:, None], rel=1e-12)
        assert head.counts.numpy() == pytest.approx(counts, rel=1e-12)


def test_a_class_that_never_appears_keeps_its_centroid():
    head = RBFHead(nn.Linear(2, 2), 2, length_scale=0.1, gamma=0.5, seed=0)
    drawn = head.centroids.clone()
    for _ in range(300):
        head.move(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))
    assert head.counts[1] == 0  # it faded away
    assert torch.equal(head.centroids[1], drawn[1])
    head.move(torch.ones(3, 2), torch.ones(3, dtype=torch.long))
    torch.testing.assert_close(head.centroids, head.embed(torch.ones(1, 2))[0].detach())


def test_the_features_are_those_of_evaluation_and_nothing_else_moves():
    net = kedge.Classifier(DUQ.prepare(small()), mean=0.5, std=0.25)
    expected, before = copy.deepcopy(net).eval(), copy.deepcopy(net.state_dict())
    x, y = to_unit(images(8, channels=1)), torch.arange(8) % 2
    with torch.no_grad():
        expected.network.fc.move(expected.features(x, ["fc:in"])[1]["fc:in"], y)
    DUQ.loss().after_step(step_of(net.train(), x, y))
    assert all(module.training for module in net.modules())
    assert all(p.grad is None for p in net.parameters())
    torch.testing.assert_close(net.network.fc.centroids, expected.network.fc.centroids)
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"network.fc.centroids", "network.fc.counts"}


def test_several_processes_move_the_centroids_as_one_would(monkeypatch):
    x, y = batch(n=4)
    together, apart = linear(), linear()
    DUQ.loss().after_step(step_of(together, torch.cat([x, x]), torch.cat([y, y])))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.mul_(2))  # the other has the same images
    DUQ.loss().after_step(step_of(apart, x, y))
    torch.testing.assert_close(apart.network[1].centroids, together.network[1].centroids)
    torch.testing.assert_close(apart.network[1].counts, together.network[1].counts)


def blobs(n=90, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes of vectors around the corners of a triangle in the unit square."""
    generator = torch.Generator().manual_seed(seed)
    corners, labels = torch.tensor([[0.3, 0.3], [0.7, 0.3], [0.5, 0.7]]), torch.arange(n) % 3
    return corners[labels] + 0.03 * torch.randn(n, 2, generator=generator), labels


def test_a_linear_problem_is_learned_and_vectors_elsewhere_are_further_away():
    data = [(x, int(y)) for x, y in zip(*blobs(), strict=True)]
    with seeded(0):
        net = DUQ.prepare(nn.Sequential(nn.Linear(2, 3)), centroid_size=2, length_scale=0.3)
    how = Recipe(epochs=20, batch=15, lr=0.05, weight_decay=0.0, crop=0, flip=False)
    net = train(net, data, how, loss=DUQ.loss(penalty=0.05))
    assert net.record["loss"] == {"name": "duq", "penalty": 0.05}
    inside, y = blobs(seed=1)
    detector = DUQ(net).fit(data)
    with torch.no_grad():
        assert (net(inside).argmax(dim=1) == y).all()
    elsewhere = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.0, 0.6], [1.0, 0.6]])
    assert detector.score(elsewhere).min() > detector.score(inside).max()


def test_the_score_is_the_squared_distance_to_the_closest_centroid():
    net, (x, _) = linear(), batch()
    detector = DUQ(net).fit(x)
    k = kernels(net.network[1], normalised(x))
    assert detector.score(x).numpy() == pytest.approx([-math.log(max(row)) for row in k], rel=1e-10)
    order = np.argsort([1 - max(row) for row in k])  # the paper's uncertainty
    assert np.array_equal(np.argsort(detector.score(x).numpy()), order)
    assert detector.cost == Cost(forward=1)
    far = linear(length_scale=1e-3)
    with torch.no_grad():
        assert (far(x).exp() == 0).all()
    assert len(set(DUQ(far).fit(x).score(x).tolist())) == len(x)  # still ordered where every kernel value underflows


@pytest.mark.slow
def test_digits_are_learned_about_as_well_as_with_cross_entropy():
    """About a minute on one core."""
    data, how = demo_data(), recipe("demo", epochs=4)
    accuracy = []
    for prepare, loss in ((lambda net: net, None), (DUQ.prepare, DUQ.loss())):
        with seeded(0):
            net = prepare(kedge.models.build("compact", width=8, classes=8, channels=1))
        net = train(net, data.train, how, loss=loss)
        with torch.no_grad():
            predicted = net(to_unit(data.calibration.images)).argmax(dim=1)
        accuracy.append((predicted == data.calibration.labels).double().mean().item())
    assert accuracy[0] > 0.97
    assert accuracy[1] > accuracy[0] - 0.02
