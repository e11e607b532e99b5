import copy
import json
import math
import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge import models
from kedge.errors import InputError
from kedge.models import Spec, build, model_names, read_features

SIZE = {"wrn": {"depth": 10, "width": 2}, "compact": {"width": 4}, "airbench": {"width": 4}}  # the smallest
SMALL = ("wrn", "resnet18-cifar", "resnet18", "resnet8", "compact", "airbench")  # every class and stem


def built(name: str, **arguments: int | float) -> models.Network:
    return build(name, **SIZE.get(name, {}), **arguments)


@cache
def settled(name: str) -> models.Network:
    """One network for all tests that only look at it."""
    return settle(built(name))


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def settle(net: nn.Module, seed: int = 0) -> nn.Module:
    """Give the batch norms statistics and weights of their own, so that a forward cannot pass without them."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.uniform_(0.5, 1.5, generator=generator)
            for tensor in (module.bias.data, module.running_mean):
                tensor.uniform_(-0.2, 0.2, generator=generator)
    return net.eval()


def test_parameter_counts_are_the_published_ones():
    published = {"wrn-40-2": 2_243_546, "wrn-16-2": 691_674, "resnet18": 11_689_512, "resnet34": 21_797_672}
    published |= {"resnet18-cifar": 11_173_962, "resnet34-cifar": 21_282_122, "resnet50-cifar": 23_520_842}
    published |= {"resnet50": 25_557_032, "resnet20": 269_722, "resnet56": 853_018}
    with torch.device("meta"):
        assert {name: parameters(build(name)) for name in published} == published
        assert parameters(build("wrn", depth=28, width=10)) == 36_479_194


def norm_relu(state: dict[str, Tensor], x: Tensor, at: str) -> Tensor:
    keys = ("running_mean", "running_var", "weight", "bias")
    return F.relu(F.batch_norm(x, *(state[f"{at}.{key}"] for key in keys)))


def naive_wrn(state: dict[str, Tensor], x: Tensor, depth: int) -> Tensor:
    x = F.conv2d(x, state["conv1.weight"], padding=1)
    for group in (1, 2, 3):
        for block in range((depth - 4) // 6):
            at = f"group{group}.{block}"
            stride = 2 if group > 1 and block == 0 else 1
            active = norm_relu(state, x, f"{at}.bn1")
            out = F.conv2d(active, state[f"{at}.conv1.weight"], stride=stride, padding=1)
            out = F.conv2d(norm_relu(state, out, f"{at}.bn2"), state[f"{at}.conv2.weight"], padding=1)
            if block == 0:
                x = F.conv2d(active, state[f"{at}.shortcut.weight"], stride=stride)
            x = x + out
    return F.linear(norm_relu(state, x, "bn").mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


def test_wrn_forward_is_that_of_the_definition():
    net = settle(build("wrn", depth=16, width=2)).double()
    x = torch.randn(3, 3, 20, 24, dtype=torch.float64)
    torch.testing.assert_close(net(x), naive_wrn(net.state_dict(), x, 16))
    narrow = build("wrn", depth=10, width=1).state_dict()  # its first group needs no shortcut
    assert [key for key in narrow if "shortcut" in key] == ["group2.0.shortcut.weight", "group3.0.shortcut.weight"]


def test_small_resnet_forward_is_that_of_the_definition(tmp_path):
    net = settle(build("resnet20")).double()
    state = net.state_dict()

    def norm(x: Tensor, at: str) -> Tensor:
        return F.batch_norm(x, *(state[f"{at}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")))

    images = torch.randn(3, 3, 32, 28, dtype=torch.float64)
    x = norm(F.conv2d(images, state["conv1.weight"], padding=1), "bn1").relu()
    for stage in (1, 2, 3):
        for block in range(3):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            out = norm(F.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1), f"{at}.bn1").relu()
            out = norm(F.conv2d(out, state[f"{at}.conv2.weight"], padding=1), f"{at}.bn2")
            if stride == 2:
                zeros = torch.zeros_like(x)[:, : x.shape[1] // 2, ::2, ::2]
                x = torch.cat([zeros, x[:, :, ::2, ::2], zeros], dim=1)
            x = (x + out).relu()
    torch.testing.assert_close(net(images), x.mean(dim=(2, 3)) @ state["fc.weight"].T + state["fc.bias"])
    public = {key.replace("fc.", "linear."): value for key, value in state.items() if "num_batches" not in key}
    torch.save(public, tmp_path / "public.pt")
    loaded = kedge.network("resnet20", weights=tmp_path / "public.pt").network
    assert all(torch.equal(value, state[key].float()) for key, value in loaded.state_dict().items() if key in public)
    with pytest.raises(InputError, match="depth must be one of 8, 20"):
        models.SmallResNet(10)


def test_compact_forward_is_that_of_the_definition():
    net = settle(build("compact", width=4, channels=1)).double()
    state = net.state_dict()

    def conv(x: Tensor, at: str) -> Tensor:
        return norm_relu(state, F.conv2d(x, state[f"{at}.0.weight"], padding=1), f"{at}.1")

    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    x = conv(images, "prep")
    for stage in ("stage1", "stage2", "stage3"):
        x = F.max_pool2d(conv(x, f"{stage}.0"), 2)
        if stage != "stage2":
            x = x + conv(conv(x, f"{stage}.2.conv1"), f"{stage}.2.conv2")
    pooled = x.flatten(2).max(dim=-1).values
    torch.testing.assert_close(net(images), pooled @ state["fc.weight"].T / 8 + state["fc.bias"])


def hugging_face_name(key: str) -> str:
    """Translate a key of transformers' ResNet into torchvision's."""
    key = key.replace("resnet.embedder.embedder.", "").replace("classifier.1.", "fc.")
    key = re.sub(r"^convolution", "conv1", re.sub(r"^normalization", "bn1", key))
    key = re.sub(r"resnet\.encoder\.stages\.(\d)\.layers\.", lambda m: f"layer{int(m[1]) + 1}.", key)
    key = key.replace("shortcut.convolution", "downsample.0").replace("shortcut.normalization", "downsample.1")
    key = re.sub(r"layer\.(\d)\.convolution", lambda m: f"conv{int(m[1]) + 1}", key)
    return re.sub(r"layer\.(\d)\.normalization", lambda m: f"bn{int(m[1]) + 1}", key)


@pytest.mark.parametrize(
    ("name", "layer", "depths", "widths"),
    [
        ("resnet18", "basic", [2, 2, 2, 2], [64, 128, 256, 512]),
        ("resnet50", "bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    ],
)
def test_resnet_forward_agrees_with_transformers(name, layer, depths, widths):
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        layer_type=layer, depths=depths, hidden_sizes=widths, embedding_size=64, num_labels=1000
    )
    theirs = settle(transformers.ResNetForImageClassification(config), seed=1)
    ours = copy.deepcopy(settled(name))
    ours.load_state_dict({hugging_face_name(key): value for key, value in theirs.state_dict().items()})
    x = torch.randn(2, 3, 70, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-4, rtol=1e-4)


def test_weights_are_drawn_by_fan_out_or_pass_the_input_on():
    weight = build("airbench", width=32).group1.conv1.weight.detach()  # 24 -> 32
    x = torch.randn(1, 24, 6, 6)
    assert F.conv2d(x, weight[:24], padding=1).allclose(x)
    for name, layer in (("wrn-16-2", "group3.1.conv2"), ("resnet18-cifar", "layer2.0.conv1")):
        weight = build(name).get_submodule(layer).weight
        expected = math.sqrt(2 / (weight.shape[0] * 9))
        assert weight.std().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 8])
def test_any_channels_and_size(name, channels):
    net = built(name, classes=7, channels=channels).eval()
    with torch.no_grad():
        for size in ((16, 16), (28, 28), (20, 33), *([(8, 8)] if name == "compact" else [])):
            assert net(torch.rand(2, channels, *size)).shape == (2, 7)


@pytest.mark.parametrize("name", SMALL)
def test_the_layers_run_from_a_convolution_to_a_linear_layer_and_gradients_reach_every_parameter(name):
    net, order = built(name), []
    for module in net.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, inputs, output: order.append(module))
    side = 64 if name == "resnet18" else 16  # what leaves the batch norms of the last stage more than one value
    net(torch.randn(2, 3, side, side)).square().sum().backward()
    assert isinstance(order[0], nn.Conv2d)
    assert order[0].in_channels == 3
    assert isinstance(order[-1], nn.Linear)
    trained = {key: p for key, p in net.named_parameters() if p.requires_grad}  # airbench's norms have no scale
    assert [key for key, p in trained.items() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_a_deep_copy_and_an_export_give_the_same_logits(name):
    net, x = settled(name), torch.randn(5, 3, 16, 16)
    other = copy.deepcopy(net).to(memory_format=torch.channels_last)
    results = [other(x.to(memory_format=torch.channels_last))]
    assert other.spec == net.spec
    if name in ("wrn", "resnet18-cifar", "compact"):
        shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
        results.append(torch.export.export(net, (torch.rand(2, 3, 16, 16),), dynamic_shapes=shapes).module()(x))
    for result in results:
        torch.testing.assert_close(result, net(x), atol=1e-4, rtol=1e-4)


def test_dropout_acts_only_in_training():
    net = build("wrn", depth=10, width=1, dropout=0.3)
    x = torch.randn(4, 3, 16, 16)
    assert not torch.equal(net(x), net(x))
    without = build("wrn", depth=10, width=1)  # in training mode
    for each in (net.eval(), without):
        assert torch.equal(each(x), each(x))


@pytest.mark.parametrize("name", model_names())
def test_spec_builds_the_same_architecture_again(name):
    with torch.device("meta"):
        for net in (built(name), built(name, classes=5, channels=1)):
            spec = Spec(**json.loads(json.dumps({"name": net.spec.name, "arguments": dict(net.spec.arguments)})))
            again = build(spec.name, **spec.arguments)
            assert spec == net.spec == again.spec
            assert {"classes", "channels"} <= set(spec.arguments)
            assert repr(again) == repr(net)
            shapes = {key: value.shape for key, value in net.state_dict().items()}
            assert {key: value.shape for key, value in again.state_dict().items()} == shapes


def test_spec_holds_every_argument():
    with torch.device("meta"):
        compact, small = build("compact", width=4, classes=3, dropout=0.5), models.ResNet(50, "cifar", dropout=0.2)
        assert compact.spec == Spec("compact", {"width": 4, "classes": 3, "channels": 3, "dropout": 0.5})
        assert small.spec == Spec("resnet50-cifar", {"classes": 10, "channels": 3, "dropout": 0.2})
        assert models.ResNet(50).spec == Spec("resnet50", {"classes": 1000, "channels": 3, "dropout": 0.0})
        given = {"depth": 16, "width": 2, "classes": 10, "channels": 3, "dropout": 0.3}
        assert build("wrn-16-2", dropout=0.3).spec.arguments == given
    assert (compact.dropout.p, small.dropout.p) == (0.5, 0.2)


def test_a_wrong_name_or_argument_is_named():
    for name, arguments, message in [
        ("vgg", {}, "name must be one of 'wrn', 'wrn-40-2'.*'compact', 'airbench'; got 'vgg'"),
        ("wrn", {}, "'wrn' also needs depth, width"),
        ("wrn-40-2", {"depth": 28}, "takes the arguments classes, channels, dropout; got depth"),
        ("wrn", {"depth": 18, "width": 2}, r"depth must be 6n \+ 4.*got 18, try 16 or 22"),
        ("wrn", {"depth": 4, "width": 2}, "depth .* at least 10"),
        ("wrn", {"depth": 16, "width": 0}, "width"),
        ("resnet18-cifar", {"classes": 1.5}, "classes"),
        *((name, {"classes": 1}, "classes") for name in model_names() if name != "wrn"),
        *((name, {"channels": 0}, "channels") for name in model_names() if name != "wrn"),
        *(("wrn-16-2", {"dropout": value}, r"dropout must .* \[0, 1\)") for value in (1.0, math.nan, "high")),
        *((name, {"dropout": -0.1}, "dropout") for name in model_names() if name != "wrn"),
    ]:
        with pytest.raises(InputError, match=message):
            build(name, **arguments)
    with pytest.raises(InputError, match="depth must be one of 18, 34, 50; got 20"):
        models.ResNet(20)
    with pytest.raises(InputError, match="stem must be one of 'cifar', 'imagenet'; got 'mnist'"):
        models.ResNet(18, "mnist")


def correlated(n=300, channels=3, side=10) -> Tensor:
    """Images whose neighbouring pixels and channels resemble each other."""
    images = torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(0))
    return images.cumsum(dim=2).cumsum(dim=3) / 5 + images[:, :1]


def patches(images: Tensor) -> Tensor:
    """Every patch of two by two pixels as a row, taken by a loop."""
    corners = [(i, j) for i in range(images.shape[2] - 1) for j in range(images.shape[3] - 1)]
    return torch.cat([images[:, :, i : i + 2, j : j + 2].flatten(1) for i, j in corners])


def test_the_first_layer_whitens_patches_and_has_every_filter_in_both_signs():
    net, images = build("airbench", width=4), correlated()
    net.prepare(images)
    weight = net.stem.weight.detach().flatten(1)
    assert weight.shape == (24, 12)
    assert weight[:12].equal(-weight[12:])
    values = patches(images) @ weight[:12].T
    second = values.T @ values / len(values)
    assert (second - torch.diag(second.diag())).abs().max() < 0.02  # uncorrelated
    assert second.diag().max() <= 1.01
    assert second.diag().min() > 0.9  # but for the ridge of unit variance
    again = build("airbench", width=4)
    again.load_state_dict(net.state_dict())
    again.prepare(10 * correlated(side=7))  # whitened already: it stays as it is
    assert again.stem.weight.equal(net.stem.weight)


def test_both_parts_of_an_anchored_first_layer_get_the_filters_and_the_means_of_gaussian_weights():
    net, anchored, gaussian = (build("airbench", width=4) for _ in range(3))
    anchored, gaussian = kedge.anchor(anchored), kedge.SVI.prepare(gaussian)
    for each in (net, anchored.network, gaussian):
        each.prepare(correlated())
    drawn = {name: weight for name, weight in anchored.network.stem.named_parameters() if name.endswith("weight")}
    assert torch.cat([weight.flatten(1) for weight in drawn.values()], dim=1).shape[1] == 2 * 12
    for weight in drawn.values():
        assert all(part.equal(net.stem.weight) for part in weight.split(3, dim=1))
    assert gaussian.eval().stem.weight.equal(net.stem.weight)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("wrn", 32, [(32, 32), (64, 16), (128, 8), (128,)]),
        ("resnet18-cifar", 16, [(64, 16), (128, 8), (256, 4), (512, 2), (512,)]),
        ("resnet18", 64, [(64, 16), (128, 8), (256, 4), (512, 2), (512,)]),
        ("resnet50", 64, [(256, 16), (512, 8), (1024, 4), (2048, 2), (2048,)]),
        ("compact", 32, [(8, 16), (16, 8), (32, 4), (32,)]),
    ],
)
def test_features_have_the_stages_shapes_and_give_the_logits(name, size, expected):
    net = settled(name)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        logits, features = read_features(net, x)
        # no tolerance: the logits are the linear layer's output, and reading changes nothing
        assert torch.equal(logits, net.fc(features["flatten"]))
        assert torch.equal(logits, net(x))
    assert tuple(features) == net.feature_layers
    shapes = [(2, wide, *side * 2) for wide, *side in expected]
    assert [tuple(feature.shape) for feature in features.values()] == shapes


@pytest.mark.parametrize("name", SMALL)
def test_every_layer_can_be_read(name):
    net = settled(name)
    every = [key for key, _ in net.named_modules() if key]
    with torch.no_grad():
        _, features = read_features(net, torch.rand(2, 3, 16, 16), every)
    assert list(features) == every


class Foreign(nn.Module):
    """A network as others write them: in-place activation, one layer used twice, one unused, one with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.twice = nn.Conv2d(4, 4, 1)
        self.spare = nn.Linear(4, 4)
        self.memory = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.act(self.norm(self.conv(x)))))
        x, _ = self.memory(x.flatten(2).mT)
        return self.head(x.mean(dim=1))


def test_a_foreign_network_is_read_by_name_in_the_order_asked_for():
    net, x = Foreign().eval(), torch.randn(2, 3, 8, 8)
    output, features = read_features(net, x, ["norm", "conv", "norm"])
    assert torch.equal(output, net(x))
    assert list(features) == ["norm", "conv"]
    assert torch.equal(features["conv"], net.conv(x))
    assert (features["norm"] < 0).any()  # kept as it was before the in-place activation
    assert torch.equal(features["norm"], net.norm(net.conv(x)))
    (gradient,) = torch.autograd.grad(output.sum(), features["conv"])
    assert gradient.any()
    assert read_features(net, x, [])[1] == {}


def test_layers_that_cannot_be_read_are_named_and_hooks_removed():
    net = Foreign()
    for layers, message in (
        (None, "Foreign has no feature_layers; try some of .*'conv', 'norm'"),
        (["convv"], r"Foreign has no layer 'convv'; did you mean \['conv'\]"),
        (["xyz"], "no layer 'xyz'; see net.named_modules"),
        ("conv", r"layers must be a sequence of names; got 'conv', pass \['conv'\]"),
        (["conv", "twice"], "layer 'twice' runs more than once in one forward"),
        (["conv", "spare"], r"layers \['spare'\] did not run"),
        (["memory"], "layer 'memory' returns tuple, not a tensor"),
    ):
        with pytest.raises(InputError, match=message):
            read_features(net, torch.rand(2, 3, 8, 8), layers)
    with pytest.raises(RuntimeError, match="channels"):
        read_features(net, torch.rand(2, 5, 8, 8), ["conv"])
    read_features(net, torch.rand(2, 3, 8, 8), ["conv"])
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("training", [True, False])
def test_reading_leaves_the_modes_alone(training):
    net = build("compact", width=4).train(training)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits, features = read_features(net, torch.rand(2, 3, 8, 8))
            assert torch.is_grad_enabled() == grad
        assert net.training == training
        assert {logits.requires_grad, *(f.requires_grad for f in features.values())} == {grad}
    with torch.inference_mode():
        assert read_features(net, torch.rand(2, 3, 8, 8))[0].is_inference()
