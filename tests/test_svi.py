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
from helpers import images, same_weights
from kedge.detectors.trained import svi
from kedge.detectors.trained.svi import SVI, SVILoss, divergence, gaussians
from kedge.detectors.trained.svi_avuc import AvUCLoss, SVIAvUC, avuc
from kedge.errors import ArchitectureError, InputError
from kedge.seeds import seeded
from kedge.training import Recipe, train
from method_helpers import bright_classes, entropy, small, softmax, step_of

KINDS = ["unanchored", "anchored"]
RECIPE = Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False)
NOISE = kedge.ImageSet(images(64, channels=1), torch.arange(64) % 3, "noise")
LABELS = torch.tensor([0, 1, 2, 3, 0])


def network(kind="unanchored", dtype=torch.float32):
    net = small(classes=3).to(dtype)
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


def step(net, x, y, *, done=1.0, images=10, **fields):
    net = net if isinstance(net, kedge.Classifier) else kedge.Classifier(net)
    return step_of(net.train(), x, y, done=done, images=images, **fields)


@pytest.fixture
def without_noise(monkeypatch):
    """Draws of zero, so that a loss can be worked out."""
    fixed = svi.fixed_noise
    monkeypatch.setattr(svi, "fixed_noise", lambda net, _: fixed(net, lambda _, mean: torch.zeros_like(mean)))


def drawn_logits(net, x, count, generator):
    """The logits under the draws that a loss takes from a generator."""
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    logits = []
    for _ in range(count):
        with svi.fixed_noise(net, lambda _, mean: torch.empty_like(mean).normal_(generator=own)):
            logits.append(net(x))
    return logits


def total_divergence(net):
    with torch.no_grad():
        return sum(float(gaussian.divergence(mean)) for gaussian, mean in gaussians(net))


@pytest.mark.parametrize(
    ("mean", "deviation", "prior_mean", "prior"), [(0.3, 0.2, 0.0, 1.0), (-1.0, 2.0, 0.5, 0.7), (0.4, 0.3, 0.4, 0.3)]
)
def test_the_divergence_is_its_integral(mean, deviation, prior_mean, prior):
    def integrand(w):
        log_q, log_p = norm.logpdf(w, mean, deviation), norm.logpdf(w, prior_mean, prior)
        return math.exp(log_q) * (log_q - log_p)

    expected = quad(integrand, mean - 12 * deviation, mean + 12 * deviation)[0]
    result = divergence(torch.full((2, 3), mean), torch.full((2, 3), deviation), prior_mean, prior)
    assert float(result) == pytest.approx(6 * expected, rel=1e-5, abs=1e-6)


def test_preparing_copies_keeps_the_function_the_modes_and_the_generator():
    net, x, state = network().eval(), torch.rand(4, 1, 8, 8), torch.get_rng_state()
    net.network.stage1.train()
    prepared = SVI.prepare(net)
    assert torch.get_rng_state().equal(state)
    assert not prepared.network.prep[0].parametrizations.weight[0].training
    assert prepared.network.stage1[0][0].parametrizations.weight[0].training
    assert not gaussians(net)
    assert len(gaussians(prepared)) == 9  # eight convolutions and the head
    assert len(gaussians(SVI.prepare(network("anchored")))) == 8  # the anchored layer stays as it is
    assert prepared.eval()(x).equal(net.eval()(x))
    other = copy.deepcopy(prepared)
    with torch.no_grad():
        gaussians(other)[0][0].rho.fill_(0.3)
    assert gaussians(prepared)[0][0].rho.eq(0).all()  # a copy has weights of its own


def test_the_prior_follows_the_inputs_of_a_layer():
    convolutions = {15: nn.Conv1d(3, 2, 5), 18: nn.Conv2d(4, 2, 3, groups=2), 24: nn.Conv3d(3, 2, 2)}
    for fan_in, layer in ({7: nn.Linear(7, 2), 12: nn.Conv2d(2, 2, (2, 3))} | convolutions).items():
        for options, prior, share in (({}, 1.0, 0.1), ({"prior": 3.0, "initial": 0.5}, 3.0, 0.5)):
            ((gaussian, mean),) = gaussians(SVI.prepare(layer, **options))
            assert mean.equal(layer.weight)
            assert gaussian.prior == pytest.approx(prior / math.sqrt(fan_in))
            assert gaussian.deviation.allclose(torch.tensor(share * prior / math.sqrt(fan_in)))


def test_training_mode_draws_with_the_right_deviation_and_evaluation_uses_the_means():
    net = SVI.prepare(nn.Linear(4, 2, bias=False), initial=0.5)
    with torch.no_grad():
        net.parametrizations.weight[0].rho[0, 0] = 0.1
        draws = torch.stack([net.weight for _ in range(2000)])
        mean = net.eval().weight
        assert net.weight.equal(mean)
    expected = torch.full((2, 4), 0.25)
    expected[0, 0] *= math.e  # exp(10 * 0.1)
    assert (draws.std(dim=0) / expected - 1).abs().max() < 4 / math.sqrt(2 * 2000)
    assert ((draws.mean(dim=0) - mean).abs() < 4 * expected / math.sqrt(2000)).all()


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
    squares = sum(float((layer.weight.detach() ** 2).sum()) * layer.in_features / 2 for layer in dense()[1::2])
    assert total_divergence(net) == pytest.approx(0 if prior_mean == "weights" else squares, abs=1e-9)


@pytest.mark.usefixtures("without_noise")
def test_the_loss_is_cross_entropy_and_a_divergence_that_grows():
    net, x, means = SVI.prepare(dense()), vectors(), dense()
    z = means(x).tolist()
    known = np.mean([-math.log(softmax(row)[label]) for row, label in zip(z, LABELS.tolist(), strict=True)])
    total = 0.0
    for layer in (means[1], means[3]):
        prior, deviation = 1 / math.sqrt(layer.in_features), 0.1 / math.sqrt(layer.in_features)
        for mean in layer.weight.flatten().tolist():
            total += math.log(prior / deviation) + (deviation**2 + mean**2) / (2 * prior**2) - 0.5
    for done, share in ((0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (0.9, 1.0)):
        result = SVILoss(kl_weight=0.7, warmup=0.4).loss(step(net, x, LABELS, done=done, images=40))
        assert result.value.item() == pytest.approx(known + share * 0.7 * total / 40, rel=1e-9)
        assert result.logits.softmax(dim=1).tolist() == [pytest.approx(softmax(row)) for row in z]
    for count, divisor in ((10, 42), (42, 42), (100, 100)):  # by default at least the number of weights
        result = SVILoss().loss(step(net, x, LABELS, images=count))
        assert result.value.item() == pytest.approx(known + total / divisor)
    without = SVILoss(1.0, 0.0).loss(step(net, x, LABELS, done=0.0))  # no warm-up
    assert without.value.item() == pytest.approx(known + total / 10)


def test_several_draws_per_step_take_the_mean_of_their_losses():
    net, x = SVI.prepare(dense()).train(), vectors()
    draws = drawn_logits(net, x, 3, torch.Generator().manual_seed(4))
    expected = sum(nn.functional.cross_entropy(z, LABELS, label_smoothing=0.1).item() for z in draws) / 3
    given = step(net, x, LABELS, label_smoothing=0.1, generator=torch.Generator().manual_seed(4))
    result = SVILoss(kl_weight=0.0, samples=3).loss(given)
    assert result.value.item() == pytest.approx(expected)
    assert result.logits.exp().allclose(sum(z.softmax(dim=1) for z in draws) / 3)
    assert not draws[0].allclose(draws[1])


def test_the_loss_draws_from_the_step_s_generator_and_never_from_torch_s():
    net, state = SVI.prepare(dense()), torch.get_rng_state()
    values = []
    for seed, glob in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(glob)
        value = SVILoss().loss(step(net, vectors(), LABELS, generator=torch.Generator().manual_seed(seed))).value
        values.append(value.item())
    assert values[0] == values[1] != values[2]
    torch.set_rng_state(state)
    SVILoss().loss(step(net, vectors(), LABELS))
    assert torch.get_rng_state().equal(state)
    assert not svi._NOISE.get()


@pytest.mark.parametrize("loss", [SVI.loss(), SVIAvUC.loss()])
@pytest.mark.parametrize("kind", KINDS)
def test_networks_learn(kind, loss):
    data, recipe = bright_classes(), Recipe(epochs=20, batch=16, lr=0.1, crop=0, flip=False)
    net = train(SVI.prepare(network(kind)), data, recipe, seed=1, loss=loss)
    detector = SVI(net, samples=5).fit(data).calibrate(bright_classes(seed=1))
    assert (detector(bright_classes(seed=2).images).label == data.labels).double().mean() > 0.9
    assert any(not gaussian.rho.eq(0).all() for gaussian, _ in gaussians(net))
    assert net.record["loss"]["warmup"] == 0.3


def test_arguments_and_layers_that_do_not_fit_are_named():
    for options in ({"samples": 0}, {"score": "kl_uniform"}, {"samples": 1, "score": "mutual_information"}):
        with pytest.raises(InputError, match=r"samples|score"):
            SVI(SVI.prepare(network()), **options)
    with pytest.raises(ArchitectureError):
        kedge.anchor(SVI.prepare(network()))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    normed = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    for net, message in (
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "no Conv1d"),
        (normed, "'1' computes its weight"),
        (nn.Sequential(nn.LazyLinear(2)), "'0' is lazy"),
        (tied, "'0' and '1' share"),
    ):
        with pytest.raises(ArchitectureError, match=message):
            SVI.prepare(net)


def drawn_weights(detector):
    """The weights of the linear layers under each draw."""
    drawn = []
    for number in range(detector.samples):
        with detector.drawn(number):
            layers = [m for m in detector.net.modules() if isinstance(m, nn.Linear)]
            drawn.append([layer.weight.detach().numpy().copy() for layer in layers])
    return drawn


@pytest.mark.parametrize("score", ["msp", "entropy", "mutual_information"])
def test_scores_are_those_of_the_definition(score):
    x = vectors()
    detector = SVI(SVI.prepare(dense(), initial=0.5), samples=6, score=score, seed=5).fit(x)
    biases = [layer.bias.detach().numpy() for layer in (dense()[1], dense()[3])]
    expected, logits = [], []
    for row in x.numpy():
        each = [softmax(w2 @ np.maximum(w1 @ row + biases[0], 0) + biases[1]) for w1, w2 in drawn_weights(detector)]
        mean = [sum(p) / 6 for p in zip(*each, strict=True)]
        information = entropy(mean) - sum(map(entropy, each)) / 6
        expected.append({"msp": -max(mean), "entropy": entropy(mean), "mutual_information": information}[score])
        logits.append([math.log(p) for p in mean])
    with torch.no_grad():
        outputs = detector.outputs(x)
    assert outputs.score.tolist() == pytest.approx(expected, rel=1e-9)
    assert outputs.logits.numpy() == pytest.approx(np.array(logits), rel=1e-9)


def test_the_draws_are_gaussian_with_the_learned_mean_and_deviation():
    """A linear layer applied to the unit vectors shows its weights."""
    net = SVI.prepare(nn.Linear(4, 5, bias=False).double(), initial=0.5)
    ((gaussian, mean),) = gaussians(net)
    with torch.no_grad():
        gaussian.rho.uniform_(-0.1, 0.1)
        drawn = SVI(net, samples=2000).sampled_logits(torch.eye(4, dtype=torch.float64)).mT  # (2000, 5, 4)
        expected = 0.25 * (10 * gaussian.rho).exp()
        assert ((drawn.mean(dim=0) - mean).abs() < 4 * expected / math.sqrt(2000)).all()
        standard = ((drawn - mean) / expected).flatten(1)  # (2000, 20)
    assert (standard.T.cov() - torch.eye(20)).abs().max() < 4.5 * math.sqrt(2 / 2000)
    share = float((standard.abs() < 1).double().mean())
    assert share == pytest.approx(0.6827, abs=4 * math.sqrt(0.6827 * 0.3173 / 40000))


def test_layers_and_seeds_have_draws_of_their_own():
    with seeded(0):
        net = SVI.prepare(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    means = [layer.weight.detach().numpy() for layer in net.eval()]
    every = []
    for seed in (0, 1):
        (weights,) = drawn_weights(SVI(net, samples=1, seed=seed))
        every += [weight - mean for weight, mean in zip(weights, means, strict=True)]
    assert all(not np.allclose(a, b) for i, a in enumerate(every) for b in every[:i])
    first = SVI(net, samples=2).sampled_logits(torch.eye(3))
    assert SVI(net, samples=5).sampled_logits(torch.eye(3))[:2].equal(first)  # more samples change none


@pytest.mark.parametrize("kind", KINDS)
def test_svi_without_variance_is_the_network_itself(kind):
    means, x = network(kind), images(12, channels=1)
    net, train_set = SVI.prepare(means), images(30, channels=1, seed=1)
    with torch.no_grad():
        for gaussian, _ in gaussians(net):
            gaussian.rho.fill_(-math.inf)
    expected = kedge.MSP(means).fit(train_set)
    detector = SVI(net, samples=3).fit(train_set)
    with torch.no_grad():
        for logits in detector.sampled_logits(detector.as_input(x)):
            assert logits.equal(means.eval()(detector.as_input(x)))
    assert detector.score(x).allclose(expected.score(x), atol=1e-6)
    assert SVI(net, score="mutual_information").fit(train_set).score(x).abs().max() < 1e-6


def test_an_anchored_network_gives_the_mean_over_its_anchors_under_each_draw():
    net = SVI.prepare(network("anchored", torch.float64), initial=0.5)
    net.set_anchors(images(4, channels=1, seed=7))
    detector, x = SVI(net, samples=3), images(5, channels=1)
    assert detector.cost.forward == 12
    logits = detector.sampled_logits(x)
    one, expected = copy.deepcopy(net), torch.zeros_like(logits)
    for anchor in net.anchors:  # one at a time, each from a network that has no other
        one.set_anchors(anchor[None])
        expected += SVI(one, samples=3).sampled_logits(x) / 4
    assert logits.allclose(expected, rtol=1e-9)


def test_draws_are_the_same_in_every_precision_and_memory_layout():
    x = images(12, channels=1)
    expected = SVI(SVI.prepare(network()), samples=2).sampled_logits(x)
    double = SVI(SVI.prepare(network(dtype=torch.float64)), samples=2).sampled_logits(x)
    assert expected.double().allclose(double, atol=1e-4)
    last = SVI(SVI.prepare(network()).to(memory_format=torch.channels_last), samples=2).sampled_logits(x)
    assert expected.allclose(last, atol=1e-4)


def test_a_failure_in_mid_pass_leaves_the_means():
    net, x = SVI.prepare(network()), images(12, channels=1)
    assert kedge.Energy(net).fit(x).score(x).equal(kedge.Energy(network()).fit(x).score(x))
    detector = SVI(net, samples=2).fit(x)
    net.network.fc.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(InputError, match="Compact cannot take inputs"):
        detector.score(x)
    assert not svi._NOISE.get()


def naive_avuc(logits, labels, threshold):
    counts = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
    for row, label in zip(logits, labels, strict=True):
        q = softmax(row)
        p, u = max(q), entropy(q)
        kind = ("A" if q.index(p) == label else "I") + ("C" if u <= threshold else "U")
        counts[kind] += (p if kind[0] == "A" else 1 - p) * (1 - math.tanh(u) if kind[1] == "C" else math.tanh(u))
    return math.log(1 + (counts["AU"] + counts["IC"]) / (counts["AC"] + counts["IU"])), counts


def entropies(logits):
    return [entropy(softmax(row)) for row in logits.tolist()]


def test_the_avuc_loss_is_its_definition_and_the_case_by_hand():
    logits = torch.randn(40, 3, dtype=torch.float64) * 2
    labels = torch.where(torch.arange(40) % 2 == 0, logits.argmax(dim=1), torch.arange(40) % 3)
    for threshold in (0.3, 0.6, 0.9):
        expected, counts = naive_avuc(logits.tolist(), labels.tolist(), threshold)
        assert min(counts.values()) > 0
        assert float(avuc(logits, labels, threshold)) == pytest.approx(expected, rel=1e-12)
    even = torch.zeros(1, 2, dtype=torch.float64)
    assert float(avuc(even, torch.tensor([0]), float(kedge.scores.entropy(even)))) == 0  # at the threshold: certain
    # Probabilities 0.9 and 0.6 have entropies 0.3251 and 0.6730, with tanh 0.3141 and 0.5870.
    logits = torch.tensor([[9, 1], [1.5, 1], [9, 1], [1.5, 1]], dtype=torch.float64).log()
    labels = torch.tensor([0, 0, 1, 1])  # accurate and certain, accurate and uncertain, and both inaccurate
    good, bad = 0.9 * (1 - 0.3141) + 0.4 * 0.5870, 0.6 * 0.5870 + 0.1 * (1 - 0.3141)
    assert float(avuc(logits, labels, 0.5)) == pytest.approx(math.log(1 + bad / good), abs=1e-4)
    assert float(avuc(logits[:1], labels[:1], 0.5)) == float(avuc(logits[3:], labels[3:], 0.5)) == 0


def test_the_gradient_of_the_avuc_loss():
    logits = (torch.randn(12, 3, dtype=torch.float64) * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: avuc(z, torch.arange(12) % 3, 0.6), logits)
    only_bad = torch.tensor([[4.0, 0.0], [5.0, 0.0]], requires_grad=True)  # certain, and wrong
    value = avuc(only_bad, torch.tensor([1, 1]), 0.5)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(only_bad.grad).all()


@pytest.mark.usefixtures("without_noise")
def test_the_threshold_is_measured_over_the_warm_up_and_then_used():
    net, x = SVI.prepare(dense()), vectors(8)
    z = dense()(x).detach()
    right = z.argmax(dim=1)
    y = torch.where(torch.arange(8) % 3 == 0, (right + 1) % 4, right)  # images 0, 3 and 6 are wrong
    u = entropies(z)
    loss, bound = AvUCLoss(kl_weight=0.2, warmup=0.5, beta=2.0), SVILoss(kl_weight=0.2, warmup=0.5)
    for done, rows in ((0.0, slice(0, 4)), (0.4, slice(4, 8))):
        given = step(net, x[rows], y[rows], done=done)
        assert loss.loss(given).value.item() == pytest.approx(bound.loss(given).value.item())
    threshold = (sum(u[i] for i in (0, 3, 6)) / 3 + sum(u[i] for i in (1, 2, 4, 5, 7)) / 5) / 2
    assert loss.threshold == pytest.approx(threshold)
    for done in (0.5, 1.0):
        given = step(net, x, y, done=done)
        expected = bound.loss(given).value.item() + 2.0 * naive_avuc(z.tolist(), y.tolist(), threshold)[0]
        assert loss.loss(given).value.item() == pytest.approx(expected)
    assert loss.threshold == pytest.approx(threshold)  # measured in the warm-up alone
    assert loss.counts.tolist() == [3, 5]
    for shift in (0, 1):  # all predictions right, or all wrong
        loss = AvUCLoss()
        loss.loss(step(net, x, (right + shift) % 4, done=0.1))
        assert loss.threshold == pytest.approx(sum(u) / 8)


def test_several_draws_measure_the_entropy_of_their_mean_softmax():
    net, x = SVI.prepare(dense(), initial=1.0).train(), vectors()

    def fresh():
        return torch.Generator().manual_seed(4)

    mean = sum(z.softmax(dim=1) for z in drawn_logits(net, x, 2, fresh())).detach() / 2
    y = mean.argmax(dim=1)
    loss = AvUCLoss(samples=2)
    loss.loss(step(net, x, y, done=0.0, generator=fresh()))
    assert loss.threshold == pytest.approx(sum(entropies(mean.log())) / 5)
    bound = SVILoss(samples=2).loss(step(net, x, y, generator=fresh())).value
    value = loss.loss(step(net, x, y, generator=fresh())).value
    expected = 3 * naive_avuc(mean.log().tolist(), y.tolist(), loss.threshold)[0]
    assert (value - bound).item() == pytest.approx(expected)


@pytest.mark.usefixtures("without_noise")
def test_processes_share_one_threshold(monkeypatch):
    """This process measured one accurate image, another one three inaccurate ones."""
    elsewhere = torch.tensor([[1.8, 0.0], [3.0, 0.0]])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.add_(elsewhere))
    z, loss = dense()(vectors(1)).detach(), AvUCLoss()
    loss.loss(step(SVI.prepare(dense()), vectors(1), z.argmax(dim=1), done=0.0))
    assert loss.threshold == pytest.approx((0.6 + entropies(z)[0]) / 2)


def test_another_training_measures_anew_and_without_its_weight_the_term_changes_nothing():
    loss = SVIAvUC.loss()
    losses, states, trained = [SVI.loss(), SVIAvUC.loss(beta=0.0), loss, loss], [], []
    for each in losses:
        trained.append(train(SVIAvUC.prepare(network()), NOISE, RECIPE, loss=each))
        if each is loss:
            states.append((loss.threshold, loss.counts.tolist()))
    assert states[0] == states[1]
    assert 0 < loss.threshold < math.log(3)
    assert 0 < int(loss.counts.sum()) <= 0.3 * 3 * 64 + 16
    assert same_weights(trained[0], trained[1])
    assert same_weights(trained[2], trained[3])
    assert not same_weights(trained[0], trained[2])


def test_masked_pairs_are_trained_towards_their_targets_but_not_certain_and_uncertain_at_once():
    def masked(target):
        return SVI.prepare(kedge.anchor(network().network, mask=0.5, mask_target=target))

    assert train(masked("uniform"), bright_classes(), RECIPE, loss=SVI.loss()).record["epochs"] == 3
    with pytest.raises(InputError, match="mask_target must be 'label'"):
        train(masked("uniform"), bright_classes(), RECIPE, loss=SVIAvUC.loss())
    assert train(masked("label"), bright_classes(), RECIPE, loss=SVIAvUC.loss()).record["loss"]["beta"] == 3.0
