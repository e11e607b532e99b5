"""SVI and SVI-AvUC: weights that are Gaussians, how they are trained, and the mean softmax over their draws."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import nn

import kedge
from kedge.detectors.registry import DETECTORS
from kedge.detectors.svi import SVI, SVILoss, divergence, gaussians
from kedge.detectors.svi_avuc import AvUCLoss, SVIAvUC, avuc
from kedge.errors import ArchitectureError, InputError
from kedge.models import build
from kedge.models.ensemble import Ensemble
from kedge.seeds import seeded
from kedge.training import Recipe, train
from kedge.training.losses import Step

SCORES = ["msp", "entropy", "mutual_information"]
KINDS = ["plain", "anchored"]
RECIPE = Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for kind in (SVI, SVIAvUC):
        monkeypatch.setitem(DETECTORS, kind.name, kind)


def images(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator)


def labelled(n=64, seed=0):
    """Noise, brighter for each class."""
    labels = torch.arange(n) % 3
    pixels = images(n, seed) // 3 + (labels * 80).to(torch.uint8)[:, None, None, None]
    return kedge.ImageSet(pixels, labels, "toy")


def network(kind="plain", dtype=torch.float32):
    with seeded(0):
        net = build("compact", width=4, classes=3, channels=1).to(dtype)
        net.fc.weight.data.mul_(5)
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", mean=0.5, std=0.25)
    return kedge.Classifier(net, mean=0.5, std=0.25)


def dense():
    """Two linear layers, which numpy can follow."""
    with seeded(3):
        return nn.Sequential(nn.Flatten(), nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def vectors(n=5):
    return torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def a_step(net, x, y, *, done=1.0, images=10, label_smoothing=0.0):
    net = net if isinstance(net, kedge.Classifier) else kedge.Classifier(net)
    net.train()
    return Step(net, net, x, y, None, None, None, {}, done, 0, images, label_smoothing)


def fixed(net):
    """A network without noise, so that its loss can be worked out."""
    for gaussian, mean in gaussians(net):
        gaussian.noise = torch.zeros_like(mean)
    return net


def total_divergence(net):
    with torch.no_grad():
        return sum(float(gaussian.divergence(mean)) for gaussian, mean in gaussians(net))


def same(a, b):
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# The divergence from the prior.


@pytest.mark.parametrize(
    ("mean", "deviation", "prior_mean", "prior"), [(0.3, 0.2, 0.0, 1.0), (-1.0, 2.0, 0.5, 0.7), (0.4, 0.3, 0.4, 0.3)]
)
def test_the_divergence_is_its_integral(mean, deviation, prior_mean, prior):
    def integrand(w):
        log_q, log_p = norm.logpdf(w, mean, deviation), norm.logpdf(w, prior_mean, prior)
        return math.exp(log_q) * (log_q - log_p)

    expected = quad(integrand, mean - 12 * deviation, mean + 12 * deviation)[0]
    found = divergence(torch.full((2, 3), mean), torch.full((2, 3), deviation), prior_mean, prior)
    assert float(found) == pytest.approx(6 * expected, rel=1e-5, abs=1e-6)


def test_the_divergence_of_a_network_sums_over_its_weights():
    net = SVI.prepare(dense(), initial=0.5, prior=2.0)
    with torch.no_grad():
        for gaussian, _ in gaussians(net):
            gaussian.rho.uniform_(-0.1, 0.1)
    total = 0.0
    for layer, fan_in in ((net[1], 3), (net[3], 6)):
        prior = 2.0 / math.sqrt(fan_in)
        held = layer.parametrizations.weight
        for mean, deviation in zip(held.original.flatten().tolist(), held[0].deviation.flatten().tolist(), strict=True):
            p, q = torch.distributions.Normal(0.0, prior), torch.distributions.Normal(mean, deviation)
            total += float(torch.distributions.kl_divergence(q, p))
    assert total_divergence(net) == pytest.approx(total, rel=1e-5)


# The network.


def test_preparing_copies_and_keeps_the_function():
    net = network()
    before = copy.deepcopy(net.state_dict())
    prepared = SVI.prepare(net)
    x = torch.rand(4, 1, 8, 8)
    assert prepared.eval()(x).equal(net.eval()(x))
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert not gaussians(net)
    assert len(gaussians(prepared)) == 9  # eight convolutions and the head


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (nn.Linear(7, 2), 7),
        (nn.Conv1d(3, 2, 5), 15),
        (nn.Conv2d(3, 2, (2, 3)), 18),
        (nn.Conv3d(3, 2, 2), 24),
        (nn.Conv2d(4, 2, 3, groups=2), 18),
    ],
)
def test_the_prior_follows_the_inputs_of_a_layer(layer, fan_in):
    for options, prior, share in (({}, 1.0, 0.1), ({"prior": 3.0, "initial": 0.5}, 3.0, 0.5)):
        ((gaussian, mean),) = gaussians(SVI.prepare(layer, **options))
        assert mean.equal(layer.weight)
        assert gaussian.prior == pytest.approx(prior / math.sqrt(fan_in))
        assert gaussian.deviation.allclose(torch.tensor(share * prior / math.sqrt(fan_in)))


def test_training_mode_draws_at_every_forward_and_evaluation_uses_the_means():
    net, x = SVI.prepare(dense()), vectors()
    with torch.no_grad():
        net.train()
        assert not net(x).allclose(net(x))
        net.eval()
        assert net(x).equal(dense()(x))


def test_draws_in_training_have_the_deviation_that_they_should():
    net = SVI.prepare(nn.Linear(4, 2, bias=False), initial=0.5)
    with torch.no_grad():
        net.parametrizations.weight[0].rho[0, 0] = 0.1
        draws = torch.stack([net.weight for _ in range(2000)])
        mean = net.eval().weight
    expected = torch.full((2, 4), 0.25)
    expected[0, 0] *= math.e  # exp(10 * 0.1)
    assert (draws.std(dim=0) / expected - 1).abs().max() < 4 / math.sqrt(2 * 2000)
    assert ((draws.mean(dim=0) - mean).abs() < 4 * expected / math.sqrt(2000)).all()


def test_preparing_keeps_modes_and_generator():
    net = network().eval()
    net.network.stage1.train()
    state = torch.get_rng_state()
    prepared = SVI.prepare(net)
    assert torch.get_rng_state().equal(state)
    assert not prepared.network.prep[0].parametrizations.weight[0].training
    assert prepared.network.stage1[0][0].parametrizations.weight[0].training
    assert SVI.prepare(network().train()).network.fc.parametrizations.weight[0].training


def test_weight_decay_alone_pulls_the_deviation_back_to_where_it_began():
    net = SVI.prepare(nn.Linear(4, 2, bias=False), initial=0.2)
    gaussian = net.parametrizations.weight[0]
    optimizer = torch.optim.SGD([gaussian.rho], lr=1.0, weight_decay=0.1)
    for start in (-0.2, 0.2):
        gaussian.rho.data.fill_(start)
        gaussian.rho.grad = torch.zeros_like(gaussian.rho)
        for _ in range(200):
            optimizer.step()
        assert gaussian.deviation.detach().allclose(torch.tensor(0.1), rtol=1e-4)  # 0.2 of 1 / sqrt(4)


@pytest.mark.parametrize("prior_mean", ["zero", "weights"])
def test_the_prior_stands_at_zero_or_at_the_weights(prior_mean):
    net = SVI.prepare(dense(), initial=1.0, prior_mean=prior_mean)  # as wide as the prior
    total = total_divergence(net)
    squares = sum(
        float((layer.weight.detach() ** 2).sum()) * layer.in_features / 2 for layer in (dense()[1], dense()[3])
    )
    assert total == pytest.approx(0 if prior_mean == "weights" else squares, abs=1e-9)


def test_a_copy_has_weights_of_its_own():
    net = SVI.prepare(network())
    other = copy.deepcopy(net)
    with torch.no_grad():
        gaussians(other)[0][0].rho.fill_(0.3)
    assert gaussians(net)[0][0].rho.eq(0).all()
    assert same(net, copy.deepcopy(net))


# The loss.


@pytest.mark.parametrize(("done", "share"), [(0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (0.9, 1.0)])
def test_the_loss_is_cross_entropy_and_a_divergence_that_grows(done, share):
    net, x, y = fixed(SVI.prepare(dense())), vectors(), torch.tensor([0, 1, 2, 3, 0])
    plain = dense()
    z = plain(x).detach().numpy()
    expected = np.mean([math.log(sum(np.exp(row))) - row[label] for row, label in zip(z, y.tolist(), strict=True)])
    for layer in (plain[1], plain[3]):
        prior, deviation = 1 / math.sqrt(layer.in_features), 0.1 / math.sqrt(layer.in_features)
        for mean in layer.weight.flatten().tolist():
            one = math.log(prior / deviation) + (deviation**2 + mean**2) / (2 * prior**2) - 0.5
            expected += share * 0.7 * one / 40
    found = SVILoss(kl_weight=0.7, warmup=0.4).loss(a_step(net, x, y, done=done, images=40))
    assert found.value.item() == pytest.approx(expected, rel=1e-9)
    assert found.logits.softmax(dim=1).detach().numpy() == pytest.approx(
        np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    )


def test_by_default_the_divergence_is_averaged_over_the_weights_where_they_are_more_than_the_images():
    net, x, y = fixed(SVI.prepare(dense())), vectors(), torch.tensor([0, 1, 2, 3, 0])
    total = total_divergence(net)
    known = nn.functional.cross_entropy(dense()(x), y).item()
    for images, divisor in ((10, 42), (42, 42), (100, 100)):  # 3 * 6 and 6 * 4 weights
        found = SVILoss().loss(a_step(net, x, y, images=images))
        assert found.value.item() == pytest.approx(known + total / divisor)


def test_without_a_warm_up_the_divergence_counts_from_the_start():
    net, x, y = SVI.prepare(dense()), vectors(), torch.tensor([0, 1, 2, 3, 0])
    values = []
    for warmup in (0.0, 1.0):
        torch.manual_seed(0)
        values.append(SVILoss(1.0, warmup).loss(a_step(net, x, y, done=0.0)).value.item())
    total = total_divergence(net)
    assert values[0] - values[1] == pytest.approx(total / 10)


def test_several_draws_per_step_take_the_mean_of_their_losses():
    net, x, y = SVI.prepare(dense()).train(), vectors(), torch.tensor([0, 1, 2, 3, 0])
    torch.manual_seed(0)
    draws = [net(x), net(x), net(x)]
    expected = sum(nn.functional.cross_entropy(z, y, label_smoothing=0.1).item() for z in draws) / 3
    torch.manual_seed(0)
    found = SVILoss(kl_weight=0.0, samples=3).loss(a_step(net, x, y, label_smoothing=0.1))
    assert found.value.item() == pytest.approx(expected)
    assert found.logits.exp().allclose(sum(z.softmax(dim=1) for z in draws) / 3)


def test_the_loss_moves_means_and_deviations_alike():
    net, y = SVI.prepare(dense()), torch.tensor([0, 1, 2, 3, 0])
    SVILoss().loss(a_step(net, vectors(), y)).value.backward()
    for gaussian, mean in gaussians(net):
        assert float(mean.grad.abs().min()) > 0
        assert float(gaussian.rho.grad.abs().min()) > 0


@pytest.mark.parametrize("loss", [SVI.loss(), SVIAvUC.loss()])
@pytest.mark.parametrize("kind", KINDS)
def test_networks_learn(kind, loss):
    data = labelled()
    net = train(SVI.prepare(network(kind)), data, Recipe(epochs=6, batch=16, lr=0.1, crop=0, flip=False), seed=1,
                loss=loss)  # fmt: skip
    detector = SVI(net, samples=5).fit(data).calibrate(labelled(seed=1))
    accuracy = (detector(labelled(seed=2).images).label == data.labels).double().mean()
    assert accuracy > 0.9
    assert any(not gaussian.rho.eq(0).all() for gaussian, _ in gaussians(net))
    assert net.record["loss"]["warmup"] == 0.3


def test_masked_pairs_are_trained_towards_their_targets():
    net = kedge.anchor(network().network, mask=0.5, mask_target="uniform")
    assert train(SVI.prepare(net), labelled(), RECIPE, loss=SVI.loss()).record["epochs"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_weight": -1.0}, "kl_weight must lie in"),
        ({"warmup": 1.5}, "warmup must lie in"),
        ({"samples": 0}, "samples must be a whole number of at least 1"),
    ],
)
def test_objectives_check_their_arguments(options, message):
    for kind in (SVI, SVIAvUC):
        with pytest.raises(InputError, match=message):
            kind.loss(**options)


def test_a_network_that_was_not_prepared_is_refused():
    for kind in (SVI, SVIAvUC):
        with pytest.raises(InputError, match=r"Gaussian weights: make it with SVI\.prepare\(net\)"):
            kind(network())
        with pytest.raises(InputError, match=r"Gaussian weights: make it with SVI\.prepare\(net\)"):
            train(network(), labelled(), RECIPE, loss=kind.loss())
        with pytest.raises(InputError, match="got str"):
            kind("resnet18")


# What cannot be prepared.


def test_arguments_of_prepare_are_checked():
    for name in ("initial", "prior"):
        with pytest.raises(InputError, match=rf"{name} must lie in \(0, inf\); got 0"):
            SVI.prepare(dense(), **{name: 0.0})
    with pytest.raises(InputError, match="prior_mean must be one of 'zero', 'weights'; got 'one'"):
        SVI.prepare(dense(), prior_mean="one")
    with pytest.raises(InputError, match="got an ensemble; prepare each of its members"):
        SVI.prepare(Ensemble([network(), network()]))


def test_layers_that_cannot_be_gaussian_are_named():
    with pytest.raises(ArchitectureError, match="no Conv1d, Conv2d, Conv3d or Linear layer"):
        SVI.prepare(nn.Sequential(nn.Flatten(), nn.ReLU()))
    with pytest.raises(ArchitectureError, match=r"'1' computes its weight from other parameters \(SVI\.prepare"):
        SVI.prepare(SVI.prepare(dense()))
    normed = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    with pytest.raises(ArchitectureError, match="'1' computes its weight from other parameters"):
        SVI.prepare(normed)
    with pytest.raises(ArchitectureError, match="'0' is lazy; run one batch"):
        SVI.prepare(nn.Sequential(nn.LazyLinear(2)))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ArchitectureError, match="layers '0' and '1' share their weight"):
        SVI.prepare(tied)


def test_a_prepared_network_cannot_be_anchored_any_more_but_an_anchored_one_prepared():
    with pytest.raises(ArchitectureError, match="contains a Gaussian"):
        kedge.anchor(SVI.prepare(network()))
    net = SVI.prepare(network("anchored"))
    assert len(gaussians(net)) == 8  # the anchored layer stays as it is
    assert isinstance(net.anchored_layer.layer_x.weight, nn.Parameter)


# The detector.


def drawn_weights(detector):
    """The weights of both layers of `dense` under each draw."""
    found = []
    for number in range(detector.samples):
        with detector.drawn(number):
            layers = [m for m in detector.net.modules() if isinstance(m, nn.Linear)]
            found.append([layer.weight.detach().numpy().copy() for layer in layers])
    return found


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_those_of_the_definition(score):
    x = vectors()
    detector = SVI(SVI.prepare(dense(), initial=0.5), samples=6, score=score, seed=5).fit(x)
    biases = [layer.bias.detach().numpy() for layer in (dense()[1], dense()[3])]
    expected, logits = [], []
    for row in x.numpy():
        softmaxes = []
        for w1, w2 in drawn_weights(detector):
            z = w2 @ np.maximum(w1 @ row + biases[0], 0) + biases[1]
            softmaxes.append(np.exp(z) / np.exp(z).sum())
        mean = sum(softmaxes) / 6
        entropy = -sum(p * math.log(p) for p in mean)
        each = sum(-sum(p * math.log(p) for p in softmax) for softmax in softmaxes) / 6
        expected.append({"msp": -max(mean), "entropy": entropy, "mutual_information": entropy - each}[score])
        logits.append([math.log(p) for p in mean])
    with torch.no_grad():
        found = detector.outputs(x)
    assert found.score.tolist() == pytest.approx(expected, rel=1e-9)
    assert found.logits.numpy() == pytest.approx(np.array(logits), rel=1e-9)


def test_the_draws_are_gaussian_with_the_learned_mean_and_deviation():
    """A linear layer applied to the unit vectors shows its weights."""
    net = SVI.prepare(nn.Linear(4, 5, bias=False).double(), initial=0.5)
    ((gaussian, mean),) = gaussians(net)
    with torch.no_grad():
        gaussian.rho.uniform_(-0.1, 0.1)
        found = SVI(net, samples=2000).per_anchor_logits(torch.eye(4, dtype=torch.float64)).mT  # (2000, 5, 4)
        expected = 0.25 * (10 * gaussian.rho).exp()
        assert ((found.mean(dim=0) - mean).abs() < 4 * expected / math.sqrt(2000)).all()
        standard = ((found - mean) / expected).flatten(1)  # (2000, 20)
    assert (standard.T.cov() - torch.eye(20)).abs().max() < 4.5 * math.sqrt(2 / 2000)
    share = float((standard.abs() < 1).double().mean())
    assert share == pytest.approx(0.6827, abs=4 * math.sqrt(0.6827 * 0.3173 / 40000))


def test_layers_and_seeds_have_draws_of_their_own():
    with seeded(0):
        net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net = SVI.prepare(net)
    means = [layer.weight.detach().numpy() for layer in net.eval()]
    every = []
    for seed in (0, 1):
        (weights,) = drawn_weights(SVI(net, samples=1, seed=seed))
        every += [weight - mean for weight, mean in zip(weights, means, strict=True)]
    assert all(not np.allclose(a, b) for i, a in enumerate(every) for b in every[:i])
    first = SVI(net, samples=2).per_anchor_logits(torch.eye(3))
    assert SVI(net, samples=5).per_anchor_logits(torch.eye(3))[:2].equal(first)  # more samples change none


@pytest.mark.parametrize("kind", KINDS)
def test_svi_without_variance_is_the_plain_network(kind):
    plain = network(kind)
    net = SVI.prepare(plain)
    with torch.no_grad():
        for gaussian, _ in gaussians(net):
            gaussian.rho.fill_(-math.inf)
    expected = kedge.MSP(plain).fit(images(30, seed=1))
    detector = SVI(net, samples=3).fit(images(30, seed=1))
    x = detector.as_input(images())
    with torch.no_grad():
        for hypothesis in detector.per_anchor_logits(x):
            assert hypothesis.equal(plain.eval()(x))
    assert detector.score(images()).allclose(expected.score(images()), atol=1e-6)
    mutual = SVI(net, score="mutual_information").fit(images(30, seed=1))
    assert mutual.score(images()).abs().max() < 1e-6


def test_an_anchored_network_gives_the_mean_over_its_anchors_under_each_draw():
    net = SVI.prepare(network("anchored", torch.float64), initial=0.5)
    net.set_anchors(images(4, seed=7))
    detector, x = SVI(net, samples=3), images(5)
    assert detector.cost.forward == 12
    found = detector.per_anchor_logits(x)
    for number in range(3):
        with detector.drawn(number):
            assert found[number].allclose(net.per_anchor_logits(x).mean(dim=0), rtol=1e-9)
    one = copy.deepcopy(net)
    expected = torch.zeros_like(found)
    for anchor in net.anchors:  # one at a time, each from a network that knows no other
        one.set_anchors(anchor[None])
        expected += SVI(one, samples=3).per_anchor_logits(x) / 4
    assert found.allclose(expected, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_the_batch(kind, score, dtype, tolerance):
    detector = SVI(SVI.prepare(network(kind, dtype), initial=0.5), samples=2, score=score).fit(images(seed=1))
    x, order = images(11), torch.randperm(11)
    expected = detector.score(x)
    for size in (1, 4):
        assert detector.score(x, batch_size=size).sub(expected).abs().max() <= tolerance
        assert detector.score(x[order], batch_size=size).sub(expected[order]).abs().max() <= tolerance
    assert len(set(expected.tolist())) == 11
    assert expected.dtype == dtype


def test_draws_are_the_same_in_every_precision_and_memory_layout():
    expected = SVI(SVI.prepare(network()), samples=2).per_anchor_logits(images())
    double = SVI(SVI.prepare(network(dtype=torch.float64)), samples=2).per_anchor_logits(images())
    assert expected.double().allclose(double, atol=1e-4)
    last = SVI(SVI.prepare(network()).to(memory_format=torch.channels_last), samples=2).per_anchor_logits(images())
    assert expected.allclose(last, atol=1e-4)


def test_scoring_leaves_network_and_generator_as_they_were():
    net = SVI.prepare(network())
    detector = SVI(net, samples=2).fit(images())
    net.train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    detector.score(images())
    assert torch.get_rng_state().equal(state)
    assert net.training
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    net.eval()
    x = torch.rand(2, 1, 8, 8)
    assert net(x).equal(network().eval()(x))  # the means again
    net.network.fc.bias = nn.Parameter(torch.zeros(9))  # fails in mid-pass
    with pytest.raises(RuntimeError):
        detector.score(images())
    assert all(gaussian.noise is None for gaussian, _ in gaussians(net))


def test_other_detectors_see_the_means():
    net = SVI.prepare(network())
    assert kedge.Energy(net).fit(images()).score(images()).equal(kedge.Energy(network()).fit(images()).score(images()))


def test_arguments_of_the_detector_are_checked():
    net = SVI.prepare(network())
    assert SVI(net).cost.forward == 10
    with pytest.raises(InputError, match="samples must be a whole number of at least 1"):
        SVI(net, samples=0)
    with pytest.raises(InputError, match="score must be one of 'msp'"):
        SVI(net, score="kl_uniform")
    with pytest.raises(InputError, match="'mutual_information' needs at least two"):
        SVI(net, samples=1, score="mutual_information")


# Files.


@pytest.mark.parametrize(
    ("method", "kind", "prior_mean"),
    [
        (SVI, "plain", "zero"),
        (SVI, "anchored", "weights"),
        (SVIAvUC, "plain", "weights"),
        (SVIAvUC, "anchored", "zero"),
    ],
)
def test_a_saved_detector_gives_the_same_scores(method, kind, prior_mean, tmp_path):
    net = method.prepare(network(kind), initial=0.3, prior_mean=prior_mean)
    train(net, labelled(), Recipe(epochs=1, batch=32, crop=0, flip=False), loss=method.loss())
    detector = method(net, samples=3, score="entropy", seed=2).fit(labelled()).calibrate(labelled(seed=1))
    detector.save(tmp_path / "x.kedge")
    again = kedge.load(tmp_path / "x.kedge")
    assert type(again) is method
    assert again.config() == {"samples": 3, "score": "entropy", "seed": 2}
    assert again(images()).score.allclose(detector(images()).score, atol=1e-6)  # in another memory layout
    assert same(again.net, net)
    assert total_divergence(again.net) == pytest.approx(total_divergence(net), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_ones_own_is_saved_and_built_again(kind, tmp_path):
    def own():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()

    net = SVI.prepare(own() if kind == "plain" else kedge.anchor(own()))
    detector = SVI(net, samples=3).fit(images(seed=1))
    detector.save(tmp_path / "x.kedge")
    again = kedge.load(tmp_path / "x.kedge", model=own())
    assert again.score(images()).equal(detector.score(images()))


# SVI-AvUC.


def naive_avuc(logits, labels, threshold):
    counts = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
    for row, label in zip(logits, labels, strict=True):
        e = [math.exp(z) for z in row]
        q = [value / sum(e) for value in e]
        p, u = max(q), -sum(value * math.log(value) for value in q)
        if q.index(p) == label:
            counts["AC" if u <= threshold else "AU"] += p * (1 - math.tanh(u) if u <= threshold else math.tanh(u))
        else:
            counts["IC" if u <= threshold else "IU"] += (1 - p) * (1 - math.tanh(u) if u <= threshold else math.tanh(u))
    return math.log(1 + (counts["AU"] + counts["IC"]) / (counts["AC"] + counts["IU"])), counts


def test_the_avuc_loss_is_its_definition():
    logits = torch.randn(40, 3, dtype=torch.float64) * 2
    labels = torch.where(torch.arange(40) % 2 == 0, logits.argmax(dim=1), torch.arange(40) % 3)
    for threshold in (0.3, 0.6, 0.9):
        expected, counts = naive_avuc(logits.tolist(), labels.tolist(), threshold)
        assert min(counts.values()) > 0
        assert float(avuc(logits, labels, threshold)) == pytest.approx(expected, rel=1e-12)


def test_the_avuc_loss_by_hand():
    """Two classes. Probabilities 0.9 and 0.6 have entropies 0.3251 and 0.6730, with tanh 0.3141 and 0.5870."""
    odds = math.log(9), math.log(1.5)
    logits = torch.tensor([[odds[0], 0], [odds[1], 0], [odds[0], 0], [odds[1], 0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])  # accurate and certain, accurate and uncertain, and both inaccurate
    good = 0.9 * (1 - 0.3141) + 0.4 * 0.5870
    bad = 0.6 * 0.5870 + 0.1 * (1 - 0.3141)
    assert float(avuc(logits, labels, 0.5)) == pytest.approx(math.log(1 + bad / good), abs=1e-4)
    assert float(avuc(logits[:1], labels[:1], 0.5)) == 0
    assert float(avuc(logits[3:], labels[3:], 0.5)) == 0


def test_an_entropy_at_the_threshold_is_certain():
    logits = torch.zeros(1, 2, dtype=torch.float64)
    assert float(avuc(logits, torch.tensor([0]), float(kedge.scores.entropy(logits)))) == 0


def test_the_gradient_of_the_avuc_loss():
    logits = (torch.randn(12, 3, dtype=torch.float64) * 2).requires_grad_()
    labels = torch.arange(12) % 3
    assert torch.autograd.gradcheck(lambda z: avuc(z, labels, 0.6), logits)
    only_bad = torch.tensor([[4.0, 0.0], [5.0, 0.0]], requires_grad=True)  # certain, and wrong
    value = avuc(only_bad, torch.tensor([1, 1]), 0.5)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(only_bad.grad).all()


def entropies(logits):
    return [-sum(q * math.log(q) for q in row) for row in logits.softmax(dim=1).tolist()]


def test_the_threshold_is_measured_over_the_warm_up_and_then_used():
    net, x = fixed(SVI.prepare(dense())), vectors(8)
    z = dense()(x).detach()
    right = z.argmax(dim=1)
    y = torch.where(torch.arange(8) % 3 == 0, (right + 1) % 4, right)  # images 0, 3 and 6 are wrong
    u = entropies(z)
    loss = AvUCLoss(kl_weight=0.2, warmup=0.5, beta=2.0)
    plain = SVILoss(kl_weight=0.2, warmup=0.5)
    for done, rows in ((0.0, slice(0, 4)), (0.4, slice(4, 8))):
        step = a_step(net, x[rows], y[rows], done=done)
        assert loss.loss(step).value.item() == pytest.approx(plain.loss(step).value.item())
    wrong, accurate = [u[i] for i in (0, 3, 6)], [u[i] for i in (1, 2, 4, 5, 7)]
    threshold = (sum(wrong) / 3 + sum(accurate) / 5) / 2
    assert loss.threshold == pytest.approx(threshold)
    for done in (0.5, 1.0):
        step = a_step(net, x, y, done=done)
        expected = plain.loss(step).value.item() + 2.0 * naive_avuc(z.tolist(), y.tolist(), threshold)[0]
        assert loss.loss(step).value.item() == pytest.approx(expected)
    assert loss.threshold == pytest.approx(threshold)  # measured in the warm-up alone
    assert loss.counts.tolist() == [3, 5]


@pytest.mark.parametrize("shift", [0, 1])
def test_where_all_predictions_are_right_or_all_wrong_their_mean_entropy_is_the_threshold(shift):
    net, x = fixed(SVI.prepare(dense())), vectors()
    z = dense()(x).detach()
    loss = AvUCLoss()
    loss.loss(a_step(net, x, (z.argmax(dim=1) + shift) % 4, done=0.1))
    assert loss.threshold == pytest.approx(sum(entropies(z)) / 5)


def test_several_draws_measure_the_entropy_of_their_mean_softmax():
    net, x = SVI.prepare(dense(), initial=1.0), vectors()
    net.train()
    torch.manual_seed(0)
    mean = (net(x).softmax(dim=1) + net(x).softmax(dim=1)).detach() / 2
    y = mean.argmax(dim=1)
    loss = AvUCLoss(samples=2)
    torch.manual_seed(0)
    loss.loss(a_step(net, x, y, done=0.0))
    assert loss.threshold == pytest.approx(sum(entropies(mean.log())) / 5)
    torch.manual_seed(0)
    bound = SVILoss(samples=2).loss(a_step(net, x, y)).value
    torch.manual_seed(0)
    value = loss.loss(a_step(net, x, y)).value
    expected = 3 * naive_avuc(mean.log().tolist(), y.tolist(), loss.threshold)[0]
    assert (value - bound).item() == pytest.approx(expected)


def test_processes_share_one_threshold(monkeypatch):
    """Beside this process, which saw one accurate image, stands another that saw three inaccurate ones."""
    elsewhere = torch.tensor([[1.8, 0.0], [3.0, 0.0]])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.add_(elsewhere))
    net, x = fixed(SVI.prepare(dense())), vectors(1)
    z = dense()(x).detach()
    loss = AvUCLoss()
    loss.loss(a_step(net, x, z.argmax(dim=1), done=0.0))
    assert loss.threshold == pytest.approx((0.6 + entropies(z)[0]) / 2)


def test_another_training_measures_anew():
    loss, data = SVIAvUC.loss(), labelled()
    first = train(SVIAvUC.prepare(network()), data, RECIPE, loss=loss)
    threshold, counts = loss.threshold, loss.counts.clone()
    assert 0 < threshold < math.log(3)
    assert 0 < int(counts.sum()) <= 0.3 * 3 * 64 + 16
    second = train(SVIAvUC.prepare(network()), data, RECIPE, loss=loss)
    assert loss.threshold == threshold
    assert loss.counts.equal(counts)
    assert same(first, second)


def test_without_its_weight_the_term_changes_nothing():
    data = kedge.ImageSet(images(48), torch.arange(48) % 3, "noise")  # so that some predictions are wrong
    plain = train(SVI.prepare(network()), data, RECIPE, loss=SVI.loss())
    silent = train(SVI.prepare(network()), data, RECIPE, loss=SVIAvUC.loss(beta=0.0))
    spoken = train(SVI.prepare(network()), data, RECIPE, loss=SVIAvUC.loss())
    assert same(plain, silent)
    assert not same(plain, spoken)


@pytest.mark.parametrize(("kind", "stop_at"), [("plain", 2), ("anchored", 4), ("plain", 8)])
def test_a_run_that_was_killed_ends_with_the_very_same_weights(tmp_path, kind, stop_at):
    """In the warm-up, at the end of an epoch, and after the warm-up, which ends within the fourth of twelve steps."""
    data = kedge.ImageSet(images(64), torch.arange(64) % 3, "noise")
    how = Recipe(epochs=3, batch=16, lr=0.05, crop=1, flip=False, ema=0.9)

    def begin(directory, **options):
        net = SVIAvUC.prepare(network(kind))
        return train(net, data, how, seed=2, loss=SVIAvUC.loss(), directory=directory, **options)

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.step == stop_at + 1:  # after the checkpoint of the step before
            raise StopError

    straight = begin(tmp_path / "straight")
    with pytest.raises(StopError):
        begin(tmp_path / "stopped", checkpoint_seconds=0.0, progress=stop)
    done = []
    resumed = begin(tmp_path / "stopped", progress=lambda progress: done.append(progress.step))
    assert done == list(range(stop_at + 1, 13))
    assert same(straight, resumed)


def test_arguments_of_avuc_are_checked():
    for warmup in (0.0, 1.0):
        with pytest.raises(InputError, match=r"warmup must lie in \(0, 1\)"):
            SVIAvUC.loss(warmup=warmup)
    with pytest.raises(InputError, match="beta must lie in"):
        SVIAvUC.loss(beta=-1.0)
    assert SVIAvUC.loss(kl_weight=0.5, warmup=0.2, samples=2, beta=1.0).config() == {
        "kl_weight": 0.5, "warmup": 0.2, "samples": 2, "beta": 1.0,
    }  # fmt: skip
    assert SVI.loss(kl_weight=0.5).config() == {"kl_weight": 0.5, "warmup": 0.3, "samples": 1}


def test_masked_pairs_cannot_be_certain_and_uncertain_at_once():
    net = SVIAvUC.prepare(kedge.anchor(network().network, mask=0.5, mask_target="uniform"))
    with pytest.raises(InputError, match=r"mask_target must be 'label' with this loss.*got 'uniform'"):
        train(net, labelled(), RECIPE, loss=SVIAvUC.loss())
    net = SVIAvUC.prepare(kedge.anchor(network().network, mask=0.5, mask_target="label"))
    assert train(net, labelled(), RECIPE, loss=SVIAvUC.loss()).record["loss"]["beta"] == 3.0
