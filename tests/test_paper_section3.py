"""Section 3 of the paper, sentence by sentence, against oracles that share no code with kedge.

The oracles are the paper's equations as loops over Python floats, its two listings over `F.conv2d` of the literal
concatenation [c, x - c], and one example worked by hand. kedge's sign is the opposite of the paper's: a larger score is
further out of distribution, so `kl_uniform` is -S.
"""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kedge
from helpers import wide_weight
from kedge import scores
from kedge.errors import InputError

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
LN3 = math.log(3.0)
# --- the equations, naively: lists of Python floats (float64), no vectorisation, no rearrangement for stability ------


def softmax(row):
    exponentials = [math.exp(v) for v in row]
    return [e / sum(exponentials) for e in exponentials]


def nll_score(row):
    """The paper's S: minus the mean over classes of the log of the softmax."""
    return -sum(math.log(p) for p in softmax(row)) / len(row)


def entropy(probabilities):
    return -sum(p * math.log(p) for p in probabilities)


ORACLE = {
    "kl_uniform": lambda row: -nll_score(row),
    "msp": lambda row: -max(softmax(row)),
    "max_logit": lambda row: -max(row),
    "entropy": lambda row: entropy(softmax(row)),
    "energy": lambda row: -math.log(sum(math.exp(v) for v in row)),
    "own": lambda row: row[2],
}


def marginal(P):
    """Average the logits P[k][b][c] over the anchors k."""
    K, B, C = len(P), len(P[0]), len(P[0][0])
    return [[sum(P[k][b][c] for k in range(K)) / K for c in range(C)] for b in range(B)]


def tau(P, reduce="sum"):
    """Sum (or average) over classes the unbiased deviation over anchors of the sigmoid of P[k][b][c]."""
    K, B, C = len(P), len(P[0]), len(P[0][0])
    taus = []
    for b in range(B):
        deviations = []
        for c in range(C):
            s = [1.0 / (1.0 + math.exp(-P[k][b][c])) for k in range(K)]
            m = sum(s) / K
            deviations.append(math.sqrt(sum((v - m) ** 2 for v in s) / (K - 1)))
        taus.append(sum(deviations) / (C if reduce == "mean" else 1))
    return taus


def divide(row, t, rule):
    divisor = 1.0 + math.exp(t) if rule == "exp" else max(t, 1e-6)
    return [v / divisor for v in row]


def detector_score(P, rule="exp", reduce="sum", score="kl_uniform"):
    """Go from logits P[k][b][c] to kedge's score: mean, deviation, rescaling, scoring function."""
    return [ORACLE[score](divide(h, t, rule)) for h, t in zip(marginal(P), tau(P, reduce), strict=True)]


# --- the two listings, over a network small enough to write down with torch.nn.functional ----------------------------


class Tiny(nn.Module):
    """Two convolutions with batch normalisation between them; images are not square, and the stride is not 1."""

    def __init__(self, classes, padding_mode="zeros"):
        super().__init__()
        self.padding_mode = padding_mode
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode=padding_mode)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 5, 3, padding=1)
        self.head = nn.Linear(5, classes)

    def forward(self, x):
        h = self.norm(self.first(x)).relu()
        return self.head(self.second(h).relu().mean(dim=(2, 3)))


def f_a(net, pair, weight=None):
    """Run the layers of an anchored `Tiny` on a literal (B, 2D, H, W) concatenation, in the dtype of `pair`."""
    to, layers = pair.dtype, net.network
    mode = "constant" if layers.padding_mode == "zeros" else layers.padding_mode
    weight = wide_weight(net).to(to) if weight is None else weight
    h = F.conv2d(F.pad(pair, (1, 1, 1, 1), mode=mode), weight, net.anchored_layer.layer_x.bias.to(to), stride=2)
    norm = layers.norm
    if net.training:
        h = F.batch_norm(h, None, None, norm.weight.to(to), norm.bias.to(to), training=True, eps=norm.eps)
    else:
        statistics = norm.running_mean.to(to), norm.running_var.to(to)
        h = F.batch_norm(h, *statistics, norm.weight.to(to), norm.bias.to(to), training=False, eps=norm.eps)
    h = F.conv2d(h.relu(), layers.second.weight.to(to), layers.second.bias.to(to), padding=1)
    return F.linear(h.relu().mean(dim=(2, 3)), layers.head.weight.to(to), layers.head.bias.to(to))


def normalise(images):
    mean, std = images.new_tensor(MEAN), images.new_tensor(STD)
    return (images - mean[:, None, None]) / std[:, None, None]


@torch.no_grad()
def infer(net, images, anchors):
    """Transcribe the listing for inference up to the predictions, one anchor at a time: a list P[k][b][c]."""
    predictions = []
    inputs = normalise(images.double())
    for anchor in normalise(anchors.double()):
        A = anchor.expand_as(inputs)
        D = inputs - A
        predictions.append(f_a(net, torch.cat([A, D], dim=1)).tolist())
    return predictions


def train_forward(net, images, T=None, weight=None):
    """Transcribe the listing for training, with the permutation, the corruption and the masks of `net.draw`."""
    draw, inputs = net.draw, normalise(images)
    c = images[draw.permutation]
    A = normalise(T(c)) if draw.corrupted else normalise(c)
    if draw.per_sample is not None:  # T acts on some pairs of every batch
        A = torch.where(draw.per_sample[:, None, None, None], A, normalise(c))
    A = torch.where(draw.masked[:, None, None, None], torch.zeros_like(A), A)
    D = inputs - normalise(c)
    return f_a(net, torch.cat([A, D], dim=1), weight)


# --- small helpers ---------------------------------------------------------------------------------------------------


def generator(seed):
    return torch.Generator().manual_seed(seed)


def images(n, seed, dtype=torch.float64):
    return torch.rand(n, 3, 6, 8, generator=generator(seed), dtype=torch.float64).to(dtype)


def logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@torch.no_grad()
def randomise(parameters, seed):
    for p in parameters:
        p.copy_(0.6 * torch.randn(p.shape, generator=generator(seed), dtype=torch.float64))
        seed += 1


def tiny(classes=4, dtype=torch.float64, padding_mode="zeros"):
    module = Tiny(classes, padding_mode).to(dtype)
    randomise(module.parameters(), seed=100)
    with torch.no_grad():
        module.norm.running_mean.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
        module.norm.running_var.copy_(torch.tensor([0.5, 1.5, 2.0, 0.8]))
    return module.eval()


def anchored(module=None, init="fresh", **options):
    """Anchor a `Tiny`; unless its weights are preserved, every weight is random, so that W_c and W_x differ."""
    module = tiny() if module is None else module
    options = {"mean": MEAN, "std": STD, "corruption": None, "seed": 0} | options
    example = images(2, seed=1, dtype=module.head.weight.dtype)
    net = kedge.anchor(module, init=init, example=example, **options)
    if init == "fresh":
        randomise(net.parameters(), seed=200)
    return net


def evaluated(anchors, **options):
    net = anchored(**options).eval()
    net.set_anchors(anchors)
    return net


def negative(c):
    """Stand in for T: deterministic, per image, within [0, 1], and far from the identity in colour and in place."""
    return 1 - c.flip(-1)


def assert_close(actual, expected, rel=1e-9):
    """Compare to `rel` of the largest expected value."""
    actual, expected = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (actual, expected))
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= rel * expected.abs().max()


def differ(a, b):
    return (a - b).abs().max() > 1e-3 * b.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# The example worked by hand: two anchors, two classes, one image.
#
#     anchor 1: (ln 3,  0   )      sigmoids (3/4, 1/2)
#     anchor 2: (0,    -ln 3)      sigmoids (1/2, 1/4)
#
#     H = (ln 3 / 2, -ln 3 / 2)        the two values a, b of a class have the unbiased deviation |a - b| / sqrt(2):
#     deviations (1/4, 1/4) / sqrt 2   tau = 2 * (1/4) / sqrt 2 = sqrt(2) / 4;  averaged over classes: sqrt(2) / 8
#     softmax(H) = (3/4, 1/4), as exp(ln 3 / 2) : exp(-ln 3 / 2) = 3 : 1
#     logsumexp(H) = ln(sqrt 3 + 1 / sqrt 3) = ln(4 / sqrt 3), and mean(H) = 0, hence S = ln(4 / sqrt 3)
#     H / tau = (sqrt 2 ln 3, -sqrt 2 ln 3), so its S is ln(3^sqrt 2 + 3^-sqrt 2)
#     both softmaxes are (3/4, 1/4): the anchors disagree (tau > 0) and yet share no information with the label
# ---------------------------------------------------------------------------------------------------------------------

HAND = torch.tensor([[[LN3, 0.0]], [[0.0, -LN3]]], dtype=torch.float64)  # (K, B, C) = (2, 1, 2)
HAND_H = torch.tensor([[LN3 / 2, -LN3 / 2]], dtype=torch.float64)
HAND_TAU = math.sqrt(2) / 4


def hand_network():
    """Build a network of one pixel whose per-anchor logits are `HAND`.

    For x = 1/2 and the anchors 0 and 1, the pairs [c, x - c] are [0, 1/2] and [1, -1/2]. With the weights
    (W_c, W_x) = (ln 3, 2 ln 3) for the first class, (-ln 3, 0) for the second, and no bias, anchor 0 gives
    (2 ln 3 / 2, 0) = (ln 3, 0) and anchor 1: (ln 3 - 2 ln 3 / 2, -ln 3) = (0, -ln 3).
    """
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten()).double()
    x = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", example=x, mean=[0.0], std=[1.0], corruption=None)
    with torch.no_grad():
        weight = torch.tensor([[LN3, 2 * LN3], [-LN3, 0.0]], dtype=torch.float64)
        net.anchored_layer.layer_c.weight.copy_(weight[:, :1, None, None])
        net.anchored_layer.layer_x.weight.copy_(weight[:, 1:, None, None])
        net.anchored_layer.layer_x.bias.zero_()
    net.eval().set_anchors(torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(2, 1, 1, 1))
    return net, x


def test_by_hand():
    t = torch.tensor([HAND_TAU], dtype=torch.float64)
    assert_close(scores.tau(HAND), [HAND_TAU], rel=1e-12)
    assert_close(scores.tau(HAND, reduce="mean"), [HAND_TAU / 2], rel=1e-12)
    plain = scores.rescale(HAND_H, t, rule="plain")
    assert_close(plain, [[math.sqrt(2) * LN3, -math.sqrt(2) * LN3]], rel=1e-12)
    assert_close(scores.kl_uniform(plain), [-math.log(3 ** math.sqrt(2) + 3 ** -math.sqrt(2))], rel=1e-12)
    assert_close(scores.rescale(HAND_H, t), [[0.2266003195, -0.2266003195]])  # 0.5493061443 / 2.4241190195
    for name, expected in {
        "kl_uniform": -math.log(4 / math.sqrt(3)),
        "msp": -3 / 4,
        "max_logit": -LN3 / 2,
        "entropy": math.log(4) - 3 / 4 * LN3,
        "energy": -math.log(4 / math.sqrt(3)),
    }.items():
        assert_close(getattr(scores, name)(HAND_H), [expected], rel=1e-12)
    assert scores.mutual_information(HAND).abs().item() < 1e-12
    # softmaxes (3/4, 1/4), (1/4, 3/4): their mean has entropy ln 2, each of them ln 4 - 3/4 ln 3
    opposite = torch.tensor([[[LN3, 0.0]], [[0.0, LN3]]], dtype=torch.float64)
    assert_close(scores.mutual_information(opposite), [3 / 4 * LN3 - math.log(2)], rel=1e-12)


@pytest.mark.parametrize(("rule", "divisor"), [("exp", 1 + math.exp(HAND_TAU)), ("plain", HAND_TAU)])
def test_by_hand_the_network_of_one_pixel(rule, divisor):
    net, x = hand_network()
    assert_close(net.per_anchor_logits(x), HAND, rel=1e-12)
    assert_close(net(x), HAND_H, rel=1e-12)
    a = LN3 / 2 / divisor
    detector = kedge.AMP(net, rescale=rule).fit(torch.rand(8, 1, 1, 1, generator=generator(0)).double())
    assert_close(detector.score(x), [-math.log(math.exp(a) + math.exp(-a))])


# --- tau: the deviation over anchors, after a sigmoid, summed over classes -------------------------------------------


@pytest.mark.parametrize("K", [2, 3, 5, 20])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_tau_is_the_unbiased_deviation_over_anchors_of_the_sigmoid(K, reduce):
    P = logits(K, 6, 7, seed=K)
    expected = tau(P.tolist(), reduce)
    assert_close(scores.tau(P, reduce=reduce), expected, rel=1e-12)
    assert_close(scores.tau(P.flip(0), reduce=reduce), expected, rel=1e-12)
    assert_close(scores.tau(P[:, 2:3], reduce=reduce), expected[2:3], rel=1e-12)
    with pytest.raises(InputError):
        scores.tau(P[:1], reduce=reduce)


def test_tau_sums_over_classes_and_lies_between_zero_and_its_bound():
    P = logits(5, 6, 7)
    assert torch.equal(scores.tau(P), scores.tau(P, reduce="sum"))
    assert scores.tau(logits(6, 7).expand(5, 6, 7)).abs().max() < 1e-12
    with pytest.raises(InputError):
        scores.tau(P, reduce="median")
    for K in (2, 4, 6):  # half of the sigmoids 0, half 1: the largest variance, K / 2 * 2 * (1/2)^2 / (K - 1)
        sign = torch.tensor([1.0, -1.0] * (K // 2), dtype=torch.float64)
        largest = scores.tau(1e4 * sign[:, None, None].expand(K, 1, 1000))
        assert_close(largest, [1000 * math.sqrt(K / (4 * (K - 1)))], rel=1e-12)


# --- rescaling: one divisor for all classes of an image --------------------------------------------------------------


@pytest.mark.parametrize("rule", ["exp", "plain"])
def test_rescaling_divides_all_logits_of_an_image_by_the_same_number(rule):
    H, t = logits(50, 7), torch.linspace(0.01, 4, 50, dtype=torch.float64)
    expected = [divide(h, s, rule) for h, s in zip(H.tolist(), t.tolist(), strict=True)]
    assert_close(scores.rescale(H, t, rule=rule), expected, rel=1e-12)
    assert torch.equal(scores.rescale(H, t), scores.rescale(H, t, rule="exp"))
    for same in (0.0, 1e-7, 0.1, 1.0, 30.0):
        rescaled = scores.rescale(H, torch.full((50,), same, dtype=torch.float64), rule=rule)
        assert torch.equal(rescaled.argmax(dim=1), H.argmax(dim=1))
    rising = scores.rescale(H[:1].expand(50, 7), t + 0.1, rule=rule)
    assert (scores.entropy(rising).diff() > 0).all()
    assert (scores.kl_uniform(rising).diff() > 0).all()
    with pytest.raises(InputError):
        scores.rescale(H, t, rule="square")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_taus_neither_overflow_nor_give_nan(dtype):
    H = logits(1, 7).to(dtype)
    for huge in (89.0, 710.0, 1e4, 1e30):
        rescaled = scores.rescale(H, torch.tensor([huge], dtype=dtype))
        assert rescaled.isfinite().all()
        assert rescaled.abs().max() <= 1e-30
        assert scores.kl_uniform(rescaled).item() == pytest.approx(-math.log(7), rel=1e-6)
    for small in (0.0, 1e-9, 1e-6):
        rescaled = scores.rescale(H, torch.tensor([small], dtype=dtype), rule="plain")
        assert_close(rescaled, H.double() * 1e6, rel=1e-6)
    t = torch.tensor([1e4, 710.0, 1.0], dtype=torch.float64, requires_grad=True)
    scores.kl_uniform(scores.rescale(logits(3, 7), t)).sum().backward()
    assert t.grad.isfinite().all()


# --- scoring functions -----------------------------------------------------------------------------------------------

# name: (of the logits (10^4, 0), what adding 1 to all logits adds). logsumexp = 10^4 and mean = 5000, so S = 5000.
NAMED_SCORES = {
    "kl_uniform": (-5000.0, 0),
    "msp": (-1.0, 0),
    "max_logit": (-10000.0, -1),
    "entropy": (0.0, 0),
    "energy": (-10000.0, -1),
}


@pytest.mark.parametrize("name", NAMED_SCORES)
def test_every_score_agrees_with_its_definition(name):
    score, (extreme, shift) = getattr(scores, name), NAMED_SCORES[name]
    for classes in (2, 10, 1000):
        H = logits(6, classes)
        assert_close(score(H), [ORACLE[name](row) for row in H.tolist()], rel=1e-12)
    assert_close(score(H + 12.5), score(H) + 12.5 * shift, rel=1e-12)
    confident, indifferent = torch.tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64).split(1)
    assert score(indifferent) > score(confident)
    for dtype in (torch.float32, torch.float64):
        assert score(torch.tensor([[1e4, 0.0]], dtype=dtype)).item() == pytest.approx(extreme, rel=1e-6)


@pytest.mark.parametrize("K", [2, 5])
def test_mutual_information_is_the_entropy_of_the_mean_minus_the_mean_entropy(K):
    P, expected = logits(K, 6, 7), []
    for b in range(6):
        p = [softmax(P[k, b].tolist()) for k in range(K)]
        mean = [sum(p[k][c] for k in range(K)) / K for c in range(7)]
        expected.append(entropy(mean) - sum(entropy(q) for q in p) / K)
    assert_close(scores.mutual_information(P), expected, rel=1e-12)
    for scale in (0.0, 1e-4, 1.0, 100.0):
        assert (scores.mutual_information(logits(5, 50, 7, scale=scale)) >= -1e-12).all()
    sure_and_opposed = torch.tensor([[[1e3, 0.0]], [[0.0, 1e3]]], dtype=torch.float64)
    assert_close(scores.mutual_information(sure_and_opposed), [math.log(2)], rel=1e-12)


# --- the encoding [c, x - c] and the per-anchor logits ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"corruption": torch.zeros_like, "every": 1}, {"mask": 1.0}]
    + [{"module": tiny(padding_mode=mode)} for mode in ("reflect", "replicate", "circular")],
)
def test_per_anchor_logits_are_the_network_on_the_concatenation(options):
    x, anchors = images(6, seed=2), images(5, seed=3)
    net = evaluated(anchors, **options)
    P = infer(net, x, anchors)
    assert min(tau(P)) > 0.02  # the comparison below must not be between five equal rows
    assert_close(net.per_anchor_logits(x), P)
    assert_close(net(x), marginal(P))
    assert_close(net(x[4:5]), marginal(P)[4:5])


# --- preserved weights: all anchors give the same logits -------------------------------------------------------------


def test_preserve_gives_the_logits_of_the_original_under_every_anchor():
    x, module = images(6, seed=2), tiny()
    net = evaluated(images(5, seed=3), module=module, init="preserve")
    expected = module(normalise(x))
    assert_close(net.per_anchor_logits(x), expected.expand(5, -1, -1))
    assert scores.tau(net.per_anchor_logits(x)).max() < 1e-9
    detector = kedge.AMP(net).fit(images(160, seed=4))
    assert_close(detector.score(x), [-nll_score([v / 2 for v in row]) for row in expected.tolist()])
    assert_close(anchored(module, init="preserve").train()(x), copy.deepcopy(module).train()(normalise(x)))
    # W T(c) + W (x - c) = W (x + T(c) - c)
    net = anchored(module, init="preserve", corruption=negative, every=1).train()
    y = net(x)
    c = x[net.draw.permutation]
    assert_close(y, module.train()(normalise(x + negative(c) - c)))


@pytest.mark.parametrize("init", ["preserve", "fresh"])
def test_anchoring_and_training_leave_the_original_network_untouched(init):
    module, x = tiny(), images(6, seed=2)
    before = copy.deepcopy(module.state_dict())
    net = anchored(module, init=init).train()
    F.cross_entropy(net(x), torch.arange(6) % 4).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= p.grad
    assert isinstance(module.first, nn.Conv2d)
    assert not module.training
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


# --- training: one random anchor per image, out of its batch ---------------------------------------------------------


def test_the_anchors_of_a_batch_are_a_permutation_of_it_drawn_from_the_seed():
    runs = []
    for seed, global_seed in ((0, 1), (0, 2), (7, 1)):
        net, run = anchored(seed=seed).train(), []
        with torch.random.fork_rng():
            torch.manual_seed(global_seed)
            for _ in range(60):
                net(images(4, seed=2))
                run.append(tuple(net.draw.permutation.tolist()))
        assert all(sorted(permutation) == list(range(4)) for permutation in run)
        met = {pair for permutation in run for pair in enumerate(permutation)}
        assert met >= set(itertools.permutations(range(4), 2))  # every image meets every other one
        runs.append(run)
    assert runs[0] == runs[1] != runs[2]


ENCODINGS = {
    "clean": {},
    "a corruption that changes nothing": {"corruption": torch.clone, "every": 1},
    "corrupted": {"corruption": negative, "every": 1},
    "every second batch corrupted": {"corruption": negative, "every": 2},
    "all masked": {"mask": 1.0},
    "half masked": {"mask": 0.5},
    "masked and corrupted": {"mask": 0.5, "corruption": negative, "every": 1},
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_batch_is_encoded_as_the_listing_has_it(name):
    options, y = ENCODINGS[name], torch.arange(12) % 4
    net, T = anchored(**options).train(), options.get("corruption")
    for number in range(1, 4):
        x = images(12, seed=number)
        out = net(x)
        assert net.draw.corrupted == (T is not None and number % options["every"] == 0)
        assert net.draw.masked.dtype == torch.bool
        share = options.get("mask", 0)
        assert 0 < net.draw.masked.sum() < 12 if share == 0.5 else (net.draw.masked == bool(share)).all()
        assert_close(out, train_forward(net, x, T))
        assert not (net.draw.corrupted and T is negative) or differ(train_forward(net, x, torch.clone), out)
        assert_close(net.targets(y), F.one_hot(y, 4), rel=1e-12)
        assert_close(F.cross_entropy(out, net.targets(y).to(out)), F.cross_entropy(out, y))


def test_the_gradients_are_those_of_the_concatenation():
    x, y = images(6, seed=2), torch.arange(6) % 4
    net = anchored(corruption=negative, every=1).train()
    F.cross_entropy(net(x), y).backward()
    weight, pair = wide_weight(net).detach().requires_grad_(), net.anchored_layer
    F.cross_entropy(train_forward(net, x, negative, weight), y).backward()
    assert_close(torch.cat([pair.layer_c.weight.grad, pair.layer_x.weight.grad], dim=1), weight.grad)


# --- consistency: on every fifth batch the anchor's half is T(c), the residual is to the clean c ---------------------


@pytest.mark.parametrize(
    ("options", "corrupted"),
    [
        ({"corruption": None, "every": 1}, set()),
        ({}, {5, 10}),
        ({"every": 5}, {5, 10}),
        ({"every": 3}, {3, 6, 9}),
        ({"every": 1}, set(range(1, 12))),
    ],
)
def test_the_corruption_comes_on_every_fifth_training_batch_or_as_set(options, corrupted):
    net, seen = anchored(**({"corruption": negative} | options)), set()
    net.set_anchors(images(5, seed=3))
    for number in range(1, 12):
        net.train()(images(3, seed=2))
        net.eval()(images(3, seed=2))  # does not count
        if net.draw.corrupted:
            seen.add(number)
    assert seen == corrupted


def test_per_sample_the_corruption_acts_on_that_share_of_the_pairs_of_every_batch():
    net, shares = anchored(corruption=negative, every=4, per_sample=True).train(), []
    for number in range(40):
        x = images(12, seed=number)
        y = net(x)
        assert net.draw.corrupted == bool(net.draw.per_sample.any())
        assert_close(y, train_forward(net, x, negative))
        shares.append(float(net.draw.per_sample.double().mean()))
    assert 0.2 < sum(shares) / len(shares) < 0.3  # 480 pairs at one in four: three deviations are 0.06
    assert len(set(shares)) > 3


def test_per_sample_a_random_corruption_is_repeated_by_the_seed():
    runs = []
    for _ in range(2):
        net = anchored(corruption=lambda c: c + 0.1 * torch.rand_like(c), every=2, per_sample=True, seed=5).train()
        runs.append(torch.stack([net(images(6, seed=n)) for n in range(3)]))
    assert torch.equal(*runs)


def test_the_corruption_receives_pixels_before_normalisation_and_cannot_change_the_images():
    seen, x = [], images(6, seed=2)
    before = x.clone()

    def in_place(c):
        seen.append(c.detach().clone())
        return c.zero_()

    net = anchored(corruption=in_place, every=1).train()
    y = net(x)
    assert torch.equal(x, before)
    assert_close(y, train_forward(net, x, torch.zeros_like))
    (received,) = seen
    assert sorted(received.flatten(1).tolist()) == sorted(x.flatten(1).tolist())


# --- reference masking (later work): the anchor is hidden, the residual stays ----------------------------------------


def test_pairs_are_masked_one_by_one_with_the_given_probability_and_their_target_can_be_uniform():
    net, y = anchored(mask=0.25, mask_target="uniform").train(), torch.arange(1000) % 4
    net(images(1000, seed=2))
    masked, targets = net.draw.masked, net.targets(y)
    assert masked.double().mean().item() == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 1000))
    assert_close(targets[~masked], F.one_hot(y, 4)[~masked], rel=1e-12)
    assert_close(targets[masked], torch.full((int(masked.sum()), 4), 0.25), rel=1e-7)


# --- the detector: the whole listing for inference -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "classes", "expected"),
    [({}, classes, {}) for classes in (4, 10, 200)]
    + [({}, 201, {"rule": "plain"}), ({"rescale": "plain"}, 4, {"rule": "plain"})]
    + [({"score": name}, 4, {"score": name}) for name in NAMED_SCORES]
    + [({"score": lambda rescaled: rescaled[:, 2]}, 4, {"score": "own"})],
)
def test_the_detector_scores_as_the_listing_does(options, classes, expected):
    x, anchors = images(6, seed=2), images(5, seed=3)
    net = evaluated(anchors, module=tiny(classes))
    detector = kedge.AMP(net, **options).fit(images(160, seed=4))
    scored = detector_score(infer(net, x, anchors), **expected)
    assert_close(detector.score(x), scored)
    net.train()  # left in training mode, it is evaluated all the same
    assert_close(detector.score(x), scored)
    assert net.training


def test_all_of_it_holds_in_single_precision_too():
    x, anchors = images(6, seed=2, dtype=torch.float32), images(5, seed=3, dtype=torch.float32)
    net = evaluated(anchors, module=tiny(dtype=torch.float32))
    P = infer(net, x, anchors)
    assert net.per_anchor_logits(x).dtype == torch.float32
    assert_close(net.per_anchor_logits(x), P, rel=1e-4)
    detector = kedge.AMP(net).fit(images(160, seed=4, dtype=torch.float32))
    error = detector.score(x).double() - torch.tensor(detector_score(P), dtype=torch.float64)
    assert error.abs().max() <= 1e-4 * np.abs(P).max()
    net = anchored(tiny(dtype=torch.float32)).train()
    assert_close(net(x), train_forward(net, x.double()), rel=1e-4)


def test_where_no_anchors_were_set_they_are_five_training_images_and_two_are_needed():
    x, train = images(6, seed=2), images(160, seed=4)
    net = anchored()
    detector = kedge.AMP(net).fit(train)
    P = net.eval().per_anchor_logits(x)
    assert len(P) == 5
    possible = torch.tensor(infer(net, x, train), dtype=torch.float64)  # (N, B, C)
    distance = (P[:, None] - possible[None]).abs().amax(dim=(2, 3))  # (K, N)
    assert distance.amin(dim=1).max() < 1e-9 * possible.abs().max()
    assert_close(detector.score(x), detector_score(P.tolist()))
    net.set_anchors(train[:1])
    with pytest.raises(InputError):
        kedge.AMP(net).fit(train).score(x)


def test_the_authors_variant_averages_over_classes_with_anchors_drawn_per_image():
    # five anchors drawn per image, with or without replacement, out of a training set that holds only five images:
    # an image's score is one of those of the 126 multisets
    x, pool = images(6, seed=2), images(5, seed=3)
    net = evaluated(pool)
    paper = kedge.AMP(net).fit(pool).score(x)
    detector = kedge.AMP(net, variant="authors").fit(pool.repeat(32, 1, 1, 1))
    P = infer(net, x, pool)
    drawn = itertools.combinations_with_replacement(range(5), 5)
    possible = [detector_score([P[k] for k in draw], reduce="mean") for draw in drawn]  # (126, B)
    distance = np.abs(detector.score(x).detach().numpy() - np.array(possible)).min(axis=0)
    assert distance.max() < 1e-9 * np.abs(P).max()
    assert differ(detector.score(x), paper)
