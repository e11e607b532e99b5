"""Features of named layers, on unanchored networks and averaged over anchors; heads; conversions."""

import copy

import pytest
import torch
from torch import nn

import kedge
from helpers import network
from kedge.anchoring.sampling import choose_per_image
from kedge.errors import ArchitectureError, InputError
from kedge.io.rebuild import describe, rebuild
from kedge.models import read_features
from kedge.models.conversion import CONVERSIONS, conversion, convert
from kedge.models.head import HeadOutput, check_head, head_name
from kedge.seeds import seeded

K, B = 3, 5


def unanchored() -> kedge.Classifier:
    return network(classes=3, dtype=torch.float64)


def anchored(per_image=None) -> kedge.Anchored:
    net = network("anchored", classes=3, dtype=torch.float64)
    with seeded(1):
        net.set_anchors(torch.rand(K if per_image is None else 12, 3, 8, 8).double(), per_image=per_image)
    return net


def images(n=B) -> torch.Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()


def test_the_input_of_a_layer_is_read_by_its_name_and_in():
    net, x = unanchored().network, images()
    output, features = read_features(net, x, ["flatten", "fc:in", "fc"])
    assert torch.equal(features["fc:in"], features["flatten"])
    assert torch.equal(features["fc"], output)
    assert torch.equal(output, net(x))
    with pytest.raises(InputError, match="no layer 'fcc'"):
        read_features(net, x, ["fcc:in"])


def test_features_of_a_classifier_are_of_normalised_images():
    net, x = unanchored(), images()
    logits, features = net.features(x, ["stage2"])
    inner, z = net.network, (x - 0.4) / 0.25
    torch.testing.assert_close(logits, inner(z))
    torch.testing.assert_close(features["stage2"], inner.stage2(inner.stage1(inner.prep(z))))
    assert net.features(x)[1] == {}


@pytest.mark.parametrize("per_image", [None, 4])
@pytest.mark.parametrize("rows", [None, 7, 1])  # how many rows fit into memory at a time
def test_features_of_an_anchored_network_are_means_over_its_anchors(per_image, rows):
    net, x, layers = anchored(per_image), images().requires_grad_(), ["stage1", "fc:in"]
    expected: dict[str, torch.Tensor] = {}
    for b in range(B):  # one image, one anchor at a time
        one, chosen = copy.deepcopy(net), net.anchors
        if per_image is not None:
            chosen = net.anchors[choose_per_image(x[b : b + 1], 12, per_image, net.options.seed)[:, 0]]
        for anchor in chosen:
            one.set_anchors(anchor[None])
            logits, features = one.features(x[b : b + 1], layers)
            for name, value in {"logits": logits, **features}.items():
                sums = expected.setdefault(name, torch.zeros(B, *value.shape[1:], dtype=torch.float64))
                sums[b] += value[0] / len(chosen)
    if rows is not None:
        net.features(x[:1])  # surveys how large an image's activations are
        net.memory_cap = rows * 3 * int(x[0].numel() * 8 * net._growth + 1)
    logits, features = net.features(x, layers)
    for value, name in ((logits, "logits"), (net(x), "logits"), *((features[name], name) for name in layers)):
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
    assert torch.autograd.grad(features["fc:in"].sum(), x)[0].any()


def test_a_perturbed_image_keeps_the_anchors_of_its_original():
    net, x = anchored(per_image=4), images()
    moved = x + 0.02
    logits = net.features(moved, like=x)[0]
    assert not torch.allclose(logits, net.features(moved)[0])  # its own pixels would choose other anchors
    for b in range(B):
        alone = copy.deepcopy(net)
        alone.set_anchors(net.anchors[choose_per_image(x[b : b + 1], 12, 4, net.options.seed)[:, 0]])
        torch.testing.assert_close(logits[b], alone(moved[b : b + 1])[0], rtol=1e-9, atol=1e-9)


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


def test_the_head_is_the_last_linear_layer_or_the_one_named():
    assert head_name(unanchored().network) == "fc"
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert (head_name(net), head_name(net, "1")) == ("3", "1")
    with pytest.raises(InputError, match=r"head must name a linear layer, one of \['1', '3'\]; got '2'"):
        head_name(net, "2")
    for method in (kedge.DUQ, kedge.UDG, kedge.ClassifierDiscrepancy):
        with pytest.raises(ArchitectureError, match="no linear layer"):
            method.prepare(nn.Sequential(nn.Flatten()))


def test_a_layer_that_does_not_give_the_logits_is_no_head():
    net = unanchored().network
    logits, features = read_features(net, images(), ["fc:in"])
    check_head(net, "fc", logits, features["fc:in"])
    for wrong in (2 * logits, logits[:, :2]):
        with pytest.raises(ArchitectureError, match="the logits are not the output of 'fc'"):
            check_head(net, "fc", wrong, features["fc:in"])


def test_a_head_may_give_more_than_logits():
    class TwoOutputs(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return HeadOutput(self.linear(x), (x,))

    net, x = unanchored(), images()
    logits, features = net.features(x, ["flatten"])
    net.network.fc = TwoOutputs(net.network.fc)
    assert torch.equal(net(x), logits)
    assert torch.equal(net(x, raw=True).extra[0], features["flatten"])


@pytest.fixture
def halved():
    @conversion("halved")
    def halve(network: nn.Module, *, by: float) -> nn.Module:
        network.fc.weight.data /= by
        network.fc = nn.Sequential(network.fc)  # other names in the state dict
        return network

    yield
    del CONVERSIONS["halved"]


@pytest.mark.parametrize("make", [lambda: unanchored().network, unanchored, anchored])
@pytest.mark.usefixtures("halved")
def test_a_conversion_leaves_the_original_and_is_repeated_when_a_network_is_rebuilt(make):
    net, x = make(), images()
    before = net(x)
    converted = convert(net, "halved", by=2.0)
    assert torch.equal(net(x), before)
    assert not torch.allclose(converted(x), before)
    classifier = converted if isinstance(converted, kedge.Classifier) else kedge.Classifier(converted)
    described = describe(classifier)
    assert described["conversions"] == [{"name": "halved", "arguments": {"by": 2.0}}]
    assert described["spec"]["name"] == "compact"
    again = rebuild(described, classifier.state_dict(), None)
    torch.testing.assert_close(again(x), converted(x))
    torch.testing.assert_close(rebuild(describe(again), again.state_dict(), None)(x), converted(x))
    with pytest.raises(InputError, match=r"conversion must be one of .*; got 'nonesuch'"):
        convert(net, "nonesuch")


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("method", [kedge.SVI, kedge.DUQ, kedge.UDG, kedge.ClassifierDiscrepancy])
def test_a_foreign_network_prepared_for_a_method_is_saved_and_rebuilt_from_model(method, kind, tmp_path):
    def foreign():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()

    net = method.prepare(foreign() if kind == "unanchored" else kedge.anchor(foreign()))
    detector = method(net).fit(images(20))
    with pytest.warns(kedge.errors.KedgeWarning, match="no graph"):
        detector.save(tmp_path / "x.kedge")
    assert kedge.load(tmp_path / "x.kedge", model=foreign()).score(images()).equal(detector.score(images()))
