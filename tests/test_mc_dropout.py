"""MC dropout: each pass is one sub-network, drawn from a seed and the same for every image."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import wide_weight
from kedge.detectors.mc_dropout import MCDropout
from kedge.detectors.registry import DETECTORS
from kedge.errors import ArchitectureError, InputError
from kedge.models import build
from kedge.models.ensemble import Ensemble
from kedge.seeds import seeded

SCORES = ["msp", "entropy", "mutual_information"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(DETECTORS, MCDropout.name, MCDropout)


def images(n=12, side=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=generator)


def network(kind="plain", dtype=torch.float32):
    """A network with three dropout layers and batch statistics of its own."""
    with seeded(0):
        net = build("wrn", depth=10, width=1, classes=4, dropout=0.3)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(5)
    net = net.to(dtype).eval()
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", mean=0.5, std=0.25)
    return kedge.Classifier(net, mean=0.5, std=0.25)


def dense(dropout=0.5):
    """Two linear layers with dropout between them, which numpy can follow."""
    with seeded(3):
        return nn.Sequential(nn.Flatten(), nn.Linear(3, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 4)).double()


def vectors(n=5):
    return torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def hypotheses(net, x, **options):
    with torch.no_grad():
        return MCDropout(net, **options).per_anchor_logits(x)


def masks(p, features, **options):
    """What a network of nothing but a dropout layer makes of ones, (M, B, features)."""
    net = nn.Sequential(nn.Flatten(), nn.Dropout(p), nn.Identity())
    return hypotheses(net, torch.ones(3, features, dtype=torch.float64), **options)


def weights(net):
    """The two linear layers as numpy arrays."""
    return [layer.weight.detach().numpy() for layer in (net[1], net[4])], [
        layer.bias.detach().numpy() for layer in (net[1], net[4])
    ]


# The masks.


def test_a_mask_holds_zeros_and_ones_scaled_up():
    found = masks(0.3, 4000, samples=3)
    assert set(found.unique().tolist()) == {0.0, 1 / 0.7}
    for mask in found[:, 0]:
        dropped = float((mask == 0).double().mean())
        assert abs(dropped - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)


def test_all_images_share_the_mask_of_a_pass_and_passes_differ():
    found = masks(0.5, 64, samples=4)
    assert all(mask.equal(pass_[0]) for pass_ in found for mask in pass_)
    assert len({tuple(pass_[0].tolist()) for pass_ in found}) == 4


def test_the_seed_decides():
    first = masks(0.5, 64, seed=1)
    assert first.equal(masks(0.5, 64, seed=1))
    assert not first.equal(masks(0.5, 64, seed=2))
    assert masks(0.5, 64, samples=3, seed=1).equal(first[:3])  # more samples add passes and change none


def test_layers_draw_masks_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.first(x), self.second(x)], dim=1).flatten(1)

    found = hypotheses(Twice(), torch.ones(2, 64), samples=2)
    assert all(not a.equal(b) for a, b in found.view(2, 2, 2, 64)[:, 0])


def test_a_layer_that_is_called_twice_draws_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.drop(x), self.drop(x)], dim=1).flatten(1)

    found = hypotheses(Twice(), torch.ones(2, 64), samples=2).view(2, 2, 2, 64)  # pass, image, call, feature
    assert found[:, 0].equal(found[:, 1])
    assert all(not a.equal(b) for a, b in found[:, 0])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(nn.Dropout1d, (40, 5)), (nn.Dropout2d, (40, 5, 5)), (nn.Dropout3d, (40, 2, 5, 5))],
)
def test_channelwise_layers_drop_whole_channels(kind, shape):
    net = nn.Sequential(kind(0.5), nn.Flatten())
    found = hypotheses(net, torch.ones(2, *shape), samples=3).view(3, 2, 40, -1)
    assert found.amin(dim=3).equal(found.amax(dim=3))
    assert set(found.unique().tolist()) == {0.0, 2.0}
    assert found[:, 0].equal(found[:, 1])


def test_dropout_of_everything_leaves_nothing():
    net = dense(1.0)
    found = hypotheses(net, vectors())
    assert found.allclose(net[4].bias.detach().expand_as(found))


def test_the_mean_over_passes_of_a_linear_network_is_the_network():
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(3, 4)).double()
    x = vectors(2)
    found = hypotheses(net, x, samples=1000)
    with torch.no_grad():
        expected = net.eval()(x)
    error = found.std(dim=0) / math.sqrt(1000)
    assert ((found.mean(dim=0) - expected).abs() < 4 * error).all()


# The scores.


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_those_of_the_definition(score):
    net, x = dense(), vectors()
    (w1, w2), (b1, b2) = weights(net)
    drops = masks(0.5, 6, samples=7, seed=5)[:, 0].numpy()
    expected, logits = [], []
    for row in x.numpy():
        softmaxes = []
        for mask in drops:
            z = w2 @ (np.maximum(w1 @ row + b1, 0) * mask) + b2
            e = np.exp(z - z.max())
            softmaxes.append(e / e.sum())
        mean = sum(softmaxes) / 7
        entropy = -sum(p * math.log(p) for p in mean)
        each = sum(-sum(p * math.log(p) for p in softmax) for softmax in softmaxes) / 7
        expected.append({"msp": -max(mean), "entropy": entropy, "mutual_information": entropy - each}[score])
        logits.append([math.log(p) for p in mean])
    detector = MCDropout(net, samples=7, score=score, seed=5).fit(x)
    with torch.no_grad():
        found = detector.outputs(x)
    assert found.score.tolist() == pytest.approx(expected, rel=1e-9)
    assert found.logits.numpy() == pytest.approx(np.array(logits), rel=1e-9)


def test_an_anchored_network_gives_the_mean_over_its_anchors_under_the_same_mask():
    plain, x, anchors = dense(), vectors(), vectors(8)[5:]
    net = kedge.anchor(plain, init="fresh")
    net.set_anchors(anchors)
    (_, w2), (_, b2) = weights(plain)
    w1, b1 = wide_weight(net).detach().numpy(), net.anchored_layer.layer_x.bias.detach().numpy()
    drops = masks(0.5, 6, samples=4)[:, 0].numpy()
    expected = np.zeros((4, 5, 4))
    for m, mask in enumerate(drops):
        for i, row in enumerate(x.numpy()):
            for c in anchors.numpy():
                hidden = np.maximum(w1 @ np.concatenate([c, row - c]) + b1, 0) * mask
                expected[m, i] += (w2 @ hidden + b2) / 3
    for memory in (256 * 2**20, 1):  # all anchors in one batch, or one row at a time
        net.memory_cap = memory
        assert hypotheses(net, x, samples=4).numpy() == pytest.approx(expected, rel=1e-9)
    assert MCDropout(net, samples=4).cost.forward == 12


def test_dropout_before_the_first_layer_of_an_anchored_network_drops_the_same_of_image_and_anchor():
    with seeded(0):
        plain = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3, 4)).double()
    net = kedge.anchor(plain, init="fresh")
    x, anchors = vectors(), vectors(7)[5:]
    net.set_anchors(anchors)
    w, b = wide_weight(net).detach().numpy(), net.anchored_layer.layer_x.bias.detach().numpy()
    expected = np.zeros((10, 5, 4))
    for m, mask in enumerate(masks(0.5, 3, samples=10)[:, 0].numpy()):
        for i, row in enumerate(x.numpy()):
            for c in anchors.numpy():
                expected[m, i] += (w @ np.concatenate([mask * c, mask * row - mask * c]) + b) / 2
    assert hypotheses(net, x).numpy() == pytest.approx(expected, rel=1e-9)


def test_an_ensemble_of_networks_with_dropout_is_dropped_as_a_whole():
    net, x = Ensemble([dense(), dense()]), vectors()
    detector = MCDropout(net, samples=3)
    found = hypotheses(net, x, samples=3)
    first = hypotheses(dense(), x, samples=3)
    assert detector.cost.forward == 6
    assert found.shape == (3, 5, 4)
    assert not found.allclose(first.log_softmax(dim=-1))  # the second member has masks of its own


# As a detector.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_the_batch(kind, score, dtype, tolerance):
    x = images(11)
    detector = MCDropout(network(kind, dtype), samples=2, score=score).fit(images(seed=1))
    expected = detector.score(x)
    allowed = tolerance * max(1.0, float(expected.abs().max()))
    order = torch.randperm(11)
    for size in (1, 4):
        assert detector.score(x, batch_size=size).sub(expected).abs().max() <= allowed
        assert detector.score(x[order], batch_size=size).sub(expected[order]).abs().max() <= allowed
    assert len(set(expected.tolist())) == 11


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_a_saved_detector_gives_the_same_scores(kind, tmp_path):
    detector = MCDropout(network(kind), samples=3, score="mutual_information", seed=4)
    detector.fit(images(seed=1)).calibrate(images(40, seed=2))
    detector.save(tmp_path / "x.kedge")
    again = kedge.load(tmp_path / "x.kedge")
    assert isinstance(again, MCDropout)
    assert again.config() == {"samples": 3, "score": "mutual_information", "seed": 4}
    assert again(images()).score.equal(detector(images()).score)


def test_scoring_leaves_network_and_generator_as_they_were():
    detector = MCDropout(network(), samples=2).fit(images())
    detector.net.train()
    statistics = {name: value.clone() for name, value in detector.net.named_buffers()}
    state = torch.get_rng_state()
    before = detector.score(images())
    assert torch.get_rng_state().equal(state)
    assert detector.net.training
    assert all(value.equal(statistics[name]) for name, value in detector.net.named_buffers())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in detector.net.modules())
    with torch.no_grad():
        assert not before.allclose(-detector.net.eval()(images()).softmax(dim=1).amax(dim=1))  # dropout was on
    detector.net.network.fc.weight.data.zero_()
    detector.net.network.fc.weight = nn.Parameter(torch.zeros(4, 7))  # fails in mid-pass
    with pytest.raises(RuntimeError):
        detector.score(images())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in detector.net.modules())


def test_what_it_costs():
    assert MCDropout(network()).cost.forward == 10
    net = network("anchored")
    net.set_anchors(images(5))
    assert MCDropout(net, samples=3).cost.forward == 15


# What it refuses.


@pytest.mark.parametrize(
    "net",
    [
        build("compact", width=4),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(3, 2)),
    ],
)
def test_a_network_without_dropout_is_refused_with_what_to_do(net):
    with pytest.raises(InputError, match=r'none; build one with kedge\.models\.build\("wrn-40-2", dropout=0\.3\)'):
        MCDropout(net)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_is_refused(kind):
    with pytest.raises(ArchitectureError, match=rf"the layer 'network\.1' is an {kind.__name__}"):
        MCDropout(nn.Sequential(nn.Dropout(0.5), kind(0.5), nn.Flatten()))
    MCDropout(nn.Sequential(nn.Dropout(0.5), kind(0.0), nn.Flatten()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be a whole number of at least 1; got 0"),
        ({"samples": 2.5}, "samples must be a whole number"),
        ({"score": "energy"}, "score must be one of 'msp', 'entropy', 'mutual_information'; got 'energy'"),
        ({"score": "mutual_information", "samples": 1}, "'mutual_information' needs at least two"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    with pytest.raises(InputError, match=message):
        MCDropout(dense(), **options)


def test_a_network_is_needed():
    with pytest.raises(InputError, match=r"net must be a torch\.nn\.Module, got str"):
        MCDropout("resnet18")


def test_dropout_that_never_runs_is_found_out():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc = nn.Dropout(0.5), nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x)

    with pytest.raises(InputError, match=r"none of the dropout layers \['network\.drop'\] runs in a forward pass"):
        MCDropout(Idle()).fit(torch.rand(4, 3)).score(torch.rand(4, 3))


def test_dropout_that_sees_another_number_of_rows_is_found_out():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x.T).T  # features first

    with pytest.raises(ArchitectureError, match=r"'network\.drop' must see one row per image.* \(3, 4\) for 4 images"):
        MCDropout(Sequence()).fit(torch.rand(4, 3)).score(torch.rand(4, 3))
