"""ODIN: a step towards confidence, and the softmax at a high temperature."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kedge
from helpers import images, network
from kedge.anchoring.sampling import choose_per_image
from kedge.detectors import Cost
from kedge.detectors.base import GRADIENT_ROWS
from kedge.detectors.odin import EPSILONS, ODIN


def linear(weight, bias=None) -> nn.Module:
    """logits = W x + b, of inputs that are vectors."""
    weight = torch.as_tensor(weight)
    layer = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
    layer.weight.data = weight
    layer.bias.data = torch.as_tensor([0.0] * len(weight) if bias is None else bias).to(weight)
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
    scores = []
    for image in x:
        image = image[None].clone().requires_grad_()
        scaled = logits_of(image) / temperature
        F.cross_entropy(scaled, scaled.argmax(dim=1)).backward()
        moved = image.detach() - epsilon * image.grad.sign()
        z = logits_of(moved).detach().double().numpy()[0] / temperature
        e = np.exp(z - z.max())
        scores.append(-float(e.max() / e.sum()))
    return scores


# The formula.


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


# Anchors.


def single_anchor_networks(net) -> list[kedge.Classifier]:
    nets = [copy.deepcopy(net) for _ in net.anchors]
    for single, anchor in zip(nets, net.anchors, strict=True):
        single.set_anchors(anchor[None])
    return nets


@pytest.mark.parametrize("per_image", [None, 2])
def test_the_moved_image_keeps_the_anchors_of_the_image(per_image):
    """The logits are the mean over anchors in both passes, also where an image's pixels, which move, choose them."""
    net = network("anchored", dtype=torch.float64)
    net.set_anchors(images(20 if per_image else 5, seed=2), per_image=per_image)
    members = single_anchor_networks(net.eval())
    x = images(6, seed=1).double() / 255
    detector = ODIN(net, temperature=10, epsilon=0.01).fit(images())
    for image, score in zip(x, detector.score(x).tolist(), strict=True):
        own = members
        if per_image:
            own = [members[i] for i in choose_per_image(image[None], 20, 2, net.options.seed)[:, 0].tolist()]
        expected = naive(lambda x, own=own: sum(member(x) for member in own) / len(own), image[None], 10, 0.01)
        assert score == pytest.approx(expected[0], abs=1e-9)


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_few_images_at_a_time_keep_their_activations(kind):
    detector = ODIN(network(kind), epsilon=0.01).fit(images())
    assert detector.cost == (Cost(forward=10, backward=5) if kind == "anchored" else Cost(forward=2, backward=1))
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


def test_the_step_is_the_best_of_all_that_are_tried_and_the_smallest_of_equal_ones():
    net = network(dtype=torch.float64)
    means = [ODIN(net, epsilon=e, temperature=2).fit(images()).score(images()).mean() for e in EPSILONS]
    assert ODIN(net, temperature=2).fit(images()).epsilon == EPSILONS[int(np.argmin(means))]
    constant = linear([[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0])
    assert ODIN(constant).fit(torch.rand(5, 2)).epsilon == 0


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


# Options.
