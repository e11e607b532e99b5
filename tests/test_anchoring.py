"""Anchoring: any network, its first layer widened to [c, x - c], exactly and without stale caches.

The oracle of every hypothesis is `naive`: torch's own layer of twice the channels on the literal concatenation, in the
place of the stem, one anchor after the other. The paper's formulas on top of it are in test_paper_section3.py.
"""

import concurrent.futures
import copy
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kedge
from kedge.anchoring import AnchoringOptions
from kedge.anchoring.corruption import Corruption
from kedge.anchoring.per_image import choose_per_image
from kedge.anchoring.stem import Stem
from kedge.anchoring.tta import VIEWS, view
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.io.rebuild import describe, rebuild
from kedge.models import build
from kedge.seeds import seeded

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest logit
K, B, C = 3, 4, 5


# ---------------------------------------------------------------------------------------------------------------------
# The oracle.
# ---------------------------------------------------------------------------------------------------------------------


def wide_like(layer):
    """Build torch's own layer of the same geometry for twice the channels."""
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return nn.Linear(2 * layer.in_features, layer.out_features, bias=bias)
    return type(layer)(
        2 * layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        padding_mode=layer.padding_mode,
        bias=bias,
    )


class Literal(nn.Module):
    """A layer on the literal concatenation of anchor and residual."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.dim = -1 if isinstance(wide, nn.Linear) else 1
        self.anchor = None

    @property
    def weight(self):  # transformers' ViT reads its dtype
        return self.wide.weight

    def forward(self, x):
        c = self.anchor.expand_as(x)
        return self.wide(torch.cat([c, x - c], dim=self.dim))


def literal(net, module):
    """Put a `Literal` with the stem's weights into a copy of an anchored network; `module` is the original one."""
    original = module if isinstance(module, (nn.Linear, nn.Conv2d)) else module.get_submodule(net.layer)
    layer = Literal(wide_like(original)).to(net.stem.weight.dtype)
    layer.wide.load_state_dict(net.stem.state_dict())
    network = copy.deepcopy(net.network)
    network.set_submodule(net.layer, layer)
    return network, layer


def normalised(net, images):
    if net.mean.numel() == 1 and net.mean == 0 and net.std == 1:
        return images
    shape = (-1,) + (1,) * (images.ndim - 2)
    return (images - net.mean.view(shape)) / net.std.view(shape)


def logits(output):
    return getattr(output, "logits", output)


def naive(net, module, x, before=lambda c: c, anchors=None):
    """Give the hypotheses (K, B, C) one anchor at a time; `before` is what precedes the layer, applied to anchors."""
    network, layer = literal(net, module)
    network.eval()
    outputs = []
    for c in net.anchors if anchors is None else anchors:
        layer.anchor = before(normalised(net, c[None])).detach()
        outputs.append(logits(network(normalised(net, x).clone())))
    return torch.stack(outputs)


def assert_close(actual, expected, rel=None):
    rel = TOLERANCE[expected.dtype] if rel is None else rel
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= rel * expected.abs().max()


def differ(a, b):
    return (a - b).abs().max() > 1e-3 * b.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Networks and images.
# ---------------------------------------------------------------------------------------------------------------------


def generator(seed):
    return torch.Generator().manual_seed(seed)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def with_head(*layers, shape, dtype=torch.float32):
    """Follow layers by a nonlinearity and a linear head, for images of a shape (D, ...)."""
    body = nn.Sequential(*layers, nn.Tanh(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(body(torch.zeros(1, *shape)).shape[1], C)).to(dtype).eval()


def conv_net(channels=3, size=(7, 6), dtype=torch.float64):
    return with_head(nn.Conv2d(channels, 4, 3, padding=1), shape=(channels, *size), dtype=dtype)


IMAGE = (3, 7, 6)


def conv_pair(init="fresh", dtype=torch.float64, statistics=True, **options):
    """Return a small network, its anchored copy with anchors set, and images."""
    module = conv_net(dtype=dtype)
    normalisation = {"mean": MEAN, "std": STD} if statistics else {}
    net = kedge.anchor(module, init=init, **normalisation, **options)
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=dtype))
    return module, net, rand(B, *IMAGE, seed=2, dtype=dtype)


class PickyChannels(nn.Module):
    """Checks its channel count, as transformers' networks do, and reads the batch size off its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(24, C)

    def forward(self, x):
        if x.shape[1] != 3:
            raise ValueError(f"expected 3 channels, got {x.shape[1]}")
        return self.head(self.relu(self.conv(x)).reshape(x.size(0), -1))


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order in which it calls them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, C)
        self.second = nn.Conv2d(4, 4, 3)
        self.first = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).mean(dim=(2, 3)))


class Tokens(nn.Module):
    """Cuts an image into columns and embeds each with one Linear."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(21, 4)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        return self.head(self.embed(x.flatten(1, 2).transpose(1, 2)).tanh().mean(dim=1))


def hf_resnet(channels=3):
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 6, "hidden_sizes": [6, 8], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_channels=channels, num_labels=C, **sizes))


def hf_vit(channels=3):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(
        ViTConfig(num_channels=channels, image_size=12, patch_size=4, num_labels=C, **sizes)
    )


# name: (network, shape of an image, layer that must be found)
NETWORKS = {
    "sequential": (lambda: with_head(nn.Conv2d(3, 4, 3), shape=IMAGE), IMAGE, "0"),
    "mlp": (lambda: with_head(nn.Linear(9, 6), shape=(9,)), (9,), "0"),
    "mlp on flattened images": (lambda: with_head(nn.Flatten(), nn.Linear(126, 6), shape=IMAGE), IMAGE, "1"),
    "signals": (lambda: with_head(nn.Conv1d(2, 4, 5, stride=2), shape=(2, 17)), (2, 17), "0"),
    "volumes": (lambda: with_head(nn.Conv3d(1, 4, 3), shape=(1, 5, 6, 7)), (1, 5, 6, 7), "0"),
    "grey": (lambda: conv_net(1, dtype=torch.float32), (1, 7, 6), "0"),
    "multispectral": (lambda: conv_net(5, dtype=torch.float32), (5, 7, 6), "0"),
    "one linear layer": (lambda: nn.Linear(9, C), (9,), "0"),
    "channel count checked": (PickyChannels, IMAGE, "conv"),
    "tokens": (Tokens, IMAGE, "embed"),
    "kedge's compact": (lambda: build("compact", width=4, classes=C), (3, 8, 8), None),
    "kedge's wrn": (lambda: build("wrn", depth=10, width=1, classes=C), (3, 8, 8), None),
    "transformers ResNet": (hf_resnet, (3, 32, 32), "resnet.embedder.embedder.convolution"),
    "transformers ResNet, grey": (lambda: hf_resnet(1), (1, 32, 32), "resnet.embedder.embedder.convolution"),
    "transformers ViT": (hf_vit, (3, 12, 12), "vit.embeddings.patch_embeddings.projection"),
    "transformers ViT, multispectral": (
        lambda: hf_vit(5),
        (5, 12, 12),
        "vit.embeddings.patch_embeddings.projection",
    ),
}
BEFORE = {
    "mlp on flattened images": lambda c: c.flatten(1),
    "tokens": lambda c: c.flatten(1, 2).transpose(1, 2),
}


@pytest.fixture(params=NETWORKS)
def foreign(request):
    make, shape, layer = NETWORKS[request.param]
    module = make().double().eval()
    return SimpleNamespace(
        module=module, shape=shape, layer=layer, before=BEFORE.get(request.param, lambda c: c), name=request.param
    )


# ---------------------------------------------------------------------------------------------------------------------
# Every layer that can be widened.
# ---------------------------------------------------------------------------------------------------------------------

SIZES = {1: (13,), 2: (9, 8), 3: (7, 6, 5)}
RECTANGLES = {
    2: [((3, 5), {"padding": (1, 2)}), ((1, 4), {"stride": (1, 3)}), ((2, 3), {"dilation": (3, 2), "padding": (2, 0)})],
    3: [((3, 1, 2), {"padding": (1, 0, 1)}), ((2, 3, 1), {"stride": (2, 1, 1), "dilation": (1, 2, 1)})],
}


def layers():
    """Yield every supported layer, with the shape of an image for it."""
    yield pytest.param(lambda: nn.Linear(7, 6), (7,), id="Linear")
    yield pytest.param(lambda: nn.Linear(7, 6, bias=False), (7,), id="Linear without bias")
    yield pytest.param(lambda: nn.Linear(7, 6), (4, 7), id="Linear on tokens")
    for n, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        geometries = [
            (3, {}),
            (3, {"bias": False}),
            (1, {}),
            (3, {"stride": 2, "padding": 1}),
            (3, {"stride": 2, "padding": 2, "dilation": 2, "bias": False}),
            (2, {"padding": "valid"}),
            (3, {"padding": "same"}),
            (2, {"padding": "same", "dilation": 2}),
            (4, {"stride": 4}),  # a patch embedding
        ]
        for mode in ("reflect", "replicate", "circular"):
            geometries += [
                (3, {"padding": 2, "padding_mode": mode}),
                (2, {"padding": "same", "padding_mode": mode, "bias": False}),
                (3, {"stride": 2, "padding": 1, "dilation": 2, "padding_mode": mode}),
            ]
        geometries += RECTANGLES.get(n, [])
        for kernel, options in geometries:
            name = " ".join([f"{kind.__name__} {kernel}", *(f"{key}={value}" for key, value in options.items())])
            yield pytest.param(
                lambda kind=kind, kernel=kernel, options=options: kind(3, 4, kernel, **options), (3, *SIZES[n]), id=name
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize(("layer", "shape"), list(layers()))
class TestEveryLayer:
    def anchored(self, layer, shape, dtype, init):
        module = with_head(layer(), shape=shape, dtype=dtype)
        net = kedge.anchor(module, init=init)
        net.set_anchors(rand(K, *shape, seed=1, dtype=dtype))
        return module, net, rand(B, *shape, seed=2, dtype=dtype)

    @torch.no_grad()
    def test_preserve_keeps_the_function_exactly_through_the_shared_stem(self, layer, shape, dtype):
        module, net, x = self.anchored(layer, shape, dtype, "preserve")
        folded = x.repeat(K, *(1,) * len(shape))
        assert torch.equal(net.per_anchor_logits(x), module(folded).view(K, B, C))

    @torch.no_grad()
    def test_preserve_keeps_the_function_to_rounding_through_concatenation(self, layer, shape, dtype):
        module, net, x = self.anchored(layer, shape, dtype, "preserve")
        assert_close(naive(net, module, x), module(x).expand(K, B, C))
        assert_close(net.train()(x), module(x))

    @torch.no_grad()
    def test_the_hypotheses_are_those_of_the_concatenation(self, layer, shape, dtype):
        module, net, x = self.anchored(layer, shape, dtype, "fresh")
        expected = naive(net, module, x)
        assert_close(net.per_anchor_logits(x), expected)
        assert_close(net(x), expected.mean(dim=0))
        assert differ(expected[0], expected[1])


# ---------------------------------------------------------------------------------------------------------------------
# Networks nobody here wrote.
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_example", [True, False], ids=["with example", "without example"])
def test_a_foreign_network_is_anchored_unchanged(foreign, with_example):
    example = rand(2, *foreign.shape, seed=3, dtype=torch.float64) if with_example else None
    net = kedge.anchor(foreign.module, init="fresh", example=example)
    net.set_anchors(rand(K, *foreign.shape, seed=1, dtype=torch.float64))
    x = rand(B, *foreign.shape, seed=2, dtype=torch.float64)
    if foreign.layer is not None:
        assert net.layer == foreign.layer
    expected = naive(net, foreign.module, x, foreign.before)
    assert_close(net.per_anchor_logits(x), expected)
    assert_close(net(x), expected.mean(dim=0))


def test_a_foreign_network_keeps_its_function_under_preserve(foreign):
    net = kedge.anchor(foreign.module, example=rand(1, *foreign.shape, dtype=torch.float64))
    net.set_anchors(rand(K, *foreign.shape, seed=1, dtype=torch.float64))
    x = rand(B, *foreign.shape, seed=2, dtype=torch.float64)
    with torch.no_grad():
        folded = logits(foreign.module(x.repeat(K, *(1,) * len(foreign.shape))))
        assert torch.equal(net.per_anchor_logits(x), folded.view(K, B, C))


def test_a_foreign_network_trains_on_the_literal_pairs(foreign):
    net = kedge.anchor(foreign.module, init="fresh", corruption=None)
    x = rand(B, *foreign.shape, seed=2, dtype=torch.float64)
    network, layer = literal(net, foreign.module)
    actual = net.train()(x)
    layer.anchor = foreign.before(x[net.draw.permutation])
    expected = logits(network.train()(x))
    assert_close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    assert_close(net.stem.weight.grad, layer.wide.weight.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_network_works_in_any_gradient_mode(foreign, mode):
    net = kedge.anchor(foreign.module, init="fresh")
    x = rand(B, *foreign.shape, seed=2, dtype=torch.float64)
    with mode():
        net.set_anchors(rand(K, *foreign.shape, seed=1, dtype=torch.float64))
        first = net.per_anchor_logits(x)
        again = net.per_anchor_logits(x)
    assert first.requires_grad == (mode is torch.enable_grad)
    assert first.is_inference() == (mode is torch.inference_mode)
    assert_close(again, naive(net, foreign.module, x, foreign.before))
    net.per_anchor_logits(x).sum().backward()  # whatever mode came before, gradients can follow
    assert net.stem.weight.grad.isfinite().all()


def normalising(*before):
    return nn.Sequential(*before, *conv_net().float())


@pytest.mark.parametrize("with_example", [True, False], ids=["with example", "without example"])
@pytest.mark.parametrize(
    "before",
    [
        [nn.BatchNorm2d(3)],
        [nn.BatchNorm2d(3, affine=False), nn.ReLU(inplace=True)],
        [nn.InstanceNorm2d(3, affine=True), nn.PReLU()],
        [nn.GroupNorm(3, 3)],
        [nn.LayerNorm(6), nn.Dropout(0.0)],
        [nn.Upsample(scale_factor=2), nn.AvgPool2d(2)],
        [nn.ReflectionPad2d(2), nn.Identity(), nn.MaxPool2d(3, 1), nn.AvgPool2d(3, 1)],
    ],
    ids=lambda layers: " ".join(type(layer).__name__ for layer in layers),
)
def test_anchors_pass_through_what_precedes_the_stem(before, with_example):
    module = normalising(*copy.deepcopy(before)).double().eval()
    if isinstance(module[0], nn.BatchNorm2d):
        module[0].running_mean.copy_(torch.tensor(MEAN))
        module[0].running_var.copy_(torch.tensor(STD))
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", example=x if with_example else None, mean=0.1)
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    assert net.layer == str(len(before))
    prefix = module[: len(before)]
    assert_close(net.per_anchor_logits(x), naive(net, module, x, lambda c: prefix(c.clone())))
    with torch.no_grad():
        assert_close(net.per_anchor_logits(x), naive(net, module, x, lambda c: prefix(c.clone())))


def test_anchors_pass_through_deep_layers_too_where_the_user_says_so():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, C))
    module = module.double().eval()
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", layer="2")
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    assert_close(net.per_anchor_logits(x), naive(net, module, x, module[:2]))


class ShiftsInPlace(nn.Module):
    """Centres its input in place, without asking."""

    def __init__(self):
        super().__init__()
        self.body = conv_net()

    def forward(self, x):
        return self.body(x.sub_(0.5))


def test_a_network_that_writes_into_its_input_spoils_neither_anchors_nor_images():
    module, x = ShiftsInPlace(), rand(B, *IMAGE, seed=2, dtype=torch.float64)
    example, anchors = x.clone(), rand(K, *IMAGE, seed=1, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", example=example).eval()
    net.set_anchors(anchors)
    with torch.no_grad():
        for _ in range(2):
            assert_close(net.per_anchor_logits(x), naive(net, module, x, lambda c: c - 0.5))
    assert torch.equal(net.anchors, anchors)
    assert torch.equal(x, example)
    assert torch.equal(x, rand(B, *IMAGE, seed=2, dtype=torch.float64))


def test_the_original_keeps_its_layers_weights_and_modes():
    module = conv_net()
    module[1].train()
    before = copy.deepcopy(module.state_dict())
    net = kedge.anchor(module, init="fresh", example=rand(1, *IMAGE, dtype=torch.float64))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert isinstance(module[0], nn.Conv2d)
    assert [m.training for m in module.modules()] == [False, False, True, False, False]
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.requires_grad for p in module.parameters())


def test_the_anchored_copy_keeps_the_modes_of_single_modules():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(80, C)).train()
    module[1].eval()  # frozen statistics in training
    net = kedge.anchor(module)
    assert net.training
    assert [m.training for m in net.network] == [True, False, True, True, True]
    module.eval()[2].train()  # dropout at test time
    net = kedge.anchor(module)
    assert not net.training
    assert [m.training for m in net.network] == [False, False, True, False, False]
    for training in (True, False):
        assert set(training_modes(kedge.anchor(nn.Linear(9, C).train(training)))) == {training}


def test_a_classifier_hands_on_its_statistics():
    x = rand(B, *IMAGE, dtype=torch.float64)
    plain = kedge.Classifier(conv_net(), mean=MEAN, std=STD).eval()
    net = kedge.anchor(plain)
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    assert_close(net(x), plain(x))
    assert kedge.anchor(plain, mean=0.5, std=0.5).mean.tolist() == [0.5]


def test_fresh_weights_are_those_that_torch_draws_for_the_wide_layer():
    for seed in (0, 7):
        module = conv_net(dtype=torch.float32)
        state = torch.get_rng_state()
        net = kedge.anchor(module, init="fresh", seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        with seeded(seed):
            wide = wide_like(module[0])
        assert torch.equal(net.stem.weight, wide.weight)
        assert torch.equal(net.stem.bias, wide.bias)


def test_the_stem_shows_the_layer_it_stands_for():
    _, net, _ = conv_pair()
    assert "anchored Conv2d(3, 4, kernel_size=(3, 3)" in repr(net)


# ---------------------------------------------------------------------------------------------------------------------
# Which layer is the first.
# ---------------------------------------------------------------------------------------------------------------------


def test_the_first_layer_is_found_by_running_the_example():
    module, x = Backwards().double().eval(), rand(B, *IMAGE, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", example=x)
    assert net.layer == "first"
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    assert_close(net.per_anchor_logits(x), naive(net, module, x))


def test_the_example_may_be_bytes():
    example = torch.randint(0, 256, (1, *IMAGE), dtype=torch.uint8)
    assert kedge.anchor(Backwards(), example=example, mean=MEAN, std=STD).layer == "first"


def test_the_first_layer_can_be_named():
    x = rand(B, *IMAGE)
    for example in (None, x):
        net = kedge.anchor(Backwards(), layer="first", example=example)
        assert net.layer == "first"
        assert net.train()(x).shape == (B, C)


def test_without_an_example_a_wrong_guess_is_told_at_the_first_forward():
    net = kedge.anchor(Backwards())
    assert net.layer == "head"
    net.set_anchors(rand(K, *IMAGE))
    told = r"'head' was taken for the first.*'first' reads the input before it; pass example=.*or layer="
    for call in (net.train(), net.eval(), net.per_anchor_logits):
        with pytest.raises(ArchitectureError, match=told):
            call(rand(B, *IMAGE))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_that_check_does_not_need_gradients_to_be_on(mode):
    for make in (TwoReaders, Skip):
        net = kedge.anchor(make().eval())
        net.set_anchors(rand(K, *IMAGE))
        with mode(), pytest.raises(ArchitectureError, match="layer="):
            net(rand(B, *IMAGE))


def test_the_check_at_the_first_forward_leaves_no_trace():
    module = nn.Sequential(nn.BatchNorm2d(3), *conv_net().float()).train()
    net = kedge.anchor(module, corruption=None)
    x = rand(B, *IMAGE)
    net(x)
    once = nn.BatchNorm2d(3)
    once(x)
    assert torch.equal(net.network[0].running_mean, once.running_mean)
    assert all(p.requires_grad for p in net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


class Twice(nn.Module):
    """Calls its first layer on the image and on its mirror."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        return self.head((self.conv(x) + self.conv(x.flip(-1))).mean(dim=(2, 3)))


class Tied(nn.Module):
    """Decodes with the weights of its first layer."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x).tanh())


class SameTwice(nn.Module):
    """Registers one layer under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = self.a

    def forward(self, x):
        return self.a(x)


class TwoReaders(nn.Module):
    """Reads the image with two branches."""

    def __init__(self):
        super().__init__()
        self.fine = nn.Conv2d(3, 4, 3, padding=1)
        self.coarse = nn.Conv2d(3, 4, 5, padding=2)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        return self.head((self.fine(x).tanh() + self.coarse(x)).mean(dim=(2, 3)))


class Skip(nn.Module):
    """Adds the mean of the image to the logits, around every layer."""

    def __init__(self):
        super().__init__()
        self.body = conv_net().float()

    def forward(self, x):
        return self.body(x) + x.mean(dim=(1, 2, 3))[:, None]


class SkipIntoHead(nn.Module):
    """Lets the head read the image beside the features."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(7, C)

    def forward(self, x):
        return self.head(torch.cat([self.conv(x).mean(dim=(2, 3)), x.mean(dim=(2, 3))], dim=1))


class WithForward(nn.Conv2d):
    """Standardises its weight, so it is not the layer it inherits from."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class WithConvForward(nn.Conv2d):
    """Overrides the inner method instead."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Merges(nn.Module):
    """Embeds every column of every image as a row of one large batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(21, 4)
        self.head = nn.Linear(24, C)

    def forward(self, x):
        return self.head(self.embed(x.flatten(1, 2).transpose(1, 2).reshape(-1, 21)).view(len(x), -1))


class HeldInAList(nn.Module):
    """Calls its layers through a list that replacing the registered module does not change."""

    def __init__(self):
        super().__init__()
        self.body = conv_net().float()
        self.calls = list(self.body)

    def forward(self, x):
        for layer in self.calls:
            x = layer(x)
        return x


def in_front(layer):
    """Put a layer in front of a small network for IMAGE."""
    return with_head(layer, shape=IMAGE)


VECTOR = (6,)
# name: (network, shape, what the error says). With an example `anchor` raises it, without one the first forward at the
# latest; those of AT_FORWARD show in a forward pass alone.
AT_FORWARD = {"batch dimension changed", "held in a list"}
REFUSED = {
    "groups": (lambda: in_front(nn.Conv2d(3, 6, 3, groups=3)), IMAGE, r"'0'.*groups=3.*use groups=1.*layer="),
    "called twice": (Twice, IMAGE, r"'conv' is called 2 times.*shared stem.*separate layers"),
    "tied weights": (Tied, VECTOR, r"'encode' shares its weights with 'decode'.*separate weights"),
    "one layer, two names": (SameTwice, VECTOR, r"'a' shares its weights with 'b'"),
    "weight_norm": (
        lambda: in_front(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))),
        IMAGE,
        r"'0'.*weight_norm.*remove_parametrizations",
    ),
    "spectral_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, C))),
        VECTOR,
        r"'0'.*remove_parametrizations",
    ),
    "pruned": (lambda: pruned(), VECTOR, r"copy.*computes its weight from other parameters.*pruning.*permanent first"),
    "forward of its own": (lambda: in_front(WithForward(3, 4, 3)), IMAGE, r"'0'.*WithForward.*plain Conv2d.*layer="),
    "inner forward of its own": (lambda: in_front(WithConvForward(3, 4, 3)), IMAGE, r"WithConvForward.*plain Conv2d"),
    "two readers": (
        TwoReaders,
        IMAGE,
        r"several layers read the input: 'fine', 'coarse'.*layer='fine'.*one convolution in front",
    ),
    "skip to the logits": (Skip, IMAGE, r"around the layer 'body.0'.*skip.*layer='body.0'"),
    "skip into the head": (SkipIntoHead, IMAGE, r"several layers read the input: 'conv', 'head'"),
    "no layer": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), IMAGE, "no Conv1d, Conv2d, Conv3d or Linear"),
    "another kind first": (
        lambda: in_front(nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Conv2d(4, 4, 3))),
        IMAGE,
        r"'0.0'.*(ConvTranspose2d|reads the input before it).*layer=",
    ),
    "batch dimension changed": (Merges, IMAGE, r"one row per image.*6 rows for 1 images.*layer="),
    "held in a list": (HeldInAList, IMAGE, r"'body.0' was not called.*layer="),
}


def pruned():
    import torch.nn.utils.prune

    layer = nn.Linear(6, C)
    torch.nn.utils.prune.random_unstructured(layer, "weight", amount=0.5)
    return nn.Sequential(layer)


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("with_example", [True, False], ids=["with example", "without example"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_cannot_be_anchored_gets_an_error_that_says_what_to_do(name, with_example, mode):
    make, shape, told = REFUSED[name]

    def use():
        net = kedge.anchor(make(), example=rand(1, *shape) if with_example else None)
        assert name in AT_FORWARD or not with_example
        net.set_anchors(rand(K, *shape, seed=1))
        net.train(mode == "training")(rand(B, *shape))

    with pytest.raises(ArchitectureError, match=told):
        use()


@pytest.mark.parametrize(
    ("make", "layer", "told"),
    [
        (lambda: in_front(nn.Conv2d(3, 6, 3, groups=3)), "0", "groups=3"),
        (Twice, "conv", "called 2 times"),
        (Tied, "encode", "shares its weights with 'decode'"),
        (Backwards, "first.weight", "layer must name a layer of the network, such as .'head', 'second', 'first'."),
        (
            Backwards,
            "frist",
            "layer must name a layer of the network, such as .'head', 'second', 'first'.; got 'frist'",
        ),
        (lambda: in_front(nn.Conv2d(3, 6, 3)), "1", r"'1' is a Tanh; kedge widens Conv1d, Conv2d, Conv3d and Linear"),
        (HeldInAList, "body.0", "was not called"),
    ],
)
def test_a_layer_named_by_the_user_is_checked_too(make, layer, told):
    def use():
        net = kedge.anchor(make(), layer=layer)
        net.train()(rand(B, *IMAGE))

    with pytest.raises((ArchitectureError, InputError), match=told):
        use()


def test_a_layer_that_is_not_called_is_told_with_an_example_at_once():
    module = Backwards()
    module.spare = nn.Conv2d(3, 4, 3)
    with pytest.raises(ArchitectureError, match="'spare' was not called"):
        kedge.anchor(module, layer="spare", example=rand(1, *IMAGE))


def test_of_two_readers_one_can_be_chosen_and_the_other_sees_the_image_alone():
    module, x = TwoReaders().double().eval(), rand(B, *IMAGE, seed=2, dtype=torch.float64)
    for layer in ("fine", "coarse"):
        net = kedge.anchor(module, init="fresh", layer=layer)
        net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
        assert_close(net.per_anchor_logits(x), naive(net, module, x))


def test_a_skip_connection_can_be_accepted():
    module, x = Skip().double().eval(), rand(B, *IMAGE, seed=2, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", layer="body.0")
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    assert_close(net.per_anchor_logits(x), naive(net, module, x))


@pytest.mark.filterwarnings("ignore:.*torch.ao:DeprecationWarning", "ignore:.*quantized:UserWarning")
class TestQuantised:
    told = r"'0'.*quantise.*anchor the float network and quantise afterwards"

    def test_a_statically_quantised_stem_is_refused(self):
        first = torch.ao.nn.quantized.Conv2d(3, 4, 3)
        with pytest.raises(ArchitectureError, match=self.told):
            kedge.anchor(nn.Sequential(first, nn.Flatten(), nn.Linear(80, C)))

    def test_a_dynamically_quantised_stem_is_refused(self):
        module = nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(6, 6), nn.ReLU(), nn.Linear(6, C))
        with pytest.raises(ArchitectureError, match=self.told):
            kedge.anchor(module)
        with pytest.raises(ArchitectureError, match=self.told):
            kedge.anchor(module, layer="0")
        if torch.backends.quantized.engine != "none":
            with pytest.raises(ArchitectureError, match=self.told):
                kedge.anchor(module, example=rand(1, 6))

    def test_a_quantised_head_is_none_of_anchoring_s_business(self):
        if torch.backends.quantized.engine == "none":
            pytest.skip("no quantised kernels on this machine")
        module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), torch.ao.nn.quantized.dynamic.Linear(6, C)).eval()
        net = kedge.anchor(module, example=rand(1, 6))
        net.set_anchors(rand(K, 6, seed=1))
        with torch.no_grad():
            assert torch.equal(net.per_anchor_logits(rand(B, 6)).flatten(0, 1), module(rand(B, 6).repeat(K, 1)))


def test_a_lazy_layer_needs_weights_first():
    module = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(C))
    with pytest.raises(ArchitectureError, match=r"'0'.*lazy.*run one batch"):
        kedge.anchor(copy.deepcopy(module))
    assert kedge.anchor(module, example=rand(1, *IMAGE)).layer == "0"  # the example was that batch


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"init": "zero"}, "init must be one of 'preserve', 'fresh'; got 'zero'"),
        ({"corruption": "strong"}, "corruption must be one of 'default'; got 'strong'"),
        ({"corruption": 3}, "corruption must be 'default', a function or None; got 3"),
        ({"every": 0}, "every must be a whole number of at least 1; got 0"),
        ({"mask": 1.5}, "mask must lie in .0, 1.; got 1.5"),
        ({"mask_target": "zero"}, "mask_target must be one of 'label', 'uniform'"),
        ({"mask_target": "uniform"}, "mask_target must come with mask, .* got 'uniform' alone"),
        ({"mean": [0.1, 0.2], "std": [0.1, 0.2, 0.3]}, "one value or one per channel"),
    ],
)
def test_arguments_that_make_no_sense_are_an_error(arguments, told):
    with pytest.raises(InputError, match=told):
        kedge.anchor(conv_net(), **arguments)


def test_only_networks_and_only_once():
    with pytest.raises(InputError, match=r"net must be a torch.nn.Module, got str"):
        kedge.anchor("resnet")
    with pytest.raises(InputError, match="anchored already"):
        kedge.anchor(kedge.anchor(conv_net()))


# ---------------------------------------------------------------------------------------------------------------------
# Caches are never stale.
# ---------------------------------------------------------------------------------------------------------------------


def cached_pair():
    """Return a network with a batch norm before its stem, and its anchored copy."""
    module = nn.Sequential(nn.BatchNorm2d(3), *conv_net()).double().eval()
    net = kedge.anchor(module, init="fresh", mean=MEAN, std=STD, seed=1)
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    return module, net


def step(net):
    """Take a training step in evaluation mode."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with torch.inference_mode(False), torch.enable_grad():
        F.cross_entropy(net(rand(B, *IMAGE, dtype=torch.float64)), torch.arange(B)).backward()
        optimizer.step()


def load_other(net):
    other = cached_pair()[1]
    with torch.no_grad():
        for value in (*other.parameters(), other.anchors, other.mean):
            value.mul_(0.8).add_(0.05)
    net.load_state_dict(other.state_dict())


@torch.no_grad()
def in_place(net):
    net.stem.weight[:, :3] *= 1.5


@torch.no_grad()
def replaced(net):
    net.stem.weight = nn.Parameter(net.stem.weight.flip(0))


CHANGES = {
    "weights in place": in_place,
    "weights through .data": lambda net: net.stem.weight.data[:, 0].add_(0.3),
    "another weight": replaced,
    "bias through .data": lambda net: net.stem.bias.data.add_(0.3),
    "an optimizer's step": step,
    "a training batch": lambda net: net.train()(rand(B, *IMAGE, seed=5, dtype=torch.float64)) is net.eval(),
    "load_state_dict": load_other,
    "float": lambda net: net.float(),
    "channels last": lambda net: net.to(memory_format=torch.channels_last),
    "set_anchors": lambda net: net.set_anchors(rand(K, *IMAGE, seed=8, dtype=torch.float64)),
    "set_anchors, another number": lambda net: net.set_anchors(rand(K + 2, *IMAGE, seed=8, dtype=torch.float64)),
    "anchors in place": lambda net: net.anchors.mul_(0.5),
    "running mean before the stem": lambda net: net.network[0].running_mean.add_(0.4),
    "running variance before the stem": lambda net: net.network[0].running_var.mul_(3),
    "weights before the stem": lambda net: net.network[0].weight.data.mul_(2),
    "set_statistics": lambda net: net.set_statistics(0.3, 0.4),
    "mean in place": lambda net: net.mean.add_(0.2),
    "std in place": lambda net: net.std.mul_(2),
    "a layer after the stem": lambda net: net.network[-1].weight.data.mul_(2),
}
SAME_FUNCTION = {"float", "channels last"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("change", CHANGES)
def test_the_hypotheses_follow_every_change(change, mode):
    module, net = cached_pair()
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    with mode():
        before = net.per_anchor_logits(x)
        assert_close(before, naive(net, module, x, net.network[0]))
    CHANGES[change](net)
    x = x.to(net.mean)
    with mode():
        for _ in range(2):  # made anew, and from the cache
            after = net.per_anchor_logits(x)
            assert_close(after, naive(net, module, x, net.network[0]))
    assert change in SAME_FUNCTION or after.shape != before.shape or differ(after, before)


def test_the_caches_follow_changes_one_after_the_other():
    module, net = cached_pair()
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    with torch.no_grad():
        for change in [name for name in CHANGES if name != "float"]:
            with torch.enable_grad():
                CHANGES[change](net)
            assert_close(net.per_anchor_logits(x), naive(net, module, x, net.network[0]))


def test_maps_made_under_autocast_do_not_outlive_it():
    module, net, x = conv_pair(dtype=torch.float32)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            low = net.per_anchor_logits(x)
        assert_close(net.per_anchor_logits(x), naive(net, module, x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(net.per_anchor_logits(x), low)
    assert_close(low.float(), naive(net, module, x), rel=0.05)


def test_gradients_reach_the_stem_in_evaluation_mode():
    module, net, x = conv_pair()
    with torch.no_grad():
        net.per_anchor_logits(x)  # a cache without gradients must not be used
    y = torch.arange(B)
    network, layer = literal(net, module)
    F.cross_entropy(net(x), y).backward()
    outputs = []
    for c in net.anchors:
        layer.anchor = normalised(net, c[None])
        outputs.append(network(normalised(net, x)))
    F.cross_entropy(torch.stack(outputs).mean(dim=0), y).backward()
    assert_close(net.stem.weight.grad, layer.wide.weight.grad)
    assert_close(net.stem.bias.grad, layer.wide.bias.grad)
    assert_close(net.network[-1].weight.grad, network[-1].weight.grad)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("per_image", [None, 2])
def test_gradients_reach_the_images(frozen, per_image):
    module, net, x = conv_pair()
    net.set_anchors(net.anchors, per_image=per_image)
    net.stem.requires_grad_(not frozen)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x)[:, 0].sum(), x)
    expected = naive(net, module, x)  # (K, B, C)
    if per_image is None:
        mean = expected.mean(dim=0)
    else:
        chosen = choose_per_image(x.detach(), K, per_image, 0)
        mean = expected[chosen, torch.arange(B)].mean(dim=0)
    assert_close(gradient, torch.autograd.grad(mean[:, 0].sum(), x)[0])


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_reach_what_precedes_the_stem_through_the_anchors_too(frozen):
    module, net = cached_pair()
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    network, layer = literal(net, module)
    net.stem.requires_grad_(not frozen)
    net(x)[:, 0].sum().backward()
    outputs = []
    for c in net.anchors:
        layer.anchor = network[0](normalised(net, c[None]))
        outputs.append(network(normalised(net, x)))
    torch.stack(outputs).mean(dim=0)[:, 0].sum().backward()
    assert_close(net.network[0].weight.grad, network[0].weight.grad)
    assert_close(net.network[0].bias.grad, network[0].bias.grad, rel=1e-8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_deep_copy_after_evaluation_is_independent(mode):
    module, net, x = conv_pair()
    with mode():
        before = net.per_anchor_logits(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net.stem.weight.mul_(2)
        net.anchors.mul_(0.5)
    net.set_statistics(0.1, 0.1)
    with mode():
        assert torch.equal(twin.per_anchor_logits(x), before)
        assert_close(net.per_anchor_logits(x), naive(net, module, x))


def test_a_state_dict_brings_anchors_choice_and_batch_number_along():
    module, net, x = conv_pair(corruption=None)
    net.set_anchors(rand(7, *IMAGE, seed=4, dtype=torch.float64), per_image=2)
    for _ in range(3):
        net.train()(x)
    fresh = kedge.anchor(module)
    assert fresh.anchors is None
    fresh.load_state_dict(net.state_dict())
    assert fresh.batches_seen == 3
    assert fresh.per_image == 2
    assert torch.equal(fresh.anchors, net.anchors)
    assert fresh.has_statistics
    assert torch.equal(fresh.per_anchor_logits(x), net.per_anchor_logits(x))
    assert fresh.per_anchor_logits(x).shape == (2, B, C)


def test_a_state_dict_without_anchors_can_be_loaded():
    module, x = conv_net(), rand(B, *IMAGE, dtype=torch.float64)
    saved, fresh = kedge.anchor(module, init="fresh"), kedge.anchor(module)
    fresh.load_state_dict(saved.state_dict())
    assert fresh.anchors is None
    assert fresh.per_image is None
    assert not fresh.has_statistics
    fresh.set_anchors(rand(K, *IMAGE, dtype=torch.float64))
    assert_close(fresh.per_anchor_logits(x), naive(fresh, module, x))


def test_a_state_dict_may_bring_another_number_of_anchors():
    module, net, x = conv_pair()
    other = copy.deepcopy(net)
    other.set_anchors(rand(K + 3, *IMAGE, seed=9, dtype=torch.float64))
    net.load_state_dict(other.state_dict())
    assert net.per_anchor_logits(x).shape == (K + 3, B, C)
    assert_close(net.per_anchor_logits(x), naive(other, module, x))


def test_a_detector_can_tell_that_the_anchors_changed():
    _, net, _ = conv_pair()
    before = net.anchors_version
    net.set_anchors(net.anchors)
    assert net.anchors_version > before
    before = net.anchors_version
    net.load_state_dict(net.state_dict())
    assert net.anchors_version > before


# ---------------------------------------------------------------------------------------------------------------------
# The cost: the image's part once per image, the anchors' part once, and no more memory than allowed.
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def affine_rows(monkeypatch):
    """Record the batch size of every application of the stem's layer."""
    rows, plain = [], Stem.affine
    monkeypatch.setattr(Stem, "affine", lambda self, x, *args: rows.append(len(x)) or plain(self, x, *args))
    return rows


def passes(net):
    """Record the rows of every pass through the layer after the stem."""
    rows = []
    net.network[1].register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    return rows


def largest_activation(net, x):
    """Measure the bytes of the largest output of any layer for one image."""
    sizes, hooks = [], []
    for module in net.network:
        hooks.append(module.register_forward_hook(lambda _m, _i, out: sizes.append(out[0].numel() * out.itemsize)))
    net.per_anchor_logits(x)
    for hook in hooks:
        hook.remove()
    return max(sizes)


@torch.no_grad()
def test_the_anchors_part_is_computed_once_and_the_image_s_part_once_per_image(affine_rows):
    _, net, x = conv_pair()
    net.per_anchor_logits(x[:1])  # the first forward looks the network over
    net.set_anchors(rand(K, *IMAGE, seed=6, dtype=torch.float64))
    affine_rows.clear()
    net.per_anchor_logits(x)
    assert sorted(affine_rows) == sorted([K, B])
    affine_rows.clear()
    for _ in range(3):
        net.per_anchor_logits(x)
    assert affine_rows == [B, B, B]


def test_a_frozen_network_uses_its_cache_whether_gradients_are_on_or_not(affine_rows):
    _, net, x = conv_pair()
    net.requires_grad_(False)
    net.per_anchor_logits(x)
    affine_rows.clear()
    net.per_anchor_logits(x)
    with torch.no_grad():
        net.per_anchor_logits(x)
    assert affine_rows == [B, B]


@torch.no_grad()
def test_that_holds_under_a_memory_cap_too(affine_rows):
    _, net, x = conv_pair()
    net.per_anchor_logits(x)
    net.memory_cap = 1
    affine_rows.clear()
    net.per_anchor_logits(x)
    assert affine_rows == [1] * B


@torch.no_grad()
def test_anchors_of_an_image_s_own_are_computed_once_each(affine_rows):
    _, net, x = conv_pair()
    net.set_anchors(rand(6, *IMAGE, seed=6, dtype=torch.float64), per_image=2)
    net.per_anchor_logits(x)
    affine_rows.clear()
    net.per_anchor_logits(x)
    used = len(choose_per_image(x, 6, 2, 0).unique())
    assert sorted(affine_rows) == sorted([used, B])


@pytest.mark.parametrize("per_image", [None, 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 13, 40, 1000])
@torch.no_grad()
def test_a_memory_cap_limits_the_rows_of_a_pass_and_changes_nothing_else(rows, per_image):
    _, net, _ = conv_pair()
    net.set_anchors(rand(5, *IMAGE, seed=1, dtype=torch.float64), per_image=per_image)
    x = rand(11, *IMAGE, seed=2, dtype=torch.float64)
    k = per_image or 5
    whole = net.per_anchor_logits(x)
    net.memory_cap = 3 * largest_activation(net, x) * rows + 1  # a layer's input, its output and one more
    seen = passes(net)
    capped = net.per_anchor_logits(x)
    assert_close(capped, whole, rel=1e-6)
    assert max(seen) <= max(1, rows)
    assert sum(seen) == k * 11
    if rows >= k * 11:
        assert seen == [k * 11]
    assert max(seen) > rows // 2 or rows >= k * 11  # and the memory is used


@torch.no_grad()
def test_the_cap_holds_for_larger_images_and_higher_precision_than_the_first():
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = kedge.anchor(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), *pool, nn.Linear(4, C)).eval())
    net.set_anchors(rand(K, 3, 4, 4))
    net.per_anchor_logits(rand(B, 3, 4, 4))
    net.set_anchors(rand(K, 3, 32, 32))
    x = rand(B, 3, 32, 32)
    net.memory_cap = 3 * 2 * largest_activation(net, x)
    seen = passes(net)
    net.per_anchor_logits(x)
    assert max(seen) == 2
    seen.clear()
    net.double().per_anchor_logits(x.double())
    assert max(seen) == 1


@pytest.mark.parametrize(
    ("cache", "cap"), [(2**25, 3 * 2**23), (None, 3 * 2**23), (2**20, 2**23), (2**24, 3 * 2**22), (2**30, 2**26)]
)
def test_the_default_cap_is_three_quarters_of_the_last_cache_within_bounds(monkeypatch, cache, cap):
    monkeypatch.setattr("kedge.anchoring.anchored.last_cache", lambda: cache)
    assert kedge.anchor(conv_net()).memory_cap == cap


# ---------------------------------------------------------------------------------------------------------------------
# Training mode.
# ---------------------------------------------------------------------------------------------------------------------


def draws(net, batches, size=9):
    """Train on a few batches and tell what each of them drew."""
    net.train()
    for number in range(batches):
        output = net(rand(size, *IMAGE, seed=number, dtype=net.mean.dtype))
        yield net.draw.permutation.tolist(), net.draw.corrupted, net.draw.masked.tolist(), output.detach().tolist()


def noise(c):
    return (c + 0.3 * torch.rand_like(c)).clamp(0, 1)


RANDOM = {"mask": 0.3, "corruption": noise, "every": 2}


@pytest.mark.parametrize("corruption", [noise, "default"], ids=["own", "default"])
def test_what_a_batch_draws_depends_on_the_seed_and_its_number_alone(corruption):
    runs = []
    for seed, global_seed in ((0, 1), (0, 2), (5, 1)):
        torch.manual_seed(global_seed)
        net = kedge.anchor(fixed_module(), init="fresh", **(RANDOM | {"corruption": corruption}), seed=seed)
        runs.append(list(draws(net, 4)))
    assert runs[0] == runs[1]
    assert len({tuple(run[0]) for run in runs[0]}) == 4
    assert [run[0] for run in runs[0]] != [run[0] for run in runs[2]]
    assert [run[2] for run in runs[0]] != [run[2] for run in runs[2]]


def fixed_module():
    """Build the same network whatever the global generator's state."""
    with seeded(0):
        return conv_net(dtype=torch.float32)


@pytest.mark.parametrize("corruption", [noise, "default", None], ids=["own", "default", "none"])
def test_training_leaves_the_global_generator_alone(corruption):
    net = kedge.anchor(fixed_module(), **(RANDOM | {"corruption": corruption, "every": 1}))
    state = torch.get_rng_state()
    list(draws(net, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dropout_in_the_network_still_draws_from_the_global_generator():
    module = nn.Sequential(nn.Flatten(), nn.Linear(126, 50), nn.Dropout(), nn.Linear(50, C))
    net = kedge.anchor(module, corruption=noise, every=1).train()
    x = rand(B, *IMAGE)
    net(x)
    state = net.state_dict()
    outputs = []
    for seed in (1, 1, 2):
        net.load_state_dict(state)
        torch.manual_seed(seed)
        outputs.append(net(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("done", [1, 2, 5])
def test_a_saved_run_goes_on_with_the_same_draws(done):
    net = kedge.anchor(fixed_module(), init="fresh", **RANDOM)
    list(draws(net, done))
    state = copy.deepcopy(net.state_dict())
    expected = list(draws(net, 4))
    resumed = kedge.anchor(fixed_module(), **RANDOM)
    resumed.load_state_dict(state)
    assert list(draws(resumed, 4)) == expected
    assert resumed.batches_seen == done + 4


@pytest.mark.parametrize("as_bytes", [True, False])
def test_processes_that_share_a_batch_draw_what_one_alone_would(as_bytes):
    x = torch.randint(0, 256, (9, *IMAGE), dtype=torch.uint8) if as_bytes else rand(9, *IMAGE)
    options = {"init": "fresh", "mean": MEAN, "std": STD, "corruption": noise, "every": 2, "mask": 0.5}
    whole, *ranks = (kedge.anchor(fixed_module(), **options).train() for _ in range(3))
    for corrupted in (False, True):
        expected = whole(x)
        assert whole.draw.corrupted == corrupted
        assert_close(torch.cat([ranks[0](x[:4], among=x), ranks[1](x[4:], among=x, first=4)]), expected)
        for field in ("permutation", "masked"):
            parts = [getattr(net.draw, field) for net in ranks]
            assert [len(part) for part in parts] == [4, 5]
            assert torch.equal(torch.cat(parts), getattr(whole.draw, field))


@pytest.mark.parametrize(("rows", "first"), [(9, 6), (3, 0), (9, 9)])
def test_the_shared_batch_must_hold_the_images(rows, first):
    net = kedge.anchor(fixed_module()).train()
    with pytest.raises(InputError, match=rf"among must hold x from row {first} on"):
        net(rand(4, *IMAGE), among=rand(rows, *IMAGE), first=first)
    assert net.batches_seen == 0


def test_a_batch_of_one_is_its_own_anchor():
    net = kedge.anchor(conv_net(), corruption=None).train()
    net(rand(1, *IMAGE, dtype=torch.float64))
    assert net.draw.permutation.tolist() == [0]


@pytest.mark.parametrize(
    ("make", "shape", "corrupted"),
    [
        (lambda: with_head(nn.Conv2d(3, 4, 3), shape=IMAGE), IMAGE, True),
        (lambda: with_head(nn.Conv2d(1, 4, 3), shape=(1, 7, 6)), (1, 7, 6), True),
        (lambda: with_head(nn.Conv2d(5, 4, 3), shape=(5, 7, 6)), (5, 7, 6), True),
        (lambda: nn.Linear(9, C), (9,), False),
        (lambda: with_head(nn.Conv1d(2, 4, 3), shape=(2, 9)), (2, 9), False),
        (lambda: with_head(nn.Conv3d(1, 4, 3), shape=(1, 4, 4, 4)), (1, 4, 4, 4), False),
    ],
    ids=["colour", "grey", "multispectral", "vectors", "signals", "volumes"],
)
def test_the_default_corruption_is_for_images_only(make, shape, corrupted):
    net = kedge.anchor(make(), every=2).train()
    seen = []
    for _ in range(4):
        net(rand(B, *shape))
        seen.append(net.draw.corrupted)
    assert seen == [False, corrupted] * 2


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(9, 6), (9,)), (nn.Conv1d(2, 4, 3), (2, 9))])
def test_a_corruption_of_the_user_s_own_serves_vectors_and_signals(layer, shape):
    module = with_head(layer, shape=shape, dtype=torch.float64)
    net = kedge.anchor(module, init="fresh", corruption=lambda c: c.flip(-1), every=1).train()
    x = rand(B, *shape, dtype=torch.float64)
    output = net(x)
    c = x[net.draw.permutation]
    pair = torch.cat([c.flip(-1), x - c], dim=1)
    first = F.linear if isinstance(layer, nn.Linear) else F.conv1d
    assert net.draw.corrupted
    assert_close(output, net.network[1:](first(pair, net.stem.weight, net.stem.bias)))


def test_a_corrupted_anchor_passes_through_what_precedes_the_stem():
    module, _ = cached_pair()
    net = kedge.anchor(module, init="fresh", mean=MEAN, std=STD, corruption=lambda c: 1 - c, every=1)
    x = rand(B, *IMAGE, dtype=torch.float64)
    net.network.eval()
    net.training = True
    output = net(x)
    network, layer = literal(net, module)
    c = x[net.draw.permutation]
    before = network[0]
    corrupted, clean, image = (before(normalised(net, v)) for v in (1 - c, c, x))
    assert_close(output, network[2:](layer.wide(torch.cat([corrupted, image - clean], dim=1))))


@pytest.mark.parametrize(
    ("corruption", "came"),
    [
        (lambda c: c[:, :1], r"\(4, 1, 7, 6\)"),
        (lambda c: c[:2], r"\(2, 3, 7, 6\)"),
        (lambda c: F.pad(c, (1, 1)), r"\(4, 3, 7, 8\)"),
        (lambda c: None, "NoneType"),
    ],
)
def test_a_corruption_that_changes_the_shape_is_an_error(corruption, came):
    net = kedge.anchor(conv_net(), corruption=corruption, every=1).train()
    with pytest.raises(InputError, match=rf"corruption must keep the shape \(4, 3, 7, 6\), got {came}"):
        net(rand(B, *IMAGE, dtype=torch.float64))


def test_an_error_in_training_leaves_the_network_usable():
    broken = [True]

    def sometimes(c):
        if broken:
            broken.clear()
            raise KeyError("broken")
        return c

    net = kedge.anchor(conv_net(), corruption=sometimes, every=1).train()
    x, state = rand(B, *IMAGE, dtype=torch.float64), torch.get_rng_state()
    with pytest.raises(KeyError):
        net(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.stem.job is None
    assert net(x).shape == (B, C)


@pytest.mark.parametrize("corruption", [None, Corruption()])
def test_bytes_train_as_the_floats_they_stand_for(corruption):
    x = torch.randint(0, 256, (B, *IMAGE), dtype=torch.uint8)
    options = {"init": "fresh", "mean": MEAN, "std": STD, "corruption": corruption, "every": 1}
    as_bytes, as_floats = (kedge.anchor(fixed_module(), **options).train() for _ in range(2))
    assert torch.equal(as_bytes(x), as_floats(x.float() / 255))


def test_bytes_are_evaluated_as_the_floats_they_stand_for():
    anchors, x = (torch.randint(0, 256, (n, *IMAGE), dtype=torch.uint8) for n in (K, B))
    _, net, _ = conv_pair(dtype=torch.float32)
    net.set_anchors(anchors)
    as_bytes = net.per_anchor_logits(x)
    net.set_anchors(anchors.float() / 255)
    assert torch.equal(net.per_anchor_logits(x.float() / 255), as_bytes)


def test_masks_are_drawn_only_where_asked_and_targets_follow_them():
    labels = torch.arange(9) % C
    net = kedge.anchor(fixed_module(), mask=0.5, mask_target="uniform", corruption=None)
    next(draws(net, 1))
    targets = net.targets(labels)
    assert 0 < net.draw.masked.sum() < 9
    assert torch.equal(targets[net.draw.masked], torch.full((int(net.draw.masked.sum()), C), 1 / C))
    assert torch.equal(targets[~net.draw.masked], F.one_hot(labels, C).float()[~net.draw.masked])
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(9))


def test_targets_belong_to_the_last_batch():
    net = kedge.anchor(fixed_module(), corruption=None)
    with pytest.raises(NotReadyError, match="call the network in training mode first"):
        net.targets(torch.zeros(9, dtype=torch.long))
    next(draws(net, 1))
    with pytest.raises(InputError, match=r"labels must be those of the last batch, \(9,\); got \(8,\)"):
        net.targets(torch.zeros(8, dtype=torch.long))
    with pytest.raises(InputError, match=r"labels must lie in 0..4, got 0..5"):
        net.targets(torch.arange(9) % 6)
    with pytest.raises(InputError, match=r"labels must lie in 0..4, got -1..7"):
        net.targets(torch.arange(-1, 8))


def test_the_options_are_the_paper_s_by_default():
    assert kedge.anchor(conv_net()).options == AnchoringOptions(
        corruption="default", every=5, mask=0.0, mask_target="label", seed=0
    )


# ---------------------------------------------------------------------------------------------------------------------
# Anchors of an image's own.
# ---------------------------------------------------------------------------------------------------------------------


def pooled(pool=8, per_image=3, seed=0, dtype=torch.float64):
    """Return a network whose images each take some anchors of a pool."""
    module = conv_net(dtype=dtype)
    net = kedge.anchor(module, init="fresh", mean=MEAN, std=STD, seed=seed)
    net.set_anchors(rand(pool, *IMAGE, seed=1, dtype=dtype), per_image=per_image)
    return module, net


@torch.no_grad()
def test_each_image_sees_the_anchors_chosen_for_it():
    module, net = pooled()
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    chosen = choose_per_image(x, 8, 3, 0)
    assert chosen.shape == (3, B)
    expected = naive(net, module, x)[chosen, torch.arange(B)]  # (3, B, C)
    assert_close(net.per_anchor_logits(x), expected)
    assert_close(net(x), expected.mean(dim=0))


@torch.no_grad()
def test_an_image_is_scored_alike_alone_and_in_any_batch():
    _, net = pooled()
    x = rand(9, *IMAGE, seed=2, dtype=torch.float64)
    together = net.per_anchor_logits(x)
    order = torch.randperm(9, generator=generator(0))
    assert_close(torch.cat([net.per_anchor_logits(image[None]) for image in x], dim=1), together)
    assert_close(net.per_anchor_logits(x[order]), together[:, order])
    assert_close(net.per_anchor_logits(x[3:5]), together[:, 3:5])


def test_the_choice_depends_on_the_image_alone():
    x = rand(30, *IMAGE)
    together = choose_per_image(x, 50, 5, 0)
    alone = torch.cat([choose_per_image(image[None], 50, 5, 0) for image in x], dim=1)
    assert torch.equal(alone, together)
    assert torch.equal(choose_per_image(x.flip(0), 50, 5, 0), together.flip(1))


def test_bytes_and_floats_of_an_image_choose_alike():
    x = torch.randint(0, 256, (30, *IMAGE), dtype=torch.uint8)
    as_bytes = choose_per_image(x, 50, 5, 0)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(choose_per_image(x.to(dtype) / 255, 50, 5, 0), as_bytes)


def test_a_rounding_error_does_not_change_the_choice():
    x = torch.randint(0, 256, (30, *IMAGE), dtype=torch.uint8)
    near = x.double() / 255 + 1e-6 * (rand(30, *IMAGE, dtype=torch.float64) - 0.5)
    assert torch.equal(choose_per_image(near, 50, 5, 0), choose_per_image(x, 50, 5, 0))


def test_distinct_images_and_seeds_choose_differently():
    x = rand(200, *IMAGE)
    chosen = choose_per_image(x, 1000, 5, 0)
    assert len({tuple(column.tolist()) for column in chosen.T}) == 200
    assert not torch.equal(choose_per_image(x, 1000, 5, 1), chosen)
    near = x[:1].clone()
    near[0, 0, 0, 0] = (near[0, 0, 0, 0] + 0.5) % 1  # one pixel
    assert not torch.equal(choose_per_image(near, 1000, 5, 0), chosen[:, :1])


def test_the_choice_is_without_replacement_and_from_the_whole_pool():
    chosen = choose_per_image(rand(300, *IMAGE), 20, 5, 0)
    assert chosen.unique().tolist() == list(range(20))
    assert all(len(column.unique()) == 5 for column in chosen.T)
    counts = torch.bincount(chosen.flatten(), minlength=20)
    assert counts.min() > 40  # 75 expected
    assert torch.equal(
        choose_per_image(rand(4, *IMAGE), 5, 5, 0).sort(dim=0).values, torch.arange(5)[:, None].repeat(1, 4)
    )


def test_the_choice_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    choose_per_image(rand(4, *IMAGE), 20, 5, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_network_s_seed_is_that_of_the_choice():
    x = rand(B, *IMAGE, seed=2, dtype=torch.float64)
    module, net = pooled(seed=7)
    chosen = choose_per_image(x, 8, 3, 7)
    assert_close(net.per_anchor_logits(x), naive(net, module, x)[chosen, torch.arange(B)])


# ---------------------------------------------------------------------------------------------------------------------
# Errors and modes in evaluation.
# ---------------------------------------------------------------------------------------------------------------------


def test_evaluation_before_set_anchors_is_an_error_that_says_so():
    net, x = kedge.anchor(conv_net()), rand(B, *IMAGE, dtype=torch.float64)
    for call in (net.eval(), net.per_anchor_logits):
        with pytest.raises(NotReadyError, match=r"no anchors.*set_anchors\(images\).*fit a detector"):
            call(x)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (rand(*IMAGE), r"x must have the shape of the anchors, \(B, 3, 7, 6\); got \(3, 7, 6\).*x\[None\]"),
        (rand(B, 3, 8, 6), r"\(B, 3, 7, 6\); got \(4, 3, 8, 6\)"),
        (rand(B, 1, 7, 6), r"\(B, 3, 7, 6\); got \(4, 1, 7, 6\)"),
        (rand(0, *IMAGE), r"at least one image, got \(0, 3, 7, 6\)"),
        (torch.ones(B, *IMAGE, dtype=torch.long), "uint8 or floating point tensor, got torch.int64"),
        (torch.ones(B, *IMAGE, dtype=torch.bool), "uint8 or floating point tensor, got torch.bool"),
        (rand(B, *IMAGE).numpy(), "uint8 or floating point tensor, got float32"),
        ([1, 2], "uint8 or floating point tensor, got list"),
        (rand(7), r"x must be \(B, D, ...\) with at least one image, got \(7,\)"),
    ],
)
def test_images_that_cannot_be_evaluated_are_an_error(x, told):
    _, net, _ = conv_pair(dtype=torch.float32)
    for call in (net, net.per_anchor_logits):
        with pytest.raises(InputError, match=told):
            call(x)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (rand(0, *IMAGE), "at least one image"),
        (torch.ones(B, *IMAGE, dtype=torch.long), "uint8 or floating point"),
        ("images", "uint8 or floating point tensor, got str"),
        (rand(7), r"x must be \(B, D, ...\)"),
    ],
)
def test_images_that_cannot_be_trained_on_are_an_error_and_count_for_nothing(x, told):
    net = kedge.anchor(conv_net(dtype=torch.float32)).train()
    with pytest.raises(InputError, match=told):
        net(x)
    assert net.batches_seen == 0


@pytest.mark.parametrize(
    ("anchors", "per_image", "told"),
    [
        (rand(7), None, r"anchors must be a tensor \(K, D, ...\) with at least one image, got \(7,\)"),
        (rand(0, *IMAGE), None, r"at least one image, got \(0, 3, 7, 6\)"),
        ([[0.1, 0.2]], None, "anchors must be a tensor .*, got list"),
        (torch.ones(K, *IMAGE, dtype=torch.long), None, "anchors must be uint8 or floating point, got torch.int64"),
        (
            torch.full((K, *IMAGE), float("nan")),
            None,
            "anchors must be finite; 378 of 378 values.*other training images",
        ),
        (torch.full((K, *IMAGE), float("inf")), None, "anchors must be finite"),
        (rand(K, *IMAGE), K + 1, "per_image must be at most the number of anchors, 3; got 4"),
        (rand(K, *IMAGE), 1, "per_image must be a whole number of at least 2; got 1"),
        (rand(K, *IMAGE), 2.0, "per_image must be a whole number"),
    ],
)
def test_anchors_that_make_no_sense_are_an_error_and_leave_the_old_ones(anchors, per_image, told):
    _, net, _ = conv_pair(dtype=torch.float32)
    before, version = net.anchors, net.anchors_version
    with pytest.raises(InputError, match=told):
        net.set_anchors(anchors, per_image=per_image)
    assert net.anchors is before
    assert net.anchors_version == version


def test_anchors_are_a_copy_in_the_network_s_precision():
    _, net, _ = conv_pair(dtype=torch.float64)
    given = rand(K, *IMAGE).requires_grad_()
    net.set_anchors(given)
    assert net.anchors.dtype == torch.float64
    assert not net.anchors.requires_grad
    expected = given.detach().double()
    given.data.zero_()
    assert torch.equal(net.anchors, expected)
    given = rand(K, *IMAGE, dtype=torch.float64)
    net.set_anchors(given)
    given.zero_()
    assert torch.equal(net.anchors, rand(K, *IMAGE, dtype=torch.float64))


def test_the_network_inside_needs_the_anchored_one_around_it():
    _, net, x = conv_pair()
    with pytest.raises(NotReadyError, match="call the Anchored module, not the network inside it"):
        net.network(x)


def training_modes(net):
    return [module.training for module in net.modules()]


def test_hypotheses_are_those_of_evaluation_mode_and_put_the_modes_back():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(80, C))
    module = module.double().train()
    module[1].eval()
    net = kedge.anchor(module, init="fresh")
    net.set_anchors(rand(K, *IMAGE, seed=1, dtype=torch.float64))
    x, before = rand(B, *IMAGE, dtype=torch.float64), training_modes(net)
    statistics = net.network[1].running_mean.clone()
    assert_close(net.per_anchor_logits(x), naive(net, module, x))
    assert training_modes(net) == before
    assert torch.equal(net.network[1].running_mean, statistics)


def test_the_modes_are_put_back_after_an_error_too():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(99, C)).train()
    module[1].eval()
    net = kedge.anchor(module)
    net.set_anchors(rand(K, *IMAGE))
    before = training_modes(net)
    with pytest.raises(RuntimeError):
        net.per_anchor_logits(rand(B, *IMAGE))
    assert training_modes(net) == before
    assert net.stem.job is None


def test_a_network_that_returns_no_logits_is_told_so():
    net = kedge.anchor(nn.Sequential(nn.Conv2d(3, 4, 3)).eval())
    net.set_anchors(rand(K, *IMAGE))
    with pytest.raises(InputError, match=r"must return logits \(B, C\).*got \(12, 4, 5, 4\)"):
        net(rand(B, *IMAGE))


# ---------------------------------------------------------------------------------------------------------------------
# A network as plain data, and built again.
# ---------------------------------------------------------------------------------------------------------------------


def again(net, model=None):
    """Describe a network, pass the description through JSON, and build it again."""
    return rebuild(json.loads(json.dumps(describe(net))), net.state_dict(), model)


def compact(dtype=torch.float32):
    return build("compact", width=4, classes=C).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kedge_s_own_networks_are_built_again(dtype):
    net = kedge.anchor(compact(dtype), init="fresh", mean=MEAN, std=STD, every=3, mask=0.1, seed=4).eval()
    net.set_anchors(rand(K, 3, 8, 8, seed=1, dtype=dtype), per_image=2)
    net.record = {"epochs_done": 2}
    twin = again(net)
    x = rand(B, 3, 8, 8, dtype=dtype)
    assert torch.equal(twin.per_anchor_logits(x), net.per_anchor_logits(x))
    assert twin.per_anchor_logits(x).dtype == dtype
    assert twin.options == net.options
    assert twin.record == net.record
    assert twin.has_statistics
    assert not twin.training


def test_a_plain_network_is_built_again():
    net = kedge.Classifier(compact()).eval()
    twin, x = again(net), rand(B, 3, 8, 8)
    assert torch.equal(twin(x), net(x))
    assert not twin.has_statistics
    assert again(kedge.Classifier(compact(), mean=0.0, std=1.0)).has_statistics  # no normalisation, and said so


@pytest.mark.parametrize("make", [lambda: conv_net(dtype=torch.float32), Backwards, lambda: nn.Linear(126, C)])
def test_other_networks_are_built_again_from_a_fresh_one(make):
    module = make()
    x = rand(B, 126) if isinstance(module, nn.Linear) else rand(B, *IMAGE)
    net = kedge.anchor(module, init="fresh", example=x).eval()
    net.set_anchors(rand(K, *x.shape[1:], seed=1))
    assert torch.equal(again(net, make()).per_anchor_logits(x), net.per_anchor_logits(x))
    assert torch.equal(again(net, kedge.anchor(make(), example=x)).per_anchor_logits(x), net.per_anchor_logits(x))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("default", "default"), (None, None), (Corruption(crop=False), Corruption(crop=False)), (noise, None)],
)
def test_the_corruption_comes_back_unless_it_is_a_function(given, expected):
    assert again(kedge.anchor(compact(), corruption=given)).options.corruption == expected


def test_a_network_that_does_not_fit_the_description_is_an_error():
    foreign, plain = kedge.anchor(conv_net()), kedge.Classifier(compact())
    with pytest.raises(InputError, match="holds a Sequential, which is not one of kedge's own networks; pass model="):
        again(foreign)
    with pytest.raises(InputError, match="plain network and model= is anchored"):
        again(plain, kedge.anchor(compact()))
    with pytest.raises(InputError, match="model must be the Compact that was saved; its weights do not fit"):
        again(plain, build("compact", width=8, classes=C))


def test_threads_may_share_a_network():
    with seeded(0):
        net = kedge.anchor(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)), init="fresh")
    generator = torch.Generator().manual_seed(0)
    net.set_anchors(torch.rand(5, 1, 8, 8, generator=generator))
    net.eval()
    batches = [torch.rand(4, 1, 8, 8, generator=generator) for _ in range(4)]
    with torch.no_grad():
        alone = [net(x) for x in batches]

        def worker(number):
            with torch.no_grad():
                return all(torch.allclose(net(batches[number]), alone[number], atol=1e-5) for _ in range(150))

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(worker, range(4)))


def moved(images, step):
    """Shift by one pixel along a diagonal, a pixel at a time; beyond the border lies the image, mirrored."""
    size, out = images.shape[-1], torch.empty_like(images)
    inside = {-1: 1, size: size - 2} | {i: i for i in range(size)}
    for h in range(size):
        for w in range(size):
            out[..., h, w] = images[..., inside[h + step], inside[w + step]]
    return out


@pytest.mark.parametrize("views", [2, 6])
@pytest.mark.parametrize("per_image", [None, 3])
def test_anchors_can_be_held_against_views_of_the_image_in_turn(per_image, views):
    net = kedge.anchor(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(784, 3)),
        init="fresh",
        seed=0,
    ).eval()
    rising = torch.linspace(0, 1, 16)  # to the right
    images = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * rising
    anchors = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * rising
    net.set_anchors(anchors, per_image=per_image)
    mirrored = images.flip(3)
    seen = [images, mirrored, moved(images, -1), moved(mirrored, 1), moved(images, 1), moved(mirrored, -1)][:views]
    expected = [net.per_anchor_logits(view, like=images) for view in seen]
    found = net.per_anchor_logits(images, tta=views)
    assert found.shape == expected[0].shape
    for k, hypothesis in enumerate(found):
        assert torch.allclose(hypothesis, expected[k % views][k], atol=1e-6)
        if k % views:
            assert not torch.allclose(hypothesis, expected[0][k], atol=1e-3)  # else nothing would have been tested
    some = net.per_anchor_logits(images, tta=views, which=[1, 2])
    assert torch.allclose(some, found[1:3], atol=1e-6)


def test_views_of_signals_and_of_tiny_images_keep_their_shape():
    for shape in [(2, 3, 5), (2, 3, 1, 1), (2, 3, 1, 4), (2, 3, 4, 4, 4)]:
        images = torch.rand(shape)
        for number in range(VIEWS):
            assert view(images, number).shape == images.shape
    assert view(torch.arange(5)[None, None], 2).tolist() == [[[1, 0, 1, 2, 3]]]


def test_amp_refuses_other_numbers_of_views():
    net = kedge.anchor(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)))
    with pytest.raises(InputError, match="views must be one of 1, 2, 6; got 3"):
        kedge.AMP(net, tta=3)


def test_amp_takes_the_views_and_its_file_says_so(tmp_path):
    net = kedge.anchor(kedge.models.build("compact", width=4, classes=3), init="fresh", seed=0)
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    detector = kedge.AMP(net, tta=6).fit(images).calibrate(images[5:])
    hypotheses = net.per_anchor_logits(images, tta=6)
    tau = hypotheses.sigmoid().std(dim=0).sum(dim=1)
    logits = hypotheses.mean(dim=0) / (1 + tau.exp())[:, None]
    assert torch.allclose(detector.score(images), logits.mean(dim=1) - logits.logsumexp(dim=1), atol=1e-4)
    detector.save(tmp_path / "a.kedge")
    assert torch.equal(kedge.load(tmp_path / "a.kedge").score(images), detector.score(images))
