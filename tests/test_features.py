"""Features of named layers, on plain networks and averaged over anchors; heads; conversions."""

import copy

import pytest
import torch
from torch import nn

import kedge
from kedge.anchoring.sampling import choose_per_image
from kedge.errors import ArchitectureError, InputError
from kedge.io.rebuild import describe, rebuild
from kedge.models import build, read_features
from kedge.models.conversion import CONVERSIONS, conversion, convert
from kedge.models.head import HeadOutput, check_head, head_name
from kedge.seeds import seeded

K, B = 3, 5


def network() -> nn.Module:
    with seeded(0):
        return build("compact", width=4, classes=3, channels=3).double().eval()


def anchored(per_image=None) -> kedge.Anchored:
    net = kedge.anchor(network(), init="fresh", mean=[0.5] * 3, std=[0.25] * 3).eval()
    with seeded(1):
        net.set_anchors(torch.rand(K if per_image is None else 12, 3, 8, 8).double(), per_image=per_image)
    return net


def images(n=B) -> torch.Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()


def test_the_input_of_a_layer_is_read_by_its_name_and_in():
    net, x = network(), images()
    output, found = read_features(net, x, ["flatten", "fc:in", "fc"])
    assert torch.equal(found["fc:in"], found["flatten"])
    assert torch.equal(found["fc"], output)
    assert torch.equal(output, net(x))
    with pytest.raises(InputError, match=r"no layer 'fcc:in'"):
        read_features(net, x, ["fcc:in"])


def test_features_of_a_classifier_are_of_normalised_images():
    net, x = network(), images()
    classifier = kedge.Classifier(net, mean=0.5, std=0.25)
    logits, found = classifier.features(x, ["stage2"])
    assert torch.equal(logits, net((x - 0.5) / 0.25))
    assert torch.equal(found["stage2"], net.stage2(net.stage1(net.prep((x - 0.5) / 0.25))))
    assert classifier.features(x)[1] == {}


@pytest.mark.parametrize("per_image", [None, 4])
@pytest.mark.parametrize("rows", [None, 7, 1])  # how many rows fit into memory at a time
def test_features_of_an_anchored_network_are_means_over_its_anchors(per_image, rows):
    net, x = anchored(per_image), images()
    layers = ["stage1", "fc:in"]
    expected: dict[str, torch.Tensor] = {}
    for b in range(B):  # one image, one anchor at a time, through the literal network
        one = copy.deepcopy(net)
        chosen = net.anchors
        if per_image is not None:
            chosen = net.anchors[choose_per_image(x[b : b + 1], 12, per_image, net.options.seed)[:, 0]]
        for anchor in chosen:
            one.set_anchors(anchor[None])
            hypothesis, found = one.features(x[b : b + 1], layers)
            for name, value in {"logits": hypothesis, **found}.items():
                sums = expected.setdefault(name, torch.zeros(B, *value.shape[1:], dtype=torch.float64))
                sums[b] += value[0] / len(chosen)
    if rows is not None:
        net.features(x[:1])  # surveys how large an image's activations are
        net.memory_cap = rows * 3 * int(x[0].numel() * 8 * net._growth + 1)
    logits, features = net.features(x, layers)
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits, net(x), rtol=1e-9, atol=1e-9)
    for name in layers:
        torch.testing.assert_close(features[name], expected[name], rtol=1e-9, atol=1e-9)


def test_a_perturbed_image_keeps_the_anchors_of_its_original():
    net, x = anchored(per_image=4), images()
    moved = x + 0.02
    ours = net.features(moved, like=x)[0]
    assert not torch.allclose(ours, net.features(moved)[0])  # its own pixels would choose other anchors
    for b in range(B):
        alone = copy.deepcopy(net)
        alone.set_anchors(net.anchors[choose_per_image(x[b : b + 1], 12, 4, net.options.seed)[:, 0]])
        torch.testing.assert_close(ours[b], alone(moved[b : b + 1])[0], rtol=1e-9, atol=1e-9)


def test_gradients_of_features_reach_the_image():
    net, x = anchored(), images().requires_grad_()
    _, found = net.features(x, ["flatten"])
    (gradient,) = torch.autograd.grad(found["flatten"].sum(), x)
    assert gradient.shape == x.shape
    assert gradient.any()


def test_a_layer_that_merges_images_is_refused_on_an_anchored_network():
    class Merging(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mean, self.fc = nn.Conv2d(3, 4, 3), nn.Identity(), nn.Linear(4, 2)

        def forward(self, x):
            h = self.conv(x).mean(dim=(2, 3))
            return self.fc(h + self.mean(h.mean(dim=0, keepdim=True)))

    net = kedge.anchor(Merging())
    net.set_anchors(torch.rand(3, 3, 8, 8))
    with pytest.raises(InputError, match="layer 'mean' must give a row per image"):
        net.eval().features(torch.rand(4, 3, 8, 8), ["mean"])


# The head.


def test_the_head_is_the_last_linear_layer_or_the_one_named():
    assert head_name(network()) == "fc"
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert head_name(net) == "3"
    assert head_name(net, "1") == "1"
    with pytest.raises(InputError, match=r"head must name a linear layer, one of \['1', '3'\]; got '2'"):
        head_name(net, "2")
    with pytest.raises(ArchitectureError, match="no linear layer"):
        head_name(nn.Sequential(nn.Flatten()))


def test_a_layer_that_does_not_give_the_logits_is_no_head():
    net, x = network(), images()
    logits, found = read_features(net, x, ["fc:in"])
    check_head(net, "fc", logits, found["fc:in"])
    with pytest.raises(ArchitectureError, match="the logits are not the output of 'fc'"):
        check_head(net, "fc", 2 * logits, found["fc:in"])
    with pytest.raises(ArchitectureError, match="the logits are not the output of 'fc'"):
        check_head(net, "fc", logits[:, :2], found["fc:in"])


class TwoOutputs(nn.Module):
    """A head that gives something beside the logits."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return HeadOutput(self.linear(x), (x,))


def test_a_head_may_give_more_than_logits():
    net, x = network(), images()
    plain = net(x)
    net.fc = TwoOutputs(net.fc)
    classifier = kedge.Classifier(net)
    assert torch.equal(classifier(x), plain)
    assert torch.equal(classifier(x, raw=True).extra[0], read_features(network(), x, ["flatten"])[1]["flatten"])


# Conversions.


@pytest.fixture
def halved():
    @conversion("halved")
    def halve(network: nn.Module, *, by: float) -> nn.Module:
        network.fc.weight.data /= by
        network.fc = nn.Sequential(network.fc)  # other names in the state dict
        return network

    yield
    del CONVERSIONS["halved"]


@pytest.mark.parametrize("kind", ["bare", "plain", "anchored"])
@pytest.mark.usefixtures("halved")
def test_a_conversion_leaves_the_original_and_is_done_again_when_a_network_is_rebuilt(kind):
    x = images()
    net = {"bare": network, "plain": lambda: kedge.Classifier(network()), "anchored": anchored}[kind]()
    before = net(x)
    changed = convert(net, "halved", by=2.0)
    assert torch.equal(net(x), before)
    assert not torch.allclose(changed(x), before)
    classifier = changed if isinstance(changed, kedge.Classifier) else kedge.Classifier(changed)
    described = describe(classifier)
    assert described["conversions"] == [{"name": "halved", "arguments": {"by": 2.0}}]
    assert described["spec"]["name"] == "compact"
    again = rebuild(described, classifier.state_dict(), None)
    torch.testing.assert_close(again(x), changed(x))
    torch.testing.assert_close(rebuild(describe(again), again.state_dict(), None)(x), changed(x))


def test_an_unknown_conversion_is_named():
    with pytest.raises(InputError, match=r"conversion must be one of .*; got 'nonesuch'"):
        convert(network(), "nonesuch")
