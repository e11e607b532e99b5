"""DUQ: kernel values, a loss with a gradient penalty, centroids that follow the images, and the distance as score."""

import copy
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.detectors import Cost
from kedge.detectors.duq import DUQ, DUQLoss, RBFHead, gradient_penalty, kernel_cross_entropy, log1mexp
from kedge.errors import ArchitectureError, InputError
from kedge.models import build
from kedge.models.ensemble import Ensemble
from kedge.seeds import seeded
from kedge.studies.demo import demo_data
from kedge.training import Recipe, recipe, train
from kedge.training.losses import Step

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)


def images(n=48, seed=0, channels=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, 8, 8), dtype=torch.uint8, generator=generator)


def labelled(n=48, seed=0, classes=2) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), torch.arange(n) % classes, "toy")


def compact(classes=2, seed=0) -> nn.Module:
    with seeded(seed):
        return build("compact", width=4, classes=classes, channels=1)


def linear(classes=3, width=4, **options) -> kedge.Classifier:
    """An RBF head on the normalised pixels themselves, two channels of two pixels, in double precision."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(width, classes)).double()
    net = kedge.Classifier(net, mean=[0.5, 0.25], std=[0.25, 2.0])
    return DUQ.prepare(net, **({"centroid_size": 3, "length_scale": 1.5, "gamma": 0.9} | options))


def step_of(net, x, y, *, label_smoothing=0.0) -> Step:
    return Step(net, net, x, y, None, None, None, {}, 0.0, 0, len(x), label_smoothing)


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


# The head.


def test_the_kernel_by_hand():
    head = RBFHead(nn.Linear(2, 2), 2, length_scale=0.5, gamma=0.9, seed=0)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]]]))
        head.centroids.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        logits = head(torch.tensor([[1.0, 1.0]]))
    # The first class sees (1, 1), which is (0, -1) from its centroid; the second sees (2, 0), which is (2, -1) off.
    # The mean squares are 1/2 and 5/2, over 2 * 0.25.
    assert logits.tolist() == [[-1.0, -5.0]]


def test_the_kernel_is_the_paper_s_on_any_numbers():
    net, (x, _) = linear(), batch()
    with torch.no_grad():
        assert net(x).exp().numpy() == pytest.approx(kernels(net.network[1], normalised(x)), rel=1e-12)


def test_the_head_takes_the_place_of_the_last_layer_and_nothing_else_changes():
    original = compact(classes=3)
    net = DUQ.prepare(original)
    assert isinstance(original.fc, nn.Linear)
    assert net.fc.weight.shape == (3, 32, 32)  # as long as the penultimate vector by default
    assert net.fc.centroids.shape == (3, 32)
    kept = {name: value for name, value in original.state_dict().items() if not name.startswith("fc.")}
    assert all(torch.equal(net.state_dict()[name], value) for name, value in kept.items())
    assert DUQ.prepare(original, centroid_size=5).fc.weight.shape == (3, 5, 32)
    assert set(dict(net.fc.named_buffers())) == {"counts", "centroids"}


def test_another_layer_may_be_the_head_and_precision_follows_the_network():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    assert isinstance(DUQ.prepare(net, head="0")[0], RBFHead)
    head = DUQ.prepare(net)[1]
    assert {value.dtype for value in head.state_dict().values()} == {torch.float64}


def test_the_seed_alone_decides_the_new_head():
    before = torch.get_rng_state()
    first, again, other = (DUQ.prepare(compact(), seed=seed).fc.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["weight"], other["weight"])
    assert not torch.equal(first["centroids"], other["centroids"])


# The loss.


def exact_log1mexp(x: float) -> float:
    getcontext().prec = 60
    return float((1 - Decimal(x).exp()).ln())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_keeps_its_digits_at_both_ends(dtype):
    x = torch.tensor(
        [-1e-30, -1e-6, -1e-3, -0.5, -0.6931, -0.6932, -1.0, -5.0, -30.0, -80.0], dtype=dtype, requires_grad=True
    )
    expected = [exact_log1mexp(value) for value in x.tolist()]
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


def test_without_penalty_the_loss_is_the_mean_binary_cross_entropy_of_the_kernel_values():
    net, (x, y) = linear(), batch()
    made = DUQ.loss(penalty=0.0).loss(step_of(net, x, y))
    assert made.value.item() == pytest.approx(naive_cross_entropy(kernels(net.network[1], normalised(x)), y.tolist()))
    assert torch.equal(made.logits, net(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_values_of_one_and_of_zero_give_finite_losses_and_gradients(dtype):
    logits = torch.tensor([[0.0, 0.0], [-1e5, -1e5], [0.0, -1e5]], dtype=dtype, requires_grad=True)
    loss = kernel_cross_entropy(logits, torch.tensor([0, 0, 0]))
    (gradient,) = torch.autograd.grad(loss, logits)
    floor = -math.log(torch.finfo(dtype).eps)  # for the other class at K = 1
    assert loss.item() == pytest.approx((floor + 1e5) / 6, rel=1e-6)
    assert torch.isfinite(gradient).all()
    assert gradient[1, 0].item() == pytest.approx(-1 / 6)  # pulled in even where K underflows
    assert gradient[1, 1].item() == 0.0


def naive_gradients(head: RBFHead, features: np.ndarray) -> np.ndarray:
    """The gradient of the sum of K_c with respect to the features, in closed form."""
    weight, centroids, k = head.weight.detach().numpy(), head.centroids.numpy(), kernels(head, features)
    found = np.zeros_like(features)
    for i, f in enumerate(features):
        for c in range(len(weight)):
            inner = weight[c].T @ (weight[c] @ f - centroids[c])
            found[i] -= k[i, c] * inner / (weight.shape[1] * head.length_scale**2)
    return found


@pytest.mark.parametrize("penalty", [0.5, 3.0])
def test_the_penalty_asks_for_gradients_of_length_one_with_respect_to_the_normalised_image(penalty):
    net, (x, y) = linear(), batch()
    head, features = net.network[1], normalised(x)
    lengths = [math.sqrt(sum(g**2)) for g in naive_gradients(head, features)]
    expected = naive_cross_entropy(kernels(head, features), y.tolist())
    expected += penalty * sum((length - 1) ** 2 for length in lengths) / len(lengths)
    assert DUQ.loss(penalty=penalty).loss(step_of(net, x, y)).value.item() == pytest.approx(expected, rel=1e-12)


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


def test_an_image_without_a_gradient_does_no_harm():
    flat = torch.zeros(2, 3, requires_grad=True)
    loss = gradient_penalty(flat)
    (gradient,) = torch.autograd.grad(loss, flat)
    assert loss.item() == 1.0
    assert gradient.tolist() == [[0.0] * 3] * 2


def test_the_penalty_reaches_through_a_whole_network_with_batch_norm_pooling_and_dropout():
    with seeded(0):
        net = build("compact", width=4, classes=2, channels=1, dropout=0.3)
    net = kedge.Classifier(DUQ.prepare(net), mean=0.5, std=0.25).train()
    x, y = images(8).float() / 255, torch.arange(8) % 2
    made = DUQ.loss().loss(step_of(net, x, y))
    made.value.backward()
    assert not x.requires_grad
    missing = [name for name, p in net.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert missing == []
    assert net.network.prep[0].weight.grad.abs().max() > 0


def test_label_smoothing_is_not_used():
    net, (x, y) = linear(), batch()
    losses = [DUQ.loss().loss(step_of(net, x, y, label_smoothing=s)).value.item() for s in (0.0, 0.3)]
    assert losses[0] == losses[1]


def test_a_label_that_the_network_does_not_know_is_named():
    net, (x, _) = linear(), batch()
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.2"):
        DUQ.loss().loss(step_of(net, x, torch.full((7,), 3)))


# The centroids.


def test_centroids_are_the_running_means_of_what_their_images_are_embedded_to():
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


def test_the_first_images_outweigh_the_drawn_centroids():
    head = RBFHead(nn.Linear(2, 1), 2, length_scale=0.1, gamma=0.999, seed=0)
    drawn, features = head.centroids.clone(), torch.tensor([[1.0, 2.0]]).repeat(9, 1)
    head.move(features, torch.zeros(9, dtype=torch.long))
    mean = head.embed(features)[0].detach()
    torch.testing.assert_close(head.centroids, (0.999 * drawn + 9 * mean) / 9.999)


def test_a_class_that_never_appears_keeps_its_centroid():
    head = RBFHead(nn.Linear(2, 2), 2, length_scale=0.1, gamma=0.5, seed=0)
    drawn = head.centroids.clone()
    for _ in range(300):
        head.move(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))
    assert head.counts[1] == 0  # it faded away
    assert torch.equal(head.centroids[1], drawn[1])
    torch.testing.assert_close(head.centroids[0], head.embed(torch.ones(1, 2))[0, 0].detach())
    head.move(torch.ones(3, 2), torch.ones(3, dtype=torch.long))
    torch.testing.assert_close(head.centroids[1], head.embed(torch.ones(1, 2))[0, 1].detach())


def test_the_features_are_those_of_evaluation_and_moving_leaves_no_trace():
    net = kedge.Classifier(DUQ.prepare(compact()), mean=0.5, std=0.25)
    expected = copy.deepcopy(net).eval()
    x, y = images(8).float() / 255, torch.arange(8) % 2
    with torch.no_grad():
        _, found = expected.features(x, ["fc:in"])
    expected.network.fc.move(found["fc:in"], y)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    DUQ.loss().after_step(step_of(net, x, y))
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


# Training.


def blobs(n=90, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes of vectors around the corners of a triangle in the unit square."""
    generator = torch.Generator().manual_seed(seed)
    corners, labels = torch.tensor([[0.3, 0.3], [0.7, 0.3], [0.5, 0.7]]), torch.arange(n) % 3
    return corners[labels] + 0.03 * torch.randn(n, 2, generator=generator), labels


def pairs(x, y) -> list[tuple[torch.Tensor, int]]:
    return list(zip(x, y.tolist(), strict=True))


def test_a_linear_problem_is_learned_and_what_lies_elsewhere_is_further_away():
    with seeded(0):
        net = DUQ.prepare(nn.Sequential(nn.Linear(2, 3)), centroid_size=2, length_scale=0.3)
    how = Recipe(epochs=20, batch=15, lr=0.05, weight_decay=0.0, crop=0, flip=False)
    net = train(net, pairs(*blobs()), how, loss=DUQ.loss(penalty=0.05))
    assert net.record["loss"] == {"name": "duq", "penalty": 0.05}
    inside, y = blobs(seed=1)
    detector = DUQ(net).fit(pairs(*blobs()))
    with torch.no_grad():
        assert (net(inside).argmax(dim=1) == y).all()
    elsewhere = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.0, 0.6], [1.0, 0.6]])
    assert detector.score(elsewhere).min() > detector.score(inside).max()


def test_training_brings_the_centroids_to_the_mean_embedding_of_their_class():
    x, y = blobs()
    with seeded(0):
        net = DUQ.prepare(nn.Sequential(nn.Linear(2, 3)), centroid_size=2, gamma=0.9)
    how = Recipe(epochs=20, batch=15, lr=1e-4, weight_decay=0.0, crop=0, flip=False)
    net = train(net, pairs(x, y), how, loss=DUQ.loss(penalty=0.0))
    head = net.network[0]
    with torch.no_grad():
        embedded = head.embed(net.normalise(x))
    for c in range(3):
        assert (head.centroids[c] - embedded[y == c, c].mean(dim=0)).norm() < 0.1 * embedded[y == c, c].norm(
            dim=1
        ).mean()


def test_a_run_that_was_stopped_goes_on_to_the_very_same_weights_and_centroids(tmp_path):
    def run(directory, **options):
        net = DUQ.prepare(compact(), gamma=0.9)
        how = Recipe(epochs=3, batch=16, lr=0.05, crop=1, ema=0.9)
        return train(net, labelled(), how, loss=DUQ.loss(), directory=tmp_path / directory, **options)

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.step == 5:
            raise StopError

    straight = run("straight")
    with pytest.raises(StopError):
        run("stopped", checkpoint_seconds=0.0, progress=stop)
    resumed = run("stopped")
    assert "network.fc.centroids" in straight.state_dict()
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_what_cannot_be_trained_so_is_named():
    with pytest.raises(InputError, match=r"net must be a network with an RBF head, got one without.*DUQ\.prepare"):
        train(compact(), labelled(), RECIPE, loss=DUQ.loss())
    with pytest.raises(InputError, match="trains plain networks"):
        train(kedge.anchor(DUQ.prepare(compact())), labelled(), RECIPE, loss=DUQ.loss())
    with pytest.raises(InputError, match=r"penalty must lie in \[0, inf\]; got -1"):
        DUQ.loss(penalty=-1)
    assert DUQLoss().config() == {"penalty": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centroid_size": 0}, "centroid_size must be a whole number of at least 1; got 0"),
        ({"length_scale": 0.0}, r"length_scale must lie in \(0, inf\); got 0"),
        ({"gamma": 1.0}, r"gamma must lie in \(0, 1\); got 1"),
        ({"head": "prep"}, "head must name a linear layer"),
    ],
)
def test_arguments_of_prepare_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        DUQ.prepare(compact(), **options)


def test_networks_that_cannot_be_prepared_are_named():
    with pytest.raises(ArchitectureError, match="no linear layer"):
        DUQ.prepare(nn.Sequential(nn.Flatten()))
    with pytest.raises(InputError, match="got one with an RBF head already"):
        DUQ.prepare(DUQ.prepare(compact()))
    with pytest.raises(InputError, match="got an ensemble"):
        DUQ.prepare(Ensemble([compact(), compact()]))


# The detector.


def trained(classes=2) -> kedge.Classifier:
    return train(DUQ.prepare(compact(classes)), labelled(classes=classes), RECIPE, loss=DUQ.loss())


def test_the_score_is_the_squared_distance_to_the_closest_centroid():
    net, (x, _) = linear(), batch()
    detector = DUQ(net).fit(x)
    k = kernels(net.network[1], normalised(x))
    assert detector.score(x).numpy() == pytest.approx([-math.log(max(row)) for row in k], rel=1e-10)
    order = np.argsort([1 - max(row) for row in k])  # the paper's uncertainty
    assert np.array_equal(np.argsort(detector.score(x).numpy()), order)
    assert detector.cost == Cost(forward=1)
    assert detector.config() == {}


def test_images_so_far_away_that_every_kernel_value_is_zero_are_still_told_apart():
    net, (x, _) = linear(length_scale=1e-3), batch()
    with torch.no_grad():
        assert (net(x).exp() == 0).all()
    assert len(set(DUQ(net).fit(x).score(x).tolist())) == len(x)


def test_a_network_without_an_rbf_head_is_refused():
    for net in (compact(), Ensemble([DUQ.prepare(compact())])):
        with pytest.raises(InputError, match=r"net must be a network with an RBF head.*DUQ\.prepare\(net\)"):
            DUQ(net)


def test_a_saved_detector_says_the_same(tmp_path):
    detector = DUQ(trained()).fit(labelled()).calibrate(labelled(60, seed=1))
    detector.save(tmp_path / "duq.kedge")
    again = kedge.load(tmp_path / "duq.kedge")
    head = again.net.network.fc
    assert type(again) is DUQ
    assert (head.length_scale, head.gamma) == (0.1, 0.999)
    x = images(9, seed=2)
    assert again(x).score.equal(detector(x).score)
    assert again(x).is_ood.equal(detector(x).is_ood)
    assert again(x).logits.equal(detector(x).logits)


def test_a_network_of_one_s_own_is_saved_too(tmp_path):
    def mine():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 2))

    detector = DUQ(DUQ.prepare(mine(), centroid_size=7, seed=5)).fit(labelled())
    detector.save(tmp_path / "mine.kedge")
    again = kedge.load(tmp_path / "mine.kedge", model=mine())
    assert again.score(images(9)).equal(detector.score(images(9)))


def test_a_score_does_not_depend_on_its_batch():
    detector = DUQ(trained()).fit(labelled())
    x = images(12, seed=3)
    whole = detector.score(x)
    torch.testing.assert_close(detector.score(x.flip(0), batch_size=5).flip(0), whole, rtol=1e-4, atol=1e-6)


def test_an_anchored_network_gives_the_mean_over_its_anchors():
    net = kedge.anchor(DUQ.prepare(compact(classes=3)), init="fresh", mean=0.5, std=0.25).eval()
    detector = DUQ(net).fit(labelled(classes=3))
    x = images(6, seed=4)
    with torch.no_grad():
        each = net.per_anchor_logits(x.float() / 255)  # (K, B, C)
    expected = [min(-sum(each[k, i, c].item() for k in range(5)) / 5 for c in range(3)) for i in range(6)]
    assert detector.score(x).tolist() == pytest.approx(expected, rel=1e-4)
    assert detector.cost == Cost(forward=5)


@pytest.mark.slow
def test_digits_are_learned_about_as_well_as_by_a_plain_network():
    """About a minute on one core."""
    data, how = demo_data(), recipe("demo", epochs=4)
    accuracy = {}
    for name in ("plain", "duq"):
        with seeded(0):
            net = build("compact", width=8, classes=8, channels=1)
        loss = DUQ.loss() if name == "duq" else None
        net = train(DUQ.prepare(net) if name == "duq" else net, data.train, how, loss=loss)
        with torch.no_grad():
            found = net(data.calibration.images.float() / 255).argmax(dim=1)
        accuracy[name] = (found == data.calibration.labels).double().mean().item()
    assert accuracy["plain"] > 0.97
    assert accuracy["duq"] > accuracy["plain"] - 0.02
