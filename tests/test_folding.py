"""Folded batch norms: the same logits with fewer layers, and untouched where folding would be wrong."""

from functools import partial

import pytest
import torch
from torch import nn

import kedge
from kedge.anchoring.folding import folded
from kedge.models import build
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


class Network(nn.Module):
    """A network of named layers and a forward."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.run(self, x)


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
    return Network(forward, **layers, **norms, head=nn.Linear(4, 2))


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
    return Network(lambda net, x: net.head(net.norm(input=net.conv(x)).mean(dim=(2, 3))), **layers)


def norm_of_tokens(features):
    layers = nn.Linear(1024, features), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(3 * features, 2)
    return nn.Sequential(nn.Flatten(2), *layers)


LEFT = {  # name: (network, norms that must stay)
    "not traceable": (lambda: Network(lambda net, x: net.a(x) if x.sum() > 0 else -net.a(x), a=body()), 1),
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
