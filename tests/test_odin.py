"""ODIN: a step towards confidence, and the softmax at a high temperature."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kedge.anchoring.per_image import choose_per_image
from torch import nn

import kedge
from kedge.detectors import Cost
from kedge.detectors.base import GRADIENT_ROWS
from kedge.detectors.odin import EPSILONS, ODIN
from kedge.detectors.registry import DETECTORS
from kedge.errors import InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded


def images(n=40, side=8, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=generator)


def network(kind="plain", *, classes=4, seed=0, dtype=torch.float32) -> kedge.Classifier:
    """A compact network whose weights and batch statistics are drawn large enough for scores to vary."""
    with seeded(seed):
        net = build("compact", width=4, classes=classes, channels=3)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(200)
    net = net.to(dtype).eval()
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", seed=seed, mean=[0.5] * 3, std=[0.25] * 3)
    return kedge.Classifier(net, mean=[0.5] * 3, std=[0.25] * 3)


def linear(weight, bias=None) -> nn.Module:
    """logits = W x + b, of inputs that are vectors."""
    weight = torch.as_tensor(weight)
    layer = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
    layer.weight.data = weight
    layer.bias.data = torch.zeros(len(weight)).to(weight) if bias is None else torch.as_tensor(bias).to(weight)
    return layer


class Kinked(nn.Module):
    """Logits (x - 10 relu(x - at), 0), times 100: rises up to ``at`` and falls steeply beyond."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(at, dtype=torch.float64))

    def forward(self, x):
        rising = x[:, :1] - 10 * (x[:, :1] - self.at).relu()
        return 100 * torch.cat([rising, torch.zeros_like(rising)], dim=1)


def rows_seen(net: nn.Module) -> list[torch.Tensor]:
    """Whatever goes into a network from now on."""
    seen: list[torch.Tensor] = []
    net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    return seen


def naive(logits_of, x: torch.Tensor, temperature: float, epsilon: float) -> list[float]:
    """The paper's two lines, one image at a time: descend the cross-entropy of the predicted class, then softmax."""
    found = []
    for image in x:
        image = image[None].clone().requires_grad_()
        scaled = logits_of(image) / temperature
        F.cross_entropy(scaled, scaled.argmax(dim=1)).backward()
        moved = image.detach() - epsilon * image.grad.sign()
        z = logits_of(moved).detach().double().numpy()[0] / temperature
        e = np.exp(z - z.max())
        found.append(-float(e.max() / e.sum()))
    return found


# The formula.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_without_a_step_and_at_temperature_one_it_is_msp(kind):
    net = network(kind)
    odin, msp = ODIN(net, temperature=1, epsilon=0).fit(images()), kedge.MSP(net).fit(images())
    assert odin.score(images(seed=1)).allclose(msp.score(images(seed=1)).double(), atol=1e-6)


def test_two_classes_by_hand():
    """Under the identity the larger pixel grows by epsilon and the smaller one falls; nothing is clamped."""
    detector = ODIN(linear([[1.0, 0.0], [0.0, 1.0]]), epsilon=0.1).fit(torch.rand(3, 2))
    x = torch.tensor([[0.8, 0.3], [0.3, 0.8], [1.0, 0.0]])  # the logits' difference grows by 0.2
    differences = [0.7, 0.7, 1.2]
    expected = [-1 / (1 + math.exp(-difference / 1000)) for difference in differences]
    assert detector.score(x).tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 7.0, 1000.0])
def test_of_a_linear_network_the_gradient_is_known(temperature):
    """d log p_y / dx = (W_y - sum_c p_c W_c) / T, here of normalised inputs."""
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(5, 3)), rng.normal(size=5)
    net = kedge.Classifier(linear(weight, bias), mean=[0.4, 0.5, 0.6], std=[0.1, 0.2, 0.3])
    x = rng.uniform(size=(20, 3))
    mean, std = np.array([0.4, 0.5, 0.6]), np.array([0.1, 0.2, 0.3])
    expected = []
    for row in x:
        z = (weight @ ((row - mean) / std) + bias) / temperature
        p = np.exp(z) / np.exp(z).sum()
        gradient = (weight[z.argmax()] - p @ weight) / std / temperature
        z = (weight @ ((row + 0.03 * np.sign(gradient) - mean) / std) + bias) / temperature
        expected.append(-(np.exp(z) / np.exp(z).sum()).max())
    detector = ODIN(net, temperature=temperature, epsilon=0.03).fit(torch.from_numpy(x))
    assert detector.score(torch.from_numpy(x)).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_deep_network_image_by_image():
    net = network(dtype=torch.float64)
    x = images(12, seed=1).double() / 255
    detector = ODIN(net, temperature=10, epsilon=0.01).fit(images())
    assert detector.score(x).tolist() == pytest.approx(naive(net.eval(), x, 10, 0.01), abs=1e-9)
    still = ODIN(net, temperature=10, epsilon=0).fit(images()).score(x)
    assert (detector.score(x) < still).double().mean() > 0.9  # a step towards confidence


def test_at_a_high_temperature_close_images_keep_their_order():
    """Their probabilities differ by 1e-9, which single precision cannot tell from nothing near one half."""
    x = 0.5 + torch.arange(50) * 1e-5
    detector = ODIN(linear([[1.0], [0.0]]), epsilon=0).fit(x[:, None])
    scores = detector.score(x[:, None])
    assert scores.dtype == torch.float64
    assert (scores.diff() < 0).all()


def test_labels_are_those_of_the_image_as_it_is():
    net = network()
    with torch.no_grad():
        logits = net(images(9))
    found = ODIN(net, epsilon=0.05).fit(images()).calibrate(images())(images(9))
    assert found.logits.allclose(logits, atol=1e-6)


# Anchors.


def single_anchor_networks(net) -> list[kedge.Classifier]:
    nets = []
    for anchor in net.anchors:
        nets.append(copy.deepcopy(net))
        nets[-1].set_anchors(anchor[None])
    return nets


def test_with_anchors_the_logits_are_the_mean_in_both_passes():
    net = network("anchored", dtype=torch.float64)
    detector = ODIN(net, temperature=10, epsilon=0.01).fit(images())
    members = single_anchor_networks(net.eval())
    x = images(6, seed=1).double() / 255
    expected = naive(lambda x: sum(member(x) for member in members) / len(members), x, 10, 0.01)
    assert detector.score(x).tolist() == pytest.approx(expected, abs=1e-9)


def test_the_moved_image_keeps_the_anchors_of_the_image():
    """Where each image draws its own by its pixels, which the step changes."""
    net = network("anchored", dtype=torch.float64)
    net.set_anchors(images(20, seed=2), per_image=2)
    members = single_anchor_networks(net.eval())
    x = images(6, seed=1).double() / 255
    detector = ODIN(net, temperature=10, epsilon=0.01).fit(images())
    for image, score in zip(x, detector.score(x).tolist(), strict=True):
        own = [members[i] for i in choose_per_image(image[None], 20, 2, net.options.seed)[:, 0].tolist()]
        expected = naive(lambda x, own=own: sum(member(x) for member in own) / 2, image[None], 10, 0.01)
        assert score == pytest.approx(expected[0], abs=1e-9)


def test_what_it_costs():
    assert ODIN(network()).cost == Cost(forward=2, backward=1)
    assert ODIN(network("anchored")).fit(images()).cost == Cost(forward=10, backward=5)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_few_images_at_a_time_keep_their_activations(kind):
    detector = ODIN(network(kind), epsilon=0.01).fit(images())
    seen = rows_seen(detector.net.network.fc)
    detector.score(images(300), batch_size=300)
    assert max(len(rows) for rows in seen) <= GRADIENT_ROWS


# The choice of epsilon.


@pytest.mark.parametrize(
    ("top", "expected"), [(0.5, 0.0), (0.5 + 0.003, 0.0024), (0.5 + 0.0104, 0.01), (0.6, max(EPSILONS))]
)
def test_the_step_that_gives_the_training_images_most_confidence(top, expected):
    """All images lie at 0.5 and the probability is largest at ``top``: the last step before it wins."""
    detector = ODIN(Kinked(top)).fit(torch.full((9, 1), 0.5, dtype=torch.float64))
    assert detector.epsilon == expected
    assert detector.config()["epsilon"] is None


def test_the_step_is_the_best_of_all_that_are_tried():
    net = network(dtype=torch.float64)
    means = [ODIN(net, epsilon=e, temperature=2).fit(images()).score(images()).mean() for e in EPSILONS]
    assert ODIN(net, temperature=2).fit(images()).epsilon == EPSILONS[int(np.argmin(means))]


def test_of_equal_steps_the_smallest():
    """Of a network that no step can change."""
    detector = ODIN(linear([[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0])).fit(torch.rand(5, 2))
    assert detector.epsilon == 0


def test_the_choice_looks_at_500_images_drawn_by_the_seed():
    pool = torch.rand(700, 2, dtype=torch.float64)

    def looked_at(**options):
        net = linear(torch.eye(2, dtype=torch.float64))
        seen = rows_seen(net)
        ODIN(net, **options).fit(pool)
        clean = {tuple(row.tolist()) for rows in seen for row in rows} & {tuple(row.tolist()) for row in pool}
        return clean, sum(len(rows) for rows in seen)

    clean, rows = looked_at()
    assert len(clean) == 500
    assert rows == 500 * (1 + len(EPSILONS))
    assert looked_at(seed=0)[0] == clean
    assert looked_at(seed=1)[0] != clean
    assert looked_at(epsilon=0.01) == (set(), 0)  # a step that is given is not chosen


def test_fitting_again_chooses_again():
    x = torch.full((9, 1), 0.5, dtype=torch.float64)
    detector = ODIN(Kinked(0.503)).fit(x)
    assert detector.epsilon == 0.0024
    assert detector.fit(x + 0.0014).epsilon == 0.0014  # of the 0.0016 that are left
    assert ODIN(Kinked(0.503), epsilon=0.02).fit(x).epsilon == 0.02


# As every detector.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_saved_and_loaded_it_scores_the_same(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(DETECTORS, "odin", ODIN)
    for options in ({}, {"epsilon": 0.003, "temperature": 5.0, "seed": 3}):
        detector = ODIN(network(kind), **options).fit(images()).calibrate(images(30, seed=2))
        detector.save(tmp_path / "saved.kedge")
        again = kedge.load(tmp_path / "saved.kedge")
        assert again.config() == detector.config()
        assert again.epsilon == detector.epsilon
        assert again(images(9, seed=1)).score.equal(detector(images(9, seed=1)).score)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_batch_size_or_order(kind, dtype, tolerance):
    x = images(15, seed=5)
    detector = ODIN(network(kind, dtype=dtype), temperature=10, epsilon=0.002).fit(images())
    whole = detector.score(x)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    for size in (1, 7):
        assert detector.score(x, batch_size=size).sub(whole).abs().max() <= tolerance
        assert detector.score(x[order], batch_size=size).sub(whole[order]).abs().max() <= tolerance


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_nothing_about_the_network_changes(kind):
    net = network(kind)
    net.train()
    net.network.stage1.eval()
    net.network.fc.requires_grad_(False)
    modes, state = [module.training for module in net.modules()], torch.get_rng_state()
    before = copy.deepcopy(net.network.state_dict())
    detector = ODIN(net).fit(images())
    with torch.inference_mode():
        inside = detector.score(images())
    assert detector.score(images()).equal(inside)
    assert not inside.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [module.training for module in net.modules()] == modes
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(before[key]) for key, value in net.network.state_dict().items())
    net.eval()
    assert ODIN(net).fit(images()).epsilon == detector.epsilon  # batch norm was not left in training mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, r"temperature must lie in \(0, inf\); got 0"),
        ({"temperature": math.inf}, r"temperature must lie in \(0, inf\); got inf"),
        ({"epsilon": -0.1}, r"epsilon must lie in \[0, 1\]; got -0.1"),
        ({"epsilon": math.nan}, r"epsilon must lie in \[0, 1\]; got nan"),
        ({"seed": -1}, "seed must be a whole number of at least 0; got -1"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        ODIN(network(), **options)


def test_it_must_be_fitted_first():
    detector = ODIN(network())
    assert detector.state() == {}
    with pytest.raises(NotReadyError, match=r"call ODIN\(net\)\.fit\(train_set\) first"):
        detector.score(images())
