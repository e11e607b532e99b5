"""An anchored layer inside a network: what lies before it runs once per image, what lies behind it once per anchor.

The oracle runs the network for one image and one anchor at a time, with the pair of layers written out.
"""

import copy

import pytest
import torch
from torch import nn

import kedge
from kedge.anchoring import FeatureNoise
from kedge.anchoring.layer import linear_part
from kedge.anchoring.tta import view
from kedge.detectors.inference import for_inference
from kedge.errors import ArchitectureError
from kedge.export import OnnxDetector, export_onnx
from kedge.export.graph import Graph
from kedge.models import build

K, B = 6, 4
IMAGE = (3, 8, 8)


def rand(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class Counted(nn.Module):
    """A layer that counts its calls and the rows that it saw."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls, self.rows = layer, 0, 0

    def forward(self, x):
        self.calls, self.rows = self.calls + 1, self.rows + len(x)
        return self.layer(x)


class Block(nn.Module):
    """A residual block, whose skip connection carries x around both layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.two(self.one(x).relu())


class Choosy(nn.Module):
    """Behind the layer it does what vmap cannot, and rows of all anchors together must not: it looks at a value."""

    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x * 3


def in_a_row(*behind):
    torch.manual_seed(0)
    before = Counted(nn.Conv2d(3, 4, 3, padding=1))
    layers = nn.ReLU(), nn.Conv2d(4, 5, 3), *behind, nn.ReLU(), nn.Flatten(), nn.Linear(180, 3)
    return nn.Sequential(before, *layers).eval(), "2"


def residual(*behind):
    torch.manual_seed(0)
    layers = Counted(nn.Conv2d(3, 4, 3, padding=1)), Block(), *behind, nn.Flatten(), nn.Linear(256, 3)
    return nn.Sequential(*layers).eval(), "1.one"


def the_head():
    return in_a_row()[0], "5"


NETWORKS = {"in a row": in_a_row, "a skip connection around it": residual}


def inner(make=in_a_row, **options):
    network, layer = make()
    net = kedge.anchor(network, layer=layer, init="fresh", mean=0.4, std=0.3, **options).eval()
    net.set_anchors(rand(K, *IMAGE, seed=1))
    return net, rand(B, *IMAGE, seed=2)


@torch.no_grad()
def one_at_a_time(net, x, anchors=None):
    """Per-anchor logits by a network in which the pair is written out: A_x(h - h_c) + A_c0(h_c)."""
    pair, network = net.anchored_layer, copy.deepcopy(net.network)
    reached = []
    spot = copy.deepcopy(network)
    spot.set_submodule(net.layer, copy.deepcopy(pair.layer_x))
    spot.get_submodule(net.layer).register_forward_pre_hook(lambda _, inputs: reached.append(inputs[0]))

    class Pair(nn.Module):
        def forward(self, h):
            return pair.layer_x(h - self.c) + linear_part(pair.layer_c, self.c.expand_as(h))

    oracle = Pair()
    network.set_submodule(net.layer, oracle)
    rows = []
    for anchor in net.anchors if anchors is None else anchors:
        spot(net.normalise(anchor[None]))
        oracle.c = reached[-1]
        rows.append(torch.cat([network(net.normalise(image[None])) for image in x]))
    return torch.stack(rows)


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_the_logits_are_those_of_one_image_and_one_anchor_at_a_time(make):
    net, x = inner(make)
    with torch.no_grad():
        logits = net.per_anchor_logits(x)
    assert float(logits.std(dim=0).mean()) > 0.01
    torch.testing.assert_close(logits, one_at_a_time(net, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_what_lies_before_the_layer_runs_once_per_image_and_anchors_pass_it_once(make):
    net, x = inner(make)
    counted = net.network[0]
    with torch.no_grad():
        net.per_anchor_logits(x)
        counted.calls = counted.rows = 0
        net.per_anchor_logits(x)
    assert (counted.calls, counted.rows) == (1, B)  # K * B if the whole network ran for each anchor, and K for anchors


def test_each_view_runs_once():
    net, x = inner()
    with torch.no_grad():
        logits = net.per_anchor_logits(x, tta=2)
        net.network[0].rows = 0
        net.per_anchor_logits(x, tta=2)
    assert net.network[0].rows == 2 * B
    plain, mirrored = one_at_a_time(net, x), one_at_a_time(net, view(x, 1))
    expected = torch.stack([(plain, mirrored)[k % 2][k] for k in range(K)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_some_anchors_and_anchors_of_each_image_s_own():
    net, x = inner()
    with torch.no_grad():
        torch.testing.assert_close(net.per_anchor_logits(x, which=[4, 1]), net.per_anchor_logits(x)[[4, 1]])
        net.set_anchors(rand(9, *IMAGE, seed=3), per_image=2)
        logits = net.per_anchor_logits(x)
        alone = torch.cat([net.per_anchor_logits(image[None]) for image in x], dim=1)
    assert logits.shape == (2, B, 3)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
    everything = one_at_a_time(net, x)
    distances = (everything[:, None] - logits[None]).abs().amax(dim=-1).amin(dim=0)  # to the nearest of all anchors
    assert float(distances.max()) < 1e-4


def test_features_are_means_over_anchors_on_both_sides_of_the_layer():
    net, x = inner()
    with torch.no_grad():
        logits, features = net.features(x, ["0", "5:in"])
        per_anchor = one_at_a_time(net, x)
    torch.testing.assert_close(logits, per_anchor.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features["0"], net.network[0](net.normalise(x)))
    torch.testing.assert_close(net.network[5](features["5:in"]), logits, rtol=1e-4, atol=1e-5)


def test_a_score_does_not_depend_on_its_batch():
    detector = kedge.AMP(inner()[0]).fit(rand(20, *IMAGE))
    x = rand(30, *IMAGE, seed=4)
    torch.testing.assert_close(detector.score(x, batch_size=7), detector.score(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["before the layer", "the layer", "the normalisation"])
def test_the_anchors_part_follows_every_change_of_what_it_depends_on(change):
    net, x = inner()
    with torch.no_grad():
        before = net.per_anchor_logits(x)
    if change == "before the layer":
        net.network[0].layer.weight.data.mul_(1.5)  # which no version counter sees
    elif change == "the layer":
        net.anchored_layer.layer_c.weight.data.mul_(1.5)
    else:
        net.set_statistics(0.5, 0.25)
    with torch.no_grad():
        after = net.per_anchor_logits(x)
    assert float((after - before).abs().max()) > 1e-3
    torch.testing.assert_close(after, one_at_a_time(net, x), rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_image_and_the_layers_before():
    net, x = inner()
    x.requires_grad_()
    net.per_anchor_logits(x).square().sum().backward()
    first = x.grad[0].clone()
    weight = net.network[0].layer.weight
    assert float(weight.grad.abs().sum()) > 0
    with torch.no_grad():
        step = 1e-2 * first / first.norm()
        up, down = (one_at_a_time(net, (x[:1].detach() + s * step)).square().sum() for s in (1, -1))
    assert float((up - down) / 2) == pytest.approx(float((first * step).sum()), rel=0.05)


def test_where_a_skip_needs_vmap_and_vmap_cannot_the_whole_network_runs_for_each_anchor():
    net, x = inner(lambda: residual(Choosy()))
    with torch.no_grad():
        logits = net.per_anchor_logits(x[:1])
    assert not net.runs_once
    assert net.passes == K
    assert logits.shape == (K, 1, 3)


def test_a_layer_that_a_fast_path_of_torch_goes_around_is_refused():
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoder(encoder, 1), nn.Flatten(), nn.Linear(12, 2))
    net = kedge.anchor(network, layer="1.layers.0.linear1").eval()
    net.set_anchors(rand(2, 3, 4))
    with torch.no_grad(), pytest.raises(ArchitectureError, match="set_fastpath_enabled"):
        net.per_anchor_logits(rand(2, 3, 4))


def test_the_cost_counts_only_the_operations_behind_the_layer():
    detector = kedge.AMP(inner()[0]).fit(rand(20, *IMAGE))
    # Multiplications: 3 * 4 * 9 * 64 before, 4 * 5 * 9 * 36 in the layer, which is a pair when it is counted, 180 * 3.
    before, behind = 3 * 4 * 9 * 64 + 2 * 4 * 5 * 9 * 36, 180 * 3
    assert detector.cost.forward == pytest.approx(1 + (K - 1) * behind / (before + behind), abs=1e-3)
    assert kedge.AMP(kedge.anchor(in_a_row()[0]), k=7).fit(rand(20, *IMAGE)).cost.forward == 7  # at the first layer


def test_a_file_and_a_copy_for_inference_give_the_same_scores(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), *in_a_row()[0][1:]).eval()
    net = kedge.anchor(network, layer="3", init="fresh").eval()
    x = rand(B, *IMAGE, seed=2)
    detector = kedge.AMP(net, k=K).fit(rand(20, *IMAGE)).calibrate(rand(40, *IMAGE, seed=3))
    detector.save(tmp_path / "inner.kedge")
    loaded = kedge.load(tmp_path / "inner.kedge")
    torch.testing.assert_close(loaded.score(x), detector.score(x), rtol=1e-5, atol=1e-6)
    assert loaded.net.runs_once
    assert loaded.cost.forward < 2
    fast = for_inference(detector)
    assert fast is not detector
    assert fast.net.weights_fixed
    assert not detector.net.weights_fixed
    torch.testing.assert_close(fast.score(x), detector.score(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [*NETWORKS.values(), the_head], ids=[*NETWORKS, "the last layer"])
def test_an_onnx_file_runs_what_lies_before_the_layer_once_unless_x_goes_around_it(make, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    network, layer = make()
    network[0] = network[0].layer
    net = kedge.anchor(network, layer=layer, init="fresh").eval()
    pixels = (rand(40, *IMAGE) * 255).to(torch.uint8)
    detector = kedge.AMP(net, k=K).fit(pixels[:20]).calibrate(pixels[20:])
    export_onnx(detector, tmp_path / "inner.onnx")
    scores = OnnxDetector(tmp_path / "inner.onnx")(pixels[:5])["score"]
    torch.testing.assert_close(torch.as_tensor(scores), detector.score(pixels[:5]), rtol=1e-4, atol=1e-4)
    rows = Graph(detector).rows
    assert rows == ([0] * K if make is residual else [0])


def test_early_exit_and_attacks_work_at_an_inner_layer():
    detector = kedge.AMP(inner()[0]).fit(rand(20, *IMAGE))
    fast = kedge.EarlyExit(detector).calibrate(rand(60, *IMAGE, seed=3))
    assert 2 <= fast.mean_passes(rand(9, *IMAGE, seed=4)) <= K
    assert kedge.ODIN(detector.net).fit(rand(20, *IMAGE)).score(rand(3, *IMAGE)).isfinite().all()


@pytest.mark.parametrize("per_sample", [False, True])
def test_noise_on_features_is_relative_to_their_deviations_and_spares_the_image(per_sample):
    features = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.0]) + 4
    with torch.random.fork_rng():
        noise = FeatureNoise(0.5)(features) - features
    deviations = noise.std(dim=0)
    torch.testing.assert_close(deviations, torch.tensor([0.5, 5.0, 0.0]), rtol=0.05, atol=1e-6)
    kept = {}

    class Recorded(nn.Linear):
        def forward(self, h):
            kept.setdefault(self.name, []).append(h.detach())
            return super().forward(h)

    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), Recorded(8, 4), nn.ReLU(), nn.Linear(4, 2))
    network[3].name = "x"
    options = {"every": 4 if per_sample else 1, "per_sample": per_sample, "seed": 3}
    net = kedge.anchor(network, layer="3", corruption=FeatureNoise(0.5), **options).train()
    net.anchored_layer.layer_c.name = "c"
    x = rand(64, *IMAGE)
    net(x[:1])
    kept.clear()
    net(x)
    h = network[2](network[1](network[0](x)))
    anchors = h[net.draw.permutation]
    torch.testing.assert_close(kept["x"][0], h - anchors)  # the residual keeps the clean anchor
    changed = (kept["c"][0] - anchors).abs().amax(dim=1) > 1e-6
    assert torch.equal(changed, net.draw.per_sample if per_sample else torch.ones(64, dtype=torch.bool))


def test_built_in_networks_at_every_depth():
    network = build("resnet8").eval()
    for layer in ("layer1.0.conv2", "layer3.0.conv1", "fc"):
        net = kedge.anchor(network, layer=layer, init="fresh").eval()
        net.set_anchors(rand(3, 3, 32, 32))
        with torch.no_grad():
            logits = net.per_anchor_logits(rand(2, 3, 32, 32, seed=1))
        assert net.runs_once
        torch.testing.assert_close(logits, one_at_a_time(net, rand(2, 3, 32, 32, seed=1)), rtol=1e-3, atol=1e-4)
