"""Folded batch norms: the same logits with fewer layers, and untouched where folding would be wrong."""

from functools import partial

import pytest
import torch
from torch import nn

import kedge
from helpers import Function
from kedge.anchoring.folding import folded
from kedge.models import build
from kedge.models.capture import capture
from kedge.models.graph import StoredGraph
from kedge.seeds import seeded

SIZES = {"compact": {"width": 4}, "airbench": {"width": 4}, "wrn": {"depth": 10, "width": 1}, "resnet18-cifar": {}}


def lived(network: nn.Module) -> nn.Module:
    """Give norms statistics and scales as training leaves them, negative scales among them."""
    with seeded(3):
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.4, 2)
                if module.weight.requires_grad:
                    module.weight.data.normal_(1, 0.6)
                module.bias.data.normal_(0, 0.3)
    return network.eval()


def norms(net: nn.Module) -> int:
    return sum(isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) for module in net.modules())


def images(n=5, seed=0):
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("anchored", [False, True])
def test_the_logits_and_the_memory_format_stay_and_norms_go(name, anchored):
    with seeded(0):
        network = lived(build(name, **SIZES[name])).double()
    net = kedge.anchor(network, init="fresh") if anchored else kedge.Classifier(network, mean=0.4, std=0.3)
    if anchored:
        net.set_anchors(images(3, seed=1))
    net.eval().to(memory_format=torch.channels_last)
    fast, before = folded(net), norms(net)
    assert torch.allclose(fast(images()), net(images()), rtol=1e-9, atol=1e-9)
    assert norms(fast) < before == norms(net)
    assert norms(fast) == 0 or name not in ("compact", "airbench")
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in fast.parameters() if p.ndim == 4)


def body(norm=None):
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm or nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(3600, 2))


def odd():
    """A convolution whose output is used twice, one that runs twice, and a pooling before a negative scale."""

    def forward(net, x):
        x = net.a(x)
        x = net.norm_a(x) + x
        x = net.norm_b(net.b(net.b(x)))
        x = net.norm_c(net.pool(net.c(x)))
        return net.head(net.norm_d(x.relu()).mean(dim=(2, 3)))

    norms = {f"norm_{name}": nn.BatchNorm2d(4) for name in "abcd"}
    layers = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(4, 4, 3), "c": nn.Conv2d(4, 4, 3), "pool": nn.MaxPool2d(2)}
    return Function(forward, **layers, **norms, head=nn.Linear(4, 2))


def test_what_cannot_be_folded_stays():
    with seeded(1):
        network = lived(odd()).double()
    network.norm_c.weight.data[0] = -1.0
    net = kedge.Classifier(network).eval()
    for left, tolerance in ((4, 1e-12), (3, 1e-9)):
        fast = folded(net)
        assert norms(fast) == left
        assert torch.allclose(fast(images()), net(images()), atol=tolerance)
        network.norm_c.weight.data.abs_()


def by_keyword():
    layers = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 2)}
    return Function(lambda net, x: net.head(net.norm(input=net.conv(x)).mean(dim=(2, 3))), **layers)


def norm_of_tokens(features):
    layers = nn.Linear(1024, features), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(3 * features, 2)
    return nn.Sequential(nn.Flatten(2), *layers)


class NormAndActivation(nn.BatchNorm2d):
    """A norm that ends with layers of its own, as timm's do."""

    def __init__(self, features, act=None):
        super().__init__(features)
        self.drop, self.act = nn.Identity(), act or nn.ReLU6()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Late(NormAndActivation):
    """One that does more than its layers show."""

    def forward(self, x):
        return super().forward(x) + 1


class Padded(nn.Conv2d):
    """A convolution with a forward of its own, as TensorFlow pads."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


class Standardised(nn.Conv2d):
    """A convolution whose output does not follow the scale of its weight."""

    def forward(self, x):
        return self._conv_forward(x, self.weight / self.weight.norm(), self.bias)


def of_kinds(conv, norm):
    return nn.Sequential(conv(3, 4, 3), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize(
    ("conv", "norm", "left"),
    [
        (nn.Conv2d, NormAndActivation, 0),
        (Padded, nn.BatchNorm2d, 0),
        (Padded, NormAndActivation, 0),
        (nn.Conv2d, Late, 1),
        (Standardised, nn.BatchNorm2d, 1),
    ],
)
def test_convolutions_and_norms_of_other_kinds_are_folded_where_that_is_right(conv, norm, left, anchored):
    with seeded(2):
        network = lived(of_kinds(conv, norm)).double()
    net = kedge.anchor(network, init="fresh" if not left else "preserve") if anchored else kedge.Classifier(network)
    if anchored:
        net.set_anchors(images(3, seed=1))
    net.eval()
    assert norms(folded(net)) == left
    assert torch.allclose(folded(net)(images()), net(images()), atol=1e-9)


def test_a_loaded_graph_is_folded_and_layers_can_still_be_read():
    with seeded(4):
        network = lived(odd()).double()
    document, constants = capture(network, images(2), keep=("a", "head"))
    graph = StoredGraph(document)
    graph.load_state_dict({**network.state_dict(), **constants})
    net = kedge.Classifier(graph.double()).eval()
    fast = folded(net)
    kinds = [target for _, target, _, _ in fast.network.document["nodes"]]
    assert kinds.count("aten.batch_norm.default") == 4  # a's output is used twice, and b's weights; c's is pooled
    assert torch.allclose(fast(images()), net(images()), atol=1e-9)


@pytest.mark.parametrize("anchored", [False, True])
def test_norms_of_a_loaded_graph_go_with_their_tensors(anchored):
    with seeded(4):
        network = lived(of_kinds(nn.Conv2d, NormAndActivation)).double()
    document, _ = capture(network, images(2), keep=("0", "4"))
    graph = StoredGraph(document)
    graph.load_state_dict(network.state_dict())
    net = kedge.anchor(graph.double(), init="fresh") if anchored else kedge.Classifier(graph.double())
    if anchored:
        net.set_anchors(images(3, seed=1))
    net.eval()
    fast = folded(net)
    assert torch.allclose(fast(images()), net(images()), atol=1e-9)
    assert not any("1." in name for name, _ in fast.network.named_parameters())
    assert "aten.batch_norm.default" in [target for _, target, _, _ in net.network.document["nodes"]]
    assert "aten.batch_norm.default" not in [target for _, target, _, _ in fast.network.document["nodes"]]
    last = fast.features(images(), ["4:in"])[1]["4:in"]
    assert torch.allclose(last, net.features(images(), ["4:in"])[1]["4:in"], atol=1e-9)


LEFT = {  # name: (network, norms that must stay)
    "not traceable": (lambda: Function(lambda net, x: net.a(x) if x.sum() > 0 else -net.a(x), a=body()), 1),
    "statistics of the batch": (lambda: body(nn.BatchNorm2d(4, track_running_stats=False)), 1),
    "called by keyword": (by_keyword, 0),
    "tokens": (lambda: norm_of_tokens(3), 1),  # as many features as there are tokens
    "tokens of more features": (lambda: norm_of_tokens(6), 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_only_norms_that_can_be_folded_are(name):
    make, left = LEFT[name]
    with seeded(1):
        network = make()
        net = kedge.Classifier((network if "batch" in name else lived(network)).double()).eval()
    assert norms(folded(net)) == left
    same = torch.equal if left else partial(torch.allclose, atol=1e-9)
    assert same(folded(net)(images()), net(images()))
