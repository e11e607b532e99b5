"""Folded batch norms: the same logits with fewer layers, and untouched where folding would be wrong."""

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
def test_the_logits_stay_and_norms_go(name, anchored):
    with seeded(0):
        network = lived(build(name, **SIZES[name])).double()
    net = kedge.anchor(network, init="fresh") if anchored else kedge.Classifier(network, mean=0.4, std=0.3)
    if anchored:
        net.set_anchors(images(3, seed=1))
    net.eval()
    fast = folded(net)
    before = norms(net)
    assert torch.allclose(fast(images()), net(images()), rtol=1e-9, atol=1e-9)
    assert norms(fast) < before == norms(net)


@pytest.mark.parametrize("wrap", [kedge.Classifier, kedge.anchor])
def test_every_norm_of_compact_and_airbench_goes(wrap):
    for name in ("compact", "airbench"):
        assert norms(folded(wrap(lived(build(name, **SIZES[name]))))) == 0


def test_channels_last_stays():
    net = kedge.Classifier(lived(build("compact", width=4))).to(memory_format=torch.channels_last)
    for weight in folded(net).parameters():
        assert weight.ndim != 4 or weight.is_contiguous(memory_format=torch.channels_last)


class Odd(nn.Module):
    """A convolution whose output is used twice, one that runs twice, and a pooling before a negative scale."""

    def __init__(self):
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.b, self.norm_b = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.c, self.pool, self.norm_c = nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.BatchNorm2d(4)
        self.norm_d, self.head = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.a(x)
        x = self.norm_a(x) + x
        x = self.norm_b(self.b(self.b(x)))
        x = self.norm_c(self.pool(self.c(x)))
        return self.head(self.norm_d(x.relu()).mean(dim=(2, 3)))


def test_what_cannot_be_folded_stays():
    with seeded(1):
        network = lived(Odd()).double()
    network.norm_c.weight.data[0] = -1.0
    net = kedge.Classifier(network).eval()
    fast = folded(net)
    assert norms(fast) == 4
    assert torch.allclose(fast(images()), net(images()), atol=1e-12)
    network.norm_c.weight.data.abs_()
    fast = folded(net)
    assert norms(fast) == 3
    assert torch.allclose(fast(images()), net(images()), atol=1e-9)


class Asks(nn.Module):
    """A network whose way depends on its input, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(3600, 2))

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else -self.body(x)


def test_a_network_that_cannot_be_traced_stays_as_it_is():
    with seeded(1):
        net = kedge.Classifier(lived(Asks()).double()).eval()
    assert norms(folded(net)) == 1
    assert torch.equal(folded(net)(images()), net(images()))


def test_norms_that_take_the_statistics_of_their_batch_stay():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten())
    net = kedge.Classifier(nn.Sequential(network, nn.Linear(3600, 2)).double()).eval()
    assert norms(folded(net)) == 1
    assert torch.allclose(folded(net)(images()), net(images()))


class Named(nn.Module):
    """A norm that is called by keyword."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(input=self.conv(x)).mean(dim=(2, 3)))


def test_a_norm_that_is_called_by_keyword_is_folded_too():
    with seeded(1):
        net = kedge.Classifier(lived(Named()).double()).eval()
    assert norms(folded(net)) == 0
    assert torch.allclose(folded(net)(images()), net(images()), atol=1e-9)


@pytest.mark.parametrize("features", [3, 6])  # as many as there are tokens, and more
def test_norms_of_tokens_behind_a_linear_layer_stay(features):
    network = nn.Sequential(
        nn.Flatten(2), nn.Linear(1024, features), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(3 * features, 2)
    )
    with seeded(1):
        net = kedge.Classifier(lived(network).double()).eval()
    assert norms(folded(net)) == 1
    assert torch.equal(folded(net)(images()), net(images()))
