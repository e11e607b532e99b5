"""Anchoring: any network with an affine layer becomes one on [c, x - c], exactly and without stale caches.

The oracle is `naive`: two explicit layers, A_x on the residual and A_c on the anchor, one anchor after the other; for
torch's own layers also one layer of twice the channels on the literal concatenation. The paper's formulas on top of it
are in test_paper_section3.py.
"""

import concurrent.futures
import copy
import json
import sys
import time

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from helpers import Function, wide_weight
from kedge.anchoring import AnchoringOptions
from kedge.anchoring import survey as anchoring_survey
from kedge.anchoring.corruption import Corruption
from kedge.anchoring.layer import linear_part
from kedge.anchoring.sampling import choose, choose_per_image
from kedge.anchoring.tta import VIEWS, view
from kedge.data import Preprocess
from kedge.errors import ArchitectureError, FileFormatError, InputError, NotReadyError
from kedge.io.rebuild import describe, rebuild
from kedge.models import build
from kedge.seeds import seeded

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest logit
K, B, C = 3, 4, 5
IMAGE = (3, 7, 6)
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


# --- the oracle ------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A_x(x - c) + A_c(c) - A_c(0), for the anchor that is set."""

    def __init__(self, layer_x, layer_c):
        super().__init__()
        self.layer_x, self.layer_c, self.anchor = copy.deepcopy(layer_x), copy.deepcopy(layer_c), None

    @property
    def weight(self):  # transformers' ViT reads its dtype
        return self.layer_x.weight

    def forward(self, x):
        c = self.anchor.expand_as(x)
        return self.layer_x(x - c) + self.layer_c(c) - self.layer_c(torch.zeros_like(c))


class Concatenation(Pair):
    """Torch's own layer of twice the channels, on the literal concatenation [c, x - c]."""

    def __init__(self, layer_x, layer_c):
        super().__init__(layer_x, layer_c)
        self.wide = copy.deepcopy(layer_x)
        self.wide.weight = nn.Parameter(torch.cat([layer_c.weight, layer_x.weight], dim=1).detach())
        inputs = "in_features" if isinstance(layer_x, nn.Linear) else "in_channels"
        setattr(self.wide, inputs, self.wide.weight.shape[1])

    def forward(self, x):
        c = self.anchor.expand_as(x)
        return self.wide(torch.cat([c, x - c], dim=-1 if isinstance(self.wide, nn.Linear) else 1))


def literal(net, kind=Pair):
    """Put an oracle with the anchored layer's weights into a copy of its network."""
    network, layer = copy.deepcopy(net.network), kind(net.anchored_layer.layer_x, net.anchored_layer.layer_c)
    network.set_submodule(net.layer, layer)
    return network, layer


def normalised(net, images):
    shape = (-1,) + (1,) * (images.ndim - 2)
    return (images - net.mean.view(shape)) / net.std.view(shape)


def logits(output):
    return getattr(output, "logits", output)


def one_by_one(net, network, layer, x, before=lambda c: c):
    """The logits (K, B, C) of an oracle's network, with gradients; `before` is what precedes the layer."""
    outputs = []
    for c in net.anchors:
        layer.anchor = before(normalised(net, c[None]))
        outputs.append(logits(network(normalised(net, x))))
    return torch.stack(outputs)


def naive(net, x, before=lambda c: c, kind=Pair):
    network, layer = literal(net, kind)
    return one_by_one(net, network.eval(), layer, x, lambda c: before(c).detach())


def assert_close(actual, expected, rel=None):
    rel = TOLERANCE[expected.dtype] if rel is None else rel
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert (actual - expected).abs().max() <= rel * expected.abs().max()


def differ(a, b):
    return (a - b).abs().max() > 1e-3 * b.abs().max()


# --- networks and images ---------------------------------------------------------------------------------------------


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def single(*shape, seed=0):
    return rand(*shape, seed=seed, dtype=torch.float32)


def with_head(*layers, shape=IMAGE, dtype=torch.float64):
    """Follow layers by a nonlinearity and a linear head, for images of a shape (D, ...)."""
    body = nn.Sequential(*layers, nn.Tanh(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(body(torch.zeros(1, *shape)).shape[1], C)).to(dtype).eval()


def conv_net(channels=3, size=(7, 6), dtype=torch.float64):
    return with_head(nn.Conv2d(channels, 4, 3, padding=1), shape=(channels, *size), dtype=dtype)


def fixed_net():
    """The same network in single precision whatever the state of the global generator."""
    with seeded(0):
        return conv_net(dtype=torch.float32)


def anchored(module=None, shape=IMAGE, init="fresh", dtype=torch.float64, per_image=None, k=K, **options):
    """An anchored network with anchors set, in evaluation mode, and images."""
    net = kedge.anchor(conv_net(dtype=dtype) if module is None else module, init=init, **options).eval()
    net.set_anchors(rand(k, *shape, seed=1, dtype=dtype), per_image=per_image)
    return net, rand(B, *shape, seed=2, dtype=dtype)


def conv(kernel=3):
    return nn.Conv2d(3, 4, kernel, padding=kernel // 2)


def picky_channels():
    """Checks its channel count, as transformers' networks do, and reads the batch size off its input."""

    def forward(net, x):
        assert x.shape[1] == 3
        return net.head(net.relu(net.conv(x)).reshape(x.size(0), -1))

    return Function(forward, conv=nn.Conv2d(3, 4, 3, stride=2), relu=nn.ReLU(inplace=True), head=nn.Linear(24, C))


def backwards(**more):
    """Registers its layers in the reverse of the order in which it calls them."""
    layers = {"head": nn.Linear(4, C), "second": nn.Conv2d(4, 4, 3), "first": nn.Conv2d(3, 4, 3), **more}
    return Function(lambda net, x: net.head(net.second(net.first(x).tanh()).mean(dim=(2, 3))), **layers)


def columns(x):
    """Images as tokens, one per column."""
    return x.flatten(1, 2).transpose(1, 2)


def tokens():
    layers = {"embed": nn.Linear(21, 4), "head": nn.Linear(4, C)}
    return Function(lambda net, x: net.head(net.embed(columns(x)).tanh().mean(dim=1)), **layers)


def hf_resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 6, "hidden_sizes": [6, 8], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_channels=3, num_labels=C, **sizes))


def hf_vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(num_channels=5, image_size=12, patch_size=4, num_labels=C, **sizes))


# name: (network, shape of an image, layer that must be found, what precedes it)
NETWORKS = {
    "mlp on flattened images": (lambda: with_head(nn.Flatten(), nn.Linear(126, 6)), IMAGE, "1", lambda c: c.flatten(1)),
    "signals": (lambda: with_head(nn.Conv1d(2, 4, 5, stride=2), shape=(2, 17)), (2, 17), "0", None),
    "volumes": (lambda: with_head(nn.Conv3d(1, 4, 3), shape=(1, 5, 6, 7)), (1, 5, 6, 7), "0", None),
    "one linear layer": (lambda: nn.Linear(9, C), (9,), "0", None),
    "channel count checked": (picky_channels, IMAGE, "conv", None),
    "tokens": (tokens, IMAGE, "embed", columns),
    "kedge's compact": (lambda: build("compact", width=4, classes=C), (3, 8, 8), "prep.0", None),
    "transformers ResNet": (hf_resnet, (3, 32, 32), "resnet.embedder.embedder.convolution", None),
    "transformers ViT": (hf_vit, (5, 12, 12), "vit.embeddings.patch_embeddings.projection", None),
}

# --- every affine layer ----------------------------------------------------------------------------------------------

SIZES = {nn.Conv1d: (13,), nn.Conv2d: (9, 8), nn.Conv3d: (7, 6, 5)}
GEOMETRIES = [
    (3, {"bias": False}),
    (3, {"stride": 2, "padding": 2, "dilation": 2}),
    (2, {"padding": "same", "dilation": 2}),
    (4, {"stride": 4}),  # a patch embedding
    (3, {"padding": 2, "padding_mode": "reflect"}),
    (2, {"padding": "same", "padding_mode": "replicate", "bias": False}),
    (3, {"stride": 2, "padding": 1, "dilation": 2, "padding_mode": "circular"}),
]
LAYERS = [(nn.Linear, (7, 6), {}, (7,)), (nn.Linear, (7, 6), {"bias": False}, (4, 7))]  # the second on tokens
LAYERS += [(kind, (3, 4, k), options, (3, *SIZES[kind])) for kind in SIZES for k, options in GEOMETRIES]
LAYERS += [(nn.Conv2d, (3, 4, (2, 3)), {"dilation": (3, 2), "padding": (2, 0)}, (3, 9, 8))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize(("kind", "sizes", "options", "shape"), LAYERS)
@torch.no_grad()
def test_torch_s_layers_compute_the_concatenation_or_the_preserved_function_to_the_last_bit(
    kind, sizes, options, shape, dtype
):
    module = with_head(kind(*sizes, **options), shape=shape, dtype=dtype)
    net, x = anchored(module, shape, "preserve", dtype)
    assert torch.equal(net.per_anchor_logits(x), module(x.repeat(K, *(1,) * len(shape))).view(K, B, C))
    assert_close(net.train()(x), module(x))
    net, x = anchored(module, shape, dtype=dtype)
    expected = naive(net, x, kind=Concatenation)
    assert_close(net.per_anchor_logits(x), expected)
    assert_close(net(x), expected.mean(dim=0))
    assert differ(expected[0], expected[1])


class SamePadding(nn.Conv2d):
    """Pads its input by its size, as TensorFlow does and timm's networks that come from there."""

    def forward(self, x):
        pad = [max((-(-s // t) - 1) * t + k - s, 0) for s, t, k in zip(x.shape[2:], self.stride, self.kernel_size)]  # noqa: B905
        x = F.pad(x, [pad[1] // 2, pad[1] - pad[1] // 2, pad[0] // 2, pad[0] - pad[0] // 2])
        return F.conv2d(x, self.weight, self.bias, self.stride)


class Standardized(nn.Conv2d):
    """Standardizes its weight, in the inner method."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, (weight - weight.mean()) / weight.std(), 2 * bias)


class PatchEmbedding(nn.Module):
    """Patches to tokens, and a position for each."""

    def __init__(self):
        super().__init__()
        self.proj, self.position = nn.Conv2d(3, 4, 3, stride=3), nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2) + self.position


AFFINE = {
    "TF-style same padding": lambda: SamePadding(3, 4, 3, stride=2),
    "weight standardization": lambda: Standardized(3, 4, 3),
    "groups": lambda: nn.Conv2d(3, 6, 3, groups=3),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)).eval(),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3),
    "patch embedding": PatchEmbedding,
}


@pytest.mark.parametrize("name", AFFINE)
def test_any_affine_layer_can_be_anchored(name):
    module = with_head(AFFINE[name]())
    net, x = anchored(module, init="preserve", layer="0")
    with torch.no_grad():
        assert_close(net.per_anchor_logits(x), module(x).expand(K, B, C))
        for p in net.anchored_layer.layer_c.parameters():
            p.mul_(1 + 0.5 * torch.rand_like(p))
        expected = naive(net, x)
        assert_close(net.per_anchor_logits(x), expected)
        assert differ(expected[0], expected[1])
    network, layer = literal(net)
    actual = net.train()(x)
    layer.anchor = x[net.draw.permutation]
    expected = network.train()(x)
    assert_close(actual, expected, 1e-6 if name == "spectral_norm" else None)  # it iterates at every training call
    actual.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(net.anchored_layer.layer_x.parameters(), layer.layer_x.parameters(), strict=True):
        assert_close(p.grad, q.grad, 1e-4 if name == "spectral_norm" else 1e-7)


def test_fresh_weights_are_drawn_from_the_seed_and_for_torch_s_layers_are_those_of_the_wide_layer():
    for name in ("groups", "TF-style same padding", "transposed"):
        nets = [kedge.anchor(with_head(AFFINE[name]()), layer="0", init="fresh", seed=seed) for seed in (1, 1, 2)]
        first, again, other = (net.anchored_layer.layer_c.weight for net in nets)
        assert torch.equal(first, again)
        assert differ(first, other)
        assert differ(first, nets[0].anchored_layer.layer_x.weight)
    for seed in (0, 7):
        module, state = conv_net(dtype=torch.float32), torch.get_rng_state()
        net = kedge.anchor(module, init="fresh", seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        with seeded(seed):
            wide = nn.Conv2d(6, 4, 3, padding=1)
        assert torch.equal(wide_weight(net), wide.weight)
        assert torch.equal(net.anchored_layer.layer_x.bias, wide.bias)
        assert net.anchored_layer.layer_c.bias is None
    for name in ("weight_norm", "patch embedding"):
        with pytest.raises(ArchitectureError, match='use init="preserve"'):
            kedge.anchor(with_head(AFFINE[name]()), layer="0", init="fresh")


def test_the_linear_part_does_not_depend_on_the_bias():
    for layer in (conv(), *(AFFINE[name]() for name in ("weight standardization", "weight_norm", "patch embedding"))):
        layer, x = layer.double(), rand(B, *IMAGE)
        before, scale = linear_part(layer, x), layer(x).abs().max()
        assert (before - (layer(x) - layer(torch.zeros_like(x)))).abs().max() < 1e-12 * scale
        for name, p in layer.named_parameters():
            if "bias" in name or "position" in name:
                p.data += 1e3
        assert (linear_part(layer, x) - before).abs().max() < 1e-9 * scale


# --- networks from elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_a_foreign_network_is_anchored_trains_on_the_literal_pairs_and_works_in_any_gradient_mode(name):
    make, shape, layer, before = NETWORKS[name]
    module, before = make().double().eval(), before or (lambda c: c)
    for example in (rand(2, *shape, seed=3), None):
        net, x = anchored(module, shape, example=example, corruption=None)
        assert net.layer == layer
        expected = naive(net, x, before)
        assert_close(net.per_anchor_logits(x), expected)
        assert_close(net(x), expected.mean(dim=0))
    preserved, _ = anchored(module, shape, init="preserve")
    with torch.no_grad():
        folded = logits(module(x.repeat(K, *(1,) * len(shape))))
        assert torch.equal(preserved.per_anchor_logits(x), folded.view(K, B, C))
    network, wide = literal(net, Concatenation)
    actual = net.train()(x)
    wide.anchor = before(x[net.draw.permutation])
    expected = logits(network.train()(x))
    assert_close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    pair = net.anchored_layer
    assert_close(torch.cat([pair.layer_c.weight.grad, pair.layer_x.weight.grad], dim=1), wide.wide.weight.grad)
    for mode in MODES:
        net = kedge.anchor(module, init="fresh")
        with mode():
            net.set_anchors(rand(K, *shape, seed=1))
            first, again = net.per_anchor_logits(x), net.per_anchor_logits(x)
        assert first.requires_grad == (mode is torch.enable_grad)
        assert first.is_inference() == (mode is torch.inference_mode)
        assert_close(again, naive(net, x, before))
        net.per_anchor_logits(x).sum().backward()  # whatever mode came before, gradients can follow
        assert net.anchored_layer.layer_c.weight.grad.isfinite().all()


BEFORE = {  # layers before the convolution
    "batch norm": [nn.BatchNorm2d(3)],
    "batch norm and a layer in place": [nn.BatchNorm2d(3, affine=False), nn.ReLU(inplace=True)],
    "instance norm": [nn.InstanceNorm2d(3, affine=True), nn.PReLU()],
    "group norm": [nn.GroupNorm(3, 3)],
    "layer norm": [nn.LayerNorm(6), nn.Dropout(0.0)],
    "padding and pooling": [nn.ReflectionPad2d(2), nn.Identity(), nn.MaxPool2d(3, 1), nn.AvgPool2d(3, 1)],
    "a convolution": [nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()],
}


@pytest.mark.parametrize("name", BEFORE)
def test_anchors_pass_through_the_layers_before_the_anchored_one(name):
    prefix = nn.Sequential(*copy.deepcopy(BEFORE[name])).double().eval()
    for norm in prefix:
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.copy_(torch.tensor(MEAN))
            norm.running_var.copy_(torch.tensor(STD))
    module, at = nn.Sequential(*prefix, *conv_net()).eval(), str(len(prefix))
    for example in (rand(B, *IMAGE), None):
        net, x = anchored(module, mean=0.1, layer=at if name == "a convolution" else None, example=example)
        assert net.layer == at
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                assert_close(net.per_anchor_logits(x), naive(net, x, lambda c: prefix(c.clone())))


def test_a_network_that_writes_into_its_input_spoils_neither_anchors_nor_images():
    example = rand(B, *IMAGE, seed=2)
    net, x = anchored(Function(lambda net, x: net.body(x.sub_(0.5)), body=conv_net()), example=example)
    with torch.no_grad():
        for _ in range(2):
            assert_close(net.per_anchor_logits(x), naive(net, x, lambda c: c - 0.5))
    assert torch.equal(net.anchors, rand(K, *IMAGE, seed=1))
    assert torch.equal(x, rand(B, *IMAGE, seed=2))
    assert torch.equal(example, x)


def training_modes(net):
    return [module.training for module in net.modules()]


def test_the_anchored_copy_keeps_modes_and_statistics():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(80, C)).train()
    module[1].eval()  # frozen statistics in training
    assert [m.training for m in kedge.anchor(module).network] == [True, False, True, True, True]
    module.eval()[2].train()  # dropout at test time
    net = kedge.anchor(module, example=single(1, *IMAGE))
    assert not net.training
    for network in (module, net.network):  # the original's stay too
        assert [m.training for m in network] == [False, False, True, False, False]
    for training in (True, False):
        assert set(training_modes(kedge.anchor(nn.Linear(9, C).train(training)))) == {training}
    x, unanchored = rand(B, *IMAGE), kedge.Classifier(conv_net(), mean=MEAN, std=STD).eval()
    net, _ = anchored(unanchored, init="preserve")
    assert_close(net(x), unanchored(x))
    assert kedge.anchor(unanchored, mean=0.5, std=0.5).mean.tolist() == [0.5]


# --- which layer is the first ----------------------------------------------------------------------------------------


def test_the_first_layer_is_found_by_running_the_example_or_named_and_a_wrong_guess_is_an_error():
    module = backwards().double().eval()
    net, x = anchored(module, example=rand(1, *IMAGE))
    assert net.layer == "first"
    assert_close(net.per_anchor_logits(x), naive(net, x))
    example = torch.randint(0, 256, (1, *IMAGE), dtype=torch.uint8)
    assert kedge.anchor(module, example=example, mean=MEAN, std=STD).layer == "first"
    assert kedge.anchor(module, layer="first").train()(x).shape == (B, C)
    net, x = anchored(module)
    assert net.layer == "head"
    for call in (net.train(), net.eval(), net.per_anchor_logits):
        with pytest.raises(ArchitectureError, match=r"'first' reads the input before it; pass example=.*or layer="):
            call(x)


def test_the_check_at_the_first_forward_leaves_no_trace():
    net = kedge.anchor(nn.Sequential(nn.BatchNorm2d(3), *conv_net()).double().train(), corruption=None)
    x, once = rand(B, *IMAGE), nn.BatchNorm2d(3).double()
    net(x)
    once(x)
    assert torch.equal(net.network[0].running_mean, once.running_mean)
    assert all(p.requires_grad for p in net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def tied():
    net = Function(lambda net, x: net.decode(net.encode(x).tanh()), encode=nn.Linear(6, 6), decode=nn.Linear(6, 6))
    net.decode.weight = net.encode.weight
    return net


def two_names():
    layer = nn.Linear(6, 6)
    return Function(lambda net, x: net.a(x), a=layer, b=layer)


def twice():
    layers = {"conv": conv(), "head": nn.Linear(4, C)}
    return Function(lambda net, x: net.head((net.conv(x) + net.conv(x.flip(-1))).mean((2, 3))), **layers)


def two_readers():
    layers = {"fine": conv(), "coarse": conv(5), "head": nn.Linear(4, C)}
    return Function(lambda net, x: net.head((net.fine(x).tanh() + net.coarse(x)).mean((2, 3))), **layers)


def skip():
    return Function(lambda net, x: net.body(x) + x.mean(dim=(1, 2, 3))[:, None], body=conv_net().float())


def skip_into_head():
    layers = {"conv": conv(), "head": nn.Linear(7, C)}
    return Function(lambda net, x: net.head(torch.cat([net.conv(x).mean((2, 3)), x.mean((2, 3))], dim=1)), **layers)


def merges():
    layers = {"embed": nn.Linear(21, 4), "head": nn.Linear(24, C)}
    return Function(lambda net, x: net.head(net.embed(columns(x).reshape(-1, 21)).view(len(x), -1)), **layers)


def held_in_a_list():
    """Calls its layers through a list that replacing the registered module does not change."""
    net = Function(lambda net, x: nn.Sequential(*net.calls)(x), body=conv_net().float())
    net.calls = list(net.body)
    return net


def pruned():
    layer = nn.Linear(6, C)
    torch.nn.utils.prune.random_unstructured(layer, "weight", amount=0.5)
    return nn.Sequential(layer)


class Squares(nn.Conv2d):
    """Has weights and is not affine."""

    def forward(self, x):
        return super().forward(x).square()


# name: (network, shape, what the error says). With an example `anchor` raises it, without one the first forward does.
REFUSED = {
    "called twice": (twice, IMAGE, r"'conv' must be called once.*2 times.*separate layers"),
    "tied weights": (tied, (6,), r"'encode' shares its weights with 'decode'.*separate weights"),
    "one layer, two names": (two_names, (6,), r"'a' shares its weights with 'b'"),
    "pruned": (pruned, (6,), r"copy.*pruning.*permanent first"),
    "not affine": (lambda: with_head(Squares(3, 4, 3), dtype=torch.float32), IMAGE, r"'0' is a Squares.*not affine"),
    "two readers": (two_readers, IMAGE, r"several layers read the input: 'fine', 'coarse'.*layer='fine'"),
    "skip to the logits": (skip, IMAGE, r"around the layer 'body.0'.*skip.*layer='body.0'"),
    "skip into the head": (skip_into_head, IMAGE, r"several layers read the input: 'conv', 'head'"),
    "no layer": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), IMAGE, r"no .*layer.*pass.*layer="),
    "batch dimension changed": (merges, IMAGE, r"one row per image.*6 rows for 1 images.*layer="),
    "held in a list": (held_in_a_list, IMAGE, r"'body.0' must be called once.*called 0 times.*layer="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_cannot_be_anchored_is_an_error_that_gives_a_way_out(name):
    make, shape, message = REFUSED[name]

    def use(training):
        net = kedge.anchor(make())
        net.set_anchors(single(K, *shape, seed=1))
        with torch.inference_mode(not training):
            net.train(training)(single(B, *shape))

    for call in (
        lambda: kedge.anchor(make(), example=single(1, *shape)),
        lambda: use(training=True),
        lambda: use(training=False),
    ):
        with pytest.raises(ArchitectureError, match=message):
            call()


def test_a_layer_named_by_the_user_is_checked_too_and_other_ways_around_it_are_accepted():
    normed = nn.Sequential(nn.Sequential(conv(), nn.BatchNorm2d(4)), nn.Flatten())
    for net, layer, message in (
        (twice(), "conv", "called 2 times"),
        (tied(), "encode", "shares its weights"),
        (backwards(), "first.weight", "layer must name a layer of the network, such as .'head', 'second', 'first'."),
        (backwards(), "frist", "such as .'head', 'second', 'first'.; got 'frist'"),
        (with_head(conv(), dtype=torch.float32), "1", "'1' is a Tanh that is not affine"),
        (normed, "0", "contains a BatchNorm2d"),
        (backwards(spare=conv()), "spare", "'spare' must be called once"),
    ):
        x = single(B, 6) if layer == "encode" else single(B, *IMAGE)
        for example in (x, None):
            with pytest.raises((ArchitectureError, InputError), match=message):
                kedge.anchor(net, layer=layer, example=example).train()(x)
    for make, layer in ((two_readers, "fine"), (two_readers, "coarse"), (skip, "body.0")):
        net, x = anchored(make().double().eval(), layer=layer)
        assert_close(net.per_anchor_logits(x), naive(net, x))


@pytest.mark.filterwarnings("ignore:.*torch.ao:DeprecationWarning", "ignore:.*quantized:UserWarning")
def test_a_quantized_or_lazy_layer_is_refused_and_a_quantized_head_is_not():
    lazy = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(C))
    with pytest.raises(ArchitectureError, match=r"'0'.*lazy.*run one batch"):
        kedge.anchor(copy.deepcopy(lazy))
    assert kedge.anchor(lazy, example=single(1, *IMAGE)).layer == "0"  # the example is that batch
    quantized = torch.ao.nn.quantized
    convolution = nn.Sequential(quantized.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(80, C))
    linear = nn.Sequential(quantized.dynamic.Linear(6, 6), nn.ReLU(), nn.Linear(6, C))
    for module, options in ((convolution, {}), (linear, {}), (linear, {"layer": "0"})):
        with pytest.raises(ArchitectureError, match=r"'0'.*quantize afterwards"):
            kedge.anchor(module, **options)
    if torch.backends.quantized.engine == "none":
        pytest.skip("no quantized kernels on this machine")
    x = single(B, 6)
    with pytest.raises(ArchitectureError, match=r"'0'.*quantize afterwards"):
        kedge.anchor(linear, example=x)
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), quantized.dynamic.Linear(6, C)).eval()
    net, _ = anchored(module, (6,), "preserve", torch.float32, example=x)
    with torch.no_grad():
        assert torch.equal(net.per_anchor_logits(x).flatten(0, 1), module(x.repeat(K, 1)))


def test_arguments_are_checked_and_the_options_are_the_variant_s():
    for arguments, message in (
        ({"init": "zero"}, "init must be one of 'preserve', 'fresh'"),
        ({"variant": "ours"}, "variant must be one of 'paper', 'authors', 'recommended'"),
        ({"corruption": "strong"}, "corruption must be one of"),
        ({"corruption": 3}, "corruption must be .*got 3"),
        ({"every": 0}, "every must be"),
        ({"mask": 1.5}, "mask must lie in"),
        ({"per_sample": "no"}, "per_sample must be one of"),
        ({"seed": "0"}, "seed must be a whole number"),
        ({"evry": 2}, "an option of anchor must be one of .*'every'.*got 'evry'"),
        ({"mask_target": "zero"}, "mask_target must be one of"),
        ({"mask_target": "uniform"}, "mask_target must come with mask"),
        ({"mean": [0.1, 0.2], "std": [0.1, 0.2, 0.3]}, "one value or one per channel"),
    ):
        with pytest.raises(InputError, match=message):
            kedge.anchor(conv_net(), **arguments)
    for net, message in (("resnet", "net must be a torch.nn.Module, got str"), (anchored()[0], "anchored already")):
        with pytest.raises(InputError, match=message):
            kedge.anchor(net)
    assert kedge.anchor(conv_net()).options == AnchoringOptions("default", 5, False, 0.0, "label", 0.0, 0)
    authors = kedge.anchor(conv_net(), variant="authors").options
    assert authors.transform(4) == Corruption(joint_jitter_blur=True)
    assert authors.transform(2) is None
    assert kedge.anchor(conv_net(), variant="authors", corruption=None).options.corruption is None


# --- the cache is never stale ----------------------------------------------------------------------------------------


def cached_net():
    """An anchored network with a batch norm before the anchored layer."""
    return anchored(nn.Sequential(nn.BatchNorm2d(3), *conv_net()).double(), mean=MEAN, std=STD, seed=1)[0]


def step(net):
    """Take a training step in evaluation mode."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with torch.inference_mode(False), torch.enable_grad():
        F.cross_entropy(net(rand(B, *IMAGE)), torch.arange(B)).backward()
        optimizer.step()


def load_other(net):
    other = cached_net()
    with torch.no_grad():
        for value in (*other.parameters(), other.anchors, other.mean):
            value.mul_(0.8).add_(0.05)
    net.load_state_dict(other.state_dict())


def another_weight(net):
    layer = net.anchored_layer.layer_x
    layer.register_parameter("weight", nn.Parameter(layer.weight.detach().flip(0)))


CHANGES = {
    "weights in place": torch.no_grad()(lambda net: net.anchored_layer.layer_c.weight.mul_(1.5)),
    "weights of the anchor through .data": lambda net: net.anchored_layer.layer_c.weight.data[:, 0].add_(0.3),
    "weights of the image through .data": lambda net: net.anchored_layer.layer_x.weight.data[:, 0].add_(0.3),
    "another weight": another_weight,
    "bias through .data": lambda net: net.anchored_layer.layer_x.bias.data.add_(0.3),
    "an optimizer's step": step,
    "a training batch": lambda net: net.train()(rand(B, *IMAGE, seed=5)) is net.eval(),
    "load_state_dict": load_other,
    "channels last": lambda net: net.to(memory_format=torch.channels_last),
    "set_anchors": lambda net: net.set_anchors(rand(K, *IMAGE, seed=8)),
    "set_anchors, another number": lambda net: net.set_anchors(rand(K + 2, *IMAGE, seed=8)),
    "anchors in place": lambda net: net.anchors.mul_(0.5),
    "running mean before the layer": lambda net: net.network[0].running_mean.add_(0.4),
    "running variance before the layer": lambda net: net.network[0].running_var.mul_(3),
    "weights before the layer": lambda net: net.network[0].weight.data.mul_(2),
    "set_statistics": lambda net: net.set_statistics(0.3, 0.4),
    "mean in place": lambda net: net.mean.add_(0.2),
    "a layer after it": lambda net: net.network[-1].weight.data.mul_(2),
    "float": lambda net: net.float(),
}
SAME_FUNCTION = {"float", "channels last"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [[name] for name in CHANGES] + [list(CHANGES)], ids=[*CHANGES, "all in turn"])
def test_the_logits_follow_every_change(changes, mode):
    net, x = cached_net(), rand(B, *IMAGE, seed=2)
    for change in changes:
        with mode():
            before = net.per_anchor_logits(x)
            assert_close(before, naive(net, x, net.network[0]))
        CHANGES[change](net)
        x = x.to(net.mean)
        with mode():
            for _ in range(2):  # computed anew, and from the cache
                after = net.per_anchor_logits(x)
                assert_close(after, naive(net, x, net.network[0]))
        assert change in SAME_FUNCTION or after.shape != before.shape or differ(after, before)


@torch.no_grad()
def test_the_cache_follows_buffers_of_a_parametrization_and_keeps_nothing_of_autocast():
    net, x = anchored(with_head(AFFINE["spectral_norm"]()), init="preserve")
    net.per_anchor_logits(x)
    net.anchored_layer.layer_c.parametrizations.weight[0]._u.mul_(0.5)
    assert_close(net.per_anchor_logits(x), naive(net, x))
    net, x = anchored(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low = net.per_anchor_logits(x)
    assert_close(net.per_anchor_logits(x), naive(net, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.per_anchor_logits(x), low)
    assert_close(low.float(), naive(net, x), rel=0.05)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("per_image", [None, 2])
def test_gradients_reach_layers_and_images_in_evaluation_mode(frozen, per_image):
    net, x = anchored(per_image=per_image, mean=MEAN, std=STD)
    with torch.no_grad():
        net.per_anchor_logits(x)  # a cache without gradients must not be used
    net.anchored_layer.requires_grad_(not frozen)
    network, layer = literal(net)
    expected = one_by_one(net, network, layer, x.requires_grad_())
    if per_image is not None:
        expected = expected[choose_per_image(x.detach(), K, per_image, 0), torch.arange(B)]
    expected.mean(dim=0)[:, 0].sum().backward()
    gradient, x.grad = x.grad, None
    net(x)[:, 0].sum().backward()
    assert_close(x.grad, gradient)
    assert_close(net.network[-1].weight.grad, network[-1].weight.grad)
    if not frozen:
        for p, q in zip(net.anchored_layer.parameters(), layer.parameters(), strict=True):
            assert_close(p.grad, q.grad)


def test_gradients_reach_what_precedes_the_layer_through_the_anchors_too():
    net, x = cached_net(), rand(B, *IMAGE, seed=2)
    network, layer = literal(net)
    net(x)[:, 0].sum().backward()
    one_by_one(net, network, layer, x, network[0]).mean(dim=0)[:, 0].sum().backward()
    assert_close(net.network[0].weight.grad, network[0].weight.grad)
    assert_close(net.network[0].bias.grad, network[0].bias.grad, rel=1e-8)


def test_a_deep_copy_is_independent_and_a_state_dict_brings_anchors_choice_and_batch_number():
    for mode in MODES:
        net, x = anchored()
        with mode():
            before = net.per_anchor_logits(x)
        copied = copy.deepcopy(net)
        with torch.no_grad():
            net.anchored_layer.layer_c.weight.mul_(2)
            net.anchors.mul_(0.5)
        net.set_statistics(0.1, 0.1)
        with mode():
            assert torch.equal(copied.per_anchor_logits(x), before)
            assert_close(net.per_anchor_logits(x), naive(net, x))
    net, x = anchored(k=7, per_image=2, corruption=None)
    for _ in range(3):
        net.train()(x)
    fresh = kedge.anchor(conv_net())
    version = fresh.anchors_version
    fresh.load_state_dict(net.state_dict())
    assert (fresh.batches_seen, fresh.per_image) == (3, 2)
    assert fresh.anchors_version > version  # a detector can tell
    assert torch.equal(fresh.anchors, net.anchors)
    assert torch.equal(fresh.per_anchor_logits(x), net.per_anchor_logits(x))
    fresh.load_state_dict(anchored(k=K + 3)[0].state_dict())
    assert fresh.per_anchor_logits(x).shape == (K + 3, B, C)
    other = kedge.anchor(conv_net())
    other.load_state_dict(kedge.anchor(conv_net()).state_dict())
    assert (other.anchors, other.per_image, other.has_statistics) == (None, None, False)


# --- the cost: the image's part once per image, the anchors' part once, and no more memory than allowed --------------


def rows_of(module):
    """Record the rows of every call of a module."""
    rows = []
    module.register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    return rows


def test_the_anchors_part_is_computed_once_and_the_image_s_part_once_per_image_and_view():
    net, x = anchored()
    of_image, of_anchor = rows_of(net.anchored_layer.layer_x), rows_of(net.anchored_layer.layer_c)
    with torch.no_grad():
        net.per_anchor_logits(x[:1])  # the first forward checks the network
        net.set_anchors(rand(K, *IMAGE, seed=6))
        of_image.clear()
        of_anchor.clear()
        net.per_anchor_logits(x)
        assert sorted(of_image) == sorted([K, B])  # the anchors need A_x too
        for _ in range(2):
            net.per_anchor_logits(x)
        net.per_anchor_logits(x, tta=2)
        assert of_image[2:] == [B] * 4
        net.memory_cap = 1
        net.per_anchor_logits(x)
        assert of_image[6:] == [1] * B
    net.requires_grad_(False)
    net.per_anchor_logits(x)
    assert of_anchor == [K]
    net.set_anchors(rand(6, *IMAGE), per_image=2)
    net.memory_cap = 2**23
    net.per_anchor_logits(x)
    assert of_anchor[1:] == [len(choose_per_image(x, 6, 2, 0).unique())]


def largest_activation(net, x):
    """Measure the bytes of the largest output of any layer for one image."""
    sizes = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: sizes.append(out[0].numel() * out.itemsize))
        for module in net.network
    ]
    net.per_anchor_logits(x)
    for hook in hooks:
        hook.remove()
    return max(sizes)


@pytest.mark.parametrize("per_image", [None, 3])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 13, 1000])
@torch.no_grad()
def test_a_memory_cap_limits_the_rows_of_a_pass_and_changes_nothing_else(rows, per_image):
    net, x = anchored(k=5, per_image=per_image)[0], rand(11, *IMAGE, seed=2)
    k, whole = per_image or 5, net.per_anchor_logits(x)
    net.memory_cap = 3 * largest_activation(net, x) * rows + 1  # a layer's input, its output and one more
    seen = rows_of(net.network[1])
    assert_close(net.per_anchor_logits(x), whole, rel=1e-6)
    assert max(seen) <= max(1, rows)
    assert sum(seen) == k * 11
    assert max(seen) > rows // 2 or seen == [k * 11]  # the memory is used


@torch.no_grad()
def test_the_cap_holds_for_larger_images_and_higher_precision():
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = kedge.anchor(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), *pool, nn.Linear(4, C)).eval())
    for side in (4, 32):
        x = single(B, 3, side, side)
        net.set_anchors(x[:K])
        net.per_anchor_logits(x)
    net.memory_cap = 3 * 2 * largest_activation(net, x)
    seen = rows_of(net.network[1])
    net.per_anchor_logits(x)
    assert max(seen) == 2
    seen.clear()
    net.double().per_anchor_logits(x.double())
    assert max(seen) == 1


@pytest.mark.parametrize("rows_in_cache", [1, 40, 130])
@pytest.mark.parametrize("batch", [1, 5, 16, 32, 33, 48, 64, 100, 256])
@torch.no_grad()
def test_without_a_cap_a_pass_has_about_as_many_rows_as_fit_into_half_the_cache_and_at_least_32(
    monkeypatch, rows_in_cache, batch
):
    row = 4 * 3 * 128 * 1024 // 4  # bytes of three activations of the network below
    monkeypatch.setattr("kedge.anchoring.anchored.last_cache", lambda: 2 * row * rows_in_cache + 1)
    monkeypatch.setattr("kedge.anchoring.anchored.CAPS", (0, 2**40))
    layers = (nn.Conv2d(1, 32, 1), nn.AvgPool2d(32), nn.Flatten(), nn.Linear(32, C))
    net, x = kedge.anchor(nn.Sequential(*layers).eval()), single(batch, 1, 32, 32)
    net.set_anchors(single(5, 1, 32, 32))
    net.per_anchor_logits(x[:1])  # the first forward checks the network
    seen, rows = rows_of(net.network[1]), max(32, rows_in_cache)
    net.per_anchor_logits(x)
    assert sum(seen) == 5 * batch
    assert max(seen) <= 1.5 * rows
    parts = max(1, round(batch / rows))
    assert min(seen) >= min(batch, rows // 2) or parts > 1  # no pass smaller than one over the images, unless split
    assert len(seen) <= 5 * parts  # and no more passes than K over each part
    if 5 * batch <= rows:
        assert seen == [5 * batch]


# --- training mode ---------------------------------------------------------------------------------------------------


def noise(c):
    return (c + 0.3 * torch.rand_like(c)).clamp(0, 1)


RANDOM = {"init": "fresh", "mask": 0.3, "corruption": noise, "every": 2}


def draws(net, batches, size=9):
    """Train on a few batches and return what each of them drew."""
    result = []
    for number in range(batches):
        output = net.train()(single(size, *IMAGE, seed=number))
        result.append((net.draw.permutation.tolist(), net.draw.corrupted, net.draw.masked.tolist(), output.tolist()))
    return result


@pytest.mark.parametrize("corruption", [noise, "default"], ids=["own", "default"])
def test_the_draws_of_a_batch_depend_on_the_seed_and_its_number_alone(corruption):
    runs = []
    for seed, global_seed in ((0, 1), (0, 2), (5, 1)):
        torch.manual_seed(global_seed)
        net = kedge.anchor(fixed_net(), **(RANDOM | {"corruption": corruption}), seed=seed)
        state = torch.get_rng_state()
        runs.append(draws(net, 4))
        assert torch.equal(torch.get_rng_state(), state)
    assert runs[0] == runs[1]
    assert len({tuple(run[0]) for run in runs[0]}) == 4
    for part in (0, 2):
        assert [run[part] for run in runs[0]] != [run[part] for run in runs[2]]
    for done in (1, 2, 5):  # a saved run goes on with the same draws
        net, resumed = (kedge.anchor(fixed_net(), **(RANDOM | {"corruption": corruption})) for _ in range(2))
        draws(net, done)
        resumed.load_state_dict(copy.deepcopy(net.state_dict()))
        assert draws(resumed, 4) == draws(net, 4)
        assert resumed.batches_seen == done + 4


def test_a_dropout_in_the_network_still_draws_from_the_global_generator():
    module = nn.Sequential(nn.Flatten(), nn.Linear(126, 50), nn.Dropout(), nn.Linear(50, C)).double()
    net, x = kedge.anchor(module, corruption=noise, every=1).train(), rand(B, *IMAGE)
    net(x)
    state, outputs = net.state_dict(), []
    for seed in (1, 1, 2):
        net.load_state_dict(state)
        torch.manual_seed(seed)
        outputs.append(net(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("before", [[], [nn.GroupNorm(3, 3)]], ids=["direct", "after a norm"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_processes_that_share_a_batch_draw_what_one_alone_would(as_bytes, before):
    x = (256 * rand(9, *IMAGE)).byte() if as_bytes else single(9, *IMAGE)
    options = {"init": "fresh", "mean": MEAN, "std": STD, "corruption": noise, "every": 2, "mask": 0.5}
    whole, *ranks = (kedge.anchor(nn.Sequential(*before, *fixed_net()), **options).train() for _ in range(3))
    for corrupted in (False, True):
        expected = whole(x)
        assert whole.draw.corrupted == corrupted
        assert_close(torch.cat([ranks[0](x[:4], among=x), ranks[1](x[4:], among=x, first=4)]), expected)
        for name in ("permutation", "masked"):
            parts = [getattr(net.draw, name) for net in ranks]
            assert [len(part) for part in parts] == [4, 5]
            assert torch.equal(torch.cat(parts), getattr(whole.draw, name))


def test_the_default_corruption_is_for_images_only_and_one_s_own_for_anything():
    for make, shape, corrupted in (
        (conv_net, IMAGE, True),
        (lambda: conv_net(1), (1, 7, 6), True),
        (lambda: nn.Linear(9, C), (9,), False),
        (lambda: with_head(nn.Conv1d(2, 4, 3), shape=(2, 9)), (2, 9), False),
        (lambda: with_head(nn.Conv3d(1, 4, 3), shape=(1, 4, 4, 4)), (1, 4, 4, 4), False),
    ):
        net, seen = kedge.anchor(make().double(), every=2).train(), []
        for _ in range(4):
            net(rand(B, *shape))
            seen.append(net.draw.corrupted)
        assert seen == [False, corrupted] * 2
    for layer, first, shape in ((nn.Linear(9, 6), F.linear, (9,)), (nn.Conv1d(2, 4, 3), F.conv1d, (2, 9))):
        module, x = with_head(layer, shape=shape), rand(B, *shape)
        net = kedge.anchor(module, init="fresh", corruption=lambda c: c.flip(-1), every=1).train()
        output = net(x)
        c = x[net.draw.permutation]
        pair = first(torch.cat([c.flip(-1), x - c], dim=1), wide_weight(net), net.anchored_layer.layer_x.bias)
        assert net.draw.corrupted
        assert_close(output, net.network[1:](pair))


def test_a_corrupted_anchor_is_normalized_by_the_statistics_of_the_images():
    net = kedge.anchor(cached_net().network[0:1].append(conv_net()), init="fresh", corruption=lambda c: 1 - c, every=1)
    net, x = net.double().train(), rand(B, *IMAGE)
    network, layer = literal(net, Concatenation)
    output = net(x)
    c, norm = x[net.draw.permutation], network[0]
    mean, variance = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)
    corrupted, clean, image = (
        F.batch_norm(v, mean, variance, norm.weight, norm.bias, eps=norm.eps) for v in (1 - c, c, x)
    )
    assert_close(output, network[1][1:](layer.wide(torch.cat([corrupted, image - clean], dim=1))))


def test_corrupted_anchors_do_not_change_the_statistics_of_a_norm_before_the_layer():
    for before in ([nn.BatchNorm2d(3)], [nn.BatchNorm2d(3), nn.ReLU(inplace=True)]):
        module = nn.Sequential(*before, *conv_net()).double().train()
        net, alone = kedge.anchor(module, corruption=lambda c: 0.1 * c, every=2), nn.BatchNorm2d(3).double()
        for number in range(30):
            x = rand(B, *IMAGE, seed=number)
            net(x)
            alone(x)
        assert torch.equal(net.network[0].running_var, alone.running_var)
        assert torch.equal(net.network[0].running_mean, alone.running_mean)
        assert net.network[0].num_batches_tracked == 30


def test_where_more_than_layers_precede_it_anchors_pass_in_evaluation_mode():
    body = Function(lambda net, x: net.body(net.norm(x) * 2), norm=nn.BatchNorm2d(3), body=conv_net()).double()
    net = kedge.anchor(body.train(), init="fresh", layer="body.0", corruption=lambda c: 1 - c, every=1)
    x = rand(B, *IMAGE)
    network, layer = literal(net, Concatenation)
    output = net(x)
    alone = copy.deepcopy(network.norm)
    c, at = x[net.draw.permutation], 2 * alone(x)
    corrupted = 2 * network.norm.eval()(1 - c)
    assert_close(output, network.body[1:](layer.wide(torch.cat([corrupted, at - at[net.draw.permutation]], dim=1))))
    assert torch.equal(net.network.norm.running_var, alone.running_var)
    assert all(training_modes(net))


def test_an_error_in_training_names_the_argument_and_leaves_the_network_usable():
    for wrong, shape in (
        (lambda c: c[:, :1], r"\(4, 1, 7, 6\)"),
        (lambda c: c[:2], r"\(2, 3, 7, 6\)"),
        (lambda c: None, "NoneType"),
    ):
        calls = iter([wrong, lambda c: c])
        net, x = kedge.anchor(conv_net(), corruption=lambda c, calls=calls: next(calls)(c), every=1), rand(B, *IMAGE)
        state = torch.get_rng_state()
        with pytest.raises(InputError, match=rf"corruption must keep the shape \(4, 3, 7, 6\), got {shape}"):
            net.train()(x)
        assert torch.equal(torch.get_rng_state(), state)
        assert net(x).shape == (B, C)
    net = kedge.anchor(conv_net()).train()
    for rows, first in ((9, 6), (3, 0), (9, 9)):
        with pytest.raises(InputError, match=rf"among must hold x from row {first} on"):
            net(rand(4, *IMAGE), among=rand(rows, *IMAGE), first=first)
    assert net.batches_seen == 0
    net, y = kedge.anchor(fixed_net(), corruption=None), torch.arange(9) % C
    with pytest.raises(NotReadyError, match="call the network in training mode first"):
        net.targets(y)
    draws(net, 1)
    for labels, message in ((y[:8], r"\(9,\); got \(8,\)"), (torch.arange(9) % 6, "0..5"), (y - 1, "-1..3")):
        with pytest.raises(InputError, match=f"labels must .*{message}"):
            net.targets(labels)


@pytest.mark.parametrize("corruption", [None, Corruption()])
def test_bytes_are_the_floats_that_they_stand_for(corruption):
    x = torch.randint(0, 256, (B, *IMAGE), dtype=torch.uint8)
    options = {"init": "fresh", "mean": MEAN, "std": STD, "corruption": corruption, "every": 1}
    as_bytes, as_floats = (kedge.anchor(fixed_net(), **options).train() for _ in range(2))
    assert torch.equal(as_bytes(x), as_floats(x.float() / 255))
    as_bytes.set_anchors(x[:K])
    as_floats.set_anchors(x[:K].float() / 255)
    assert torch.equal(as_bytes.per_anchor_logits(x), as_floats.per_anchor_logits(x.float() / 255))


# --- the choice of anchors -------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 7])
def test_each_image_sees_the_anchors_chosen_for_it_in_any_batch(seed):
    net, x = anchored(k=8, per_image=3, mean=MEAN, std=STD, seed=seed)
    chosen = choose_per_image(x, 8, 3, seed)
    assert chosen.shape == (3, B)
    expected = naive(net, x)[chosen, torch.arange(B)]  # (3, B, C)
    assert_close(net.per_anchor_logits(x), expected)
    assert_close(net(x), expected.mean(dim=0))
    assert_close(torch.cat([net.per_anchor_logits(image[None]) for image in x], dim=1), expected)
    assert_close(net.per_anchor_logits(x.flip(0)), expected.flip(1))


def test_the_choice_depends_on_the_pixels_alone_uniform_and_without_replacement():
    state = torch.get_rng_state()
    x = torch.randint(0, 256, (30, *IMAGE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together = choose_per_image(x, 50, 5, 0)
    assert torch.equal(torch.cat([choose_per_image(image[None], 50, 5, 0) for image in x], dim=1), together)
    for dtype in (torch.float32, torch.float64):
        near = x.to(dtype) / 255 + 1e-6 * (rand(30, *IMAGE, dtype=dtype) - 0.5)
        assert torch.equal(choose_per_image(near, 50, 5, 0), together)
    assert torch.equal(torch.get_rng_state(), state)
    x = rand(300, *IMAGE)
    chosen, many = choose_per_image(x, 20, 5, 0), choose_per_image(x, 1000, 5, 0)
    assert all(len(column.unique()) == 5 for column in chosen.T)
    assert torch.bincount(chosen.flatten(), minlength=20).min() > 40  # 75 expected
    assert len({tuple(column.tolist()) for column in many.T}) == 300
    assert not torch.equal(choose_per_image(x, 1000, 5, 1), many)
    x[0, 0, 0, 0] = (x[0, 0, 0, 0] + 0.5) % 1  # one pixel
    assert not torch.equal(choose_per_image(x[:1], 1000, 5, 0), many[:, :1])


def test_anchors_drawn_from_a_shuffled_loader_come_from_the_seed_alone():
    loader, rule = DataLoader(TensorDataset(rand(40, *IMAGE)), batch_size=8, shuffle=True), Preprocess(IMAGE)
    state = torch.get_rng_state()
    first, again, other = (choose(loader, rule, 4, "random", seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def moved(images, step):
    """Shift by one pixel along a diagonal, a pixel at a time; beyond the border lies the image, mirrored."""
    size, out = images.shape[-1], torch.empty_like(images)
    inside = {-1: 1, size: size - 2} | {i: i for i in range(size)}
    for h in range(size):
        for w in range(size):
            out[..., h, w] = images[..., inside[h + step], inside[w + step]]
    return out


@pytest.mark.parametrize("tta", [2, 6])
@pytest.mark.parametrize("per_image", [None, 3])
def test_anchors_are_paired_with_augmented_views_in_turn(per_image, tta):
    shape = (3, 16, 16)
    net, _ = anchored(with_head(nn.Conv2d(3, 4, 3), shape=shape), shape, k=5, per_image=per_image)
    rising = torch.linspace(0, 1, 16, dtype=torch.float64)  # to the right
    images = rand(6, *shape) * rising
    net.set_anchors(net.anchors * rising, per_image=per_image)
    mirrored = images.flip(3)
    views = [images, mirrored, moved(images, -1), moved(mirrored, 1), moved(images, 1), moved(mirrored, -1)][:tta]
    expected = [net.per_anchor_logits(view, like=images) for view in views]
    actual = net.per_anchor_logits(images, tta=tta)
    for k, row in enumerate(actual):
        assert_close(row, expected[k % tta][k])
        assert k % tta == 0 or differ(row, expected[0][k])  # else nothing would have been tested
    assert_close(net.per_anchor_logits(images, tta=tta, which=[1, 2]), actual[1:3])
    with pytest.raises(InputError, match="tta must be one of 1, 2, 6; got 3"):
        net.per_anchor_logits(images, tta=3)
    for which in ([], [0, 5], [-1]):
        with pytest.raises(InputError, match="which must hold numbers of anchors"):
            net.per_anchor_logits(images, which=which)
    for shape in [(2, 3, 5), (2, 3, 1, 1), (2, 3, 1, 4), (2, 3, 4, 4, 4)]:
        assert {view(torch.rand(shape), number).shape for number in range(VIEWS)} == {torch.Size(shape)}
    assert view(torch.arange(5)[None, None], 2).tolist() == [[[1, 0, 1, 2, 3]]]


# --- errors, modes and threads in evaluation -------------------------------------------------------------------------


def test_wrong_images_are_an_error_and_count_for_nothing():
    net, _ = anchored()
    for x, message in (
        (rand(*IMAGE), r"shape of the anchors, \(B, 3, 7, 6\); got \(3, 7, 6\).*x\[None\]"),
        (rand(B, 3, 8, 6), r"\(B, 3, 7, 6\); got \(4, 3, 8, 6\)"),
        (rand(0, *IMAGE), r"at least one image, got \(0, 3, 7, 6\)"),
        (torch.ones(B, *IMAGE, dtype=torch.long), "uint8 or floating point tensor, got torch.int64"),
        (rand(B, *IMAGE).numpy(), "uint8 or floating point tensor, got float64"),
        ([1, 2], "uint8 or floating point tensor, got list"),
        (rand(7), r"x must be \(B, D, ...\) with at least one image, got \(7,\)"),
    ):
        for call in (net.eval(), net.per_anchor_logits) + (() if "7, 6" in message[:40] else (net.train(),)):
            with pytest.raises(InputError, match=message):
                call(x)
    assert net.batches_seen == 0


def test_anchors_are_checked_and_kept_as_a_copy_in_the_network_s_precision():
    net, _ = anchored()
    before, version = net.anchors, net.anchors_version
    for anchors, per_image, message in (
        (rand(7), None, r"anchors must be a tensor \(K, D, ...\) with at least one image, got \(7,\)"),
        (rand(0, *IMAGE), None, "at least one image"),
        ([[0.1, 0.2]], None, "anchors must be a tensor .*, got list"),
        (torch.ones(K, *IMAGE, dtype=torch.long), None, "anchors must be uint8 or floating point, got torch.int64"),
        (torch.full((K, *IMAGE), float("nan")), None, "anchors must be finite"),
        (rand(K, *IMAGE), K + 1, "per_image must be at most the number of anchors, 3; got 4"),
        (rand(K, *IMAGE), 1, "per_image must be a whole number of at least 2; got 1"),
    ):
        with pytest.raises(InputError, match=message):
            net.set_anchors(anchors, per_image=per_image)
        assert net.anchors is before
        assert net.anchors_version == version
    for dtype in (torch.float32, torch.float64):
        given = rand(K, *IMAGE, dtype=dtype).requires_grad_()
        net.set_anchors(given)
        given.data.zero_()
        assert not net.anchors.requires_grad
        assert torch.equal(net.anchors, rand(K, *IMAGE, dtype=dtype).double())


def test_a_network_that_is_not_ready_is_an_error_with_the_way_out():
    net, x = kedge.anchor(conv_net()), rand(B, *IMAGE)
    for call in (net.eval(), net.per_anchor_logits):
        with pytest.raises(NotReadyError, match=r"no anchors.*set_anchors\(images\).*fit a detector"):
            call(x)
    with pytest.raises(NotReadyError, match="call the Anchored module, not the network inside it"):
        net.network(x)
    net, x = anchored(nn.Sequential(nn.Conv2d(3, 4, 3)).double().eval())
    with pytest.raises(InputError, match=r"must return logits \(B, C\).*got \(12, 4, 5, 4\)"):
        net(x)


@pytest.mark.parametrize("features", [80, 99], ids=["", "after an error"])
def test_evaluation_puts_the_modes_of_single_modules_back(features):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(features, C))
    module = module.double().train()
    module[1].eval()
    net, x = kedge.anchor(module, init="fresh"), rand(B, *IMAGE)
    net.set_anchors(rand(K, *IMAGE, seed=1))
    before, statistics = training_modes(net), net.network[1].running_mean.clone()
    if features == 99:
        with pytest.raises(RuntimeError):
            net.per_anchor_logits(x)
    else:
        assert_close(net.per_anchor_logits(x), naive(net, x))
    assert training_modes(net) == before
    assert torch.equal(net.network[1].running_mean, statistics)


@pytest.mark.parametrize("per_image", [None, 2])
def test_eight_threads_may_share_a_network_also_one_that_was_never_run(per_image, monkeypatch):
    survey = anchoring_survey.survey

    def slow(network, forward):
        return survey(network, lambda: [time.sleep(0.01), forward(), time.sleep(0.01)])

    monkeypatch.setattr(anchoring_survey, "survey", slow)
    batches = [single(4 + n, *IMAGE, seed=n) for n in range(8)]
    module, interval = nn.Sequential(nn.BatchNorm2d(3), *fixed_net()), sys.getswitchinterval()
    alone, shared = (anchored(module, dtype=torch.float32, per_image=per_image)[0] for _ in range(2))
    with torch.no_grad():
        expected = [alone(x) for x in batches]

    @torch.no_grad()
    def worker(number):
        return all(torch.allclose(shared(batches[number]), expected[number], atol=1e-5) for _ in range(60))

    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(pool.map(worker, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert all(p.requires_grad for p in shared.parameters())


# --- a network as plain data, and built again ------------------------------------------------------------------------


def again(net, model=None, state=()):
    """Describe a network, pass the description through JSON, and build it again."""
    return rebuild(json.loads(json.dumps(describe(net))), net.state_dict() | dict(state), model)


def compact(dtype=torch.float32):
    return build("compact", width=4, classes=C).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kedge_s_own_networks_are_built_again(dtype):
    options = {"mean": MEAN, "std": STD, "every": 3, "mask": 0.1, "seed": 4}
    net, x = anchored(compact(dtype), (3, 8, 8), dtype=dtype, per_image=2, **options)
    net.record = {"epochs_done": 2}
    rebuilt = again(net)
    assert torch.equal(rebuilt.per_anchor_logits(x), net.per_anchor_logits(x))
    assert (rebuilt.options, rebuilt.record) == (net.options, net.record)
    assert rebuilt.has_statistics
    assert not rebuilt.training
    unanchored = kedge.Classifier(compact()).eval()
    assert torch.equal(again(unanchored)(x.float()), unanchored(x.float()))
    assert not again(unanchored).has_statistics
    assert again(kedge.Classifier(compact(), mean=0.0, std=1.0)).has_statistics  # no normalisation, on purpose
    for corruption in ("default", "authors", None, Corruption(crop_scale=(0.08, 1)), noise):
        expected = None if corruption is noise else corruption  # a function is not in the file
        assert again(kedge.anchor(compact(), corruption=corruption)).options.corruption == expected


@pytest.mark.parametrize("make", [conv_net, lambda: backwards().double(), lambda: nn.Linear(126, C).double()])
def test_other_networks_are_built_again_from_a_fresh_one(make):
    module = make()
    shape = (126,) if isinstance(module, nn.Linear) else IMAGE
    net, x = anchored(module, shape, example=rand(1, *shape))
    for model in (make(), kedge.anchor(make(), example=x)):
        assert torch.equal(again(net, model).per_anchor_logits(x), net.per_anchor_logits(x))


def test_a_state_or_a_network_that_does_not_fit_the_description_is_an_error():
    net, _ = anchored(compact(), (3, 8, 8), dtype=torch.float32, per_image=2)
    for wrong in ([-1, 2], [0, 4], [0, 1], [0, -2], [0], [0.0, 2.0]):
        with pytest.raises(FileFormatError, match="0 or 2 to 3; got"):
            again(net, state={"_extra_state": torch.tensor(wrong)})
    with pytest.raises(InputError, match="anchors must be finite"):
        again(net, state={"anchors": torch.full((3, 3, 8, 8), float("nan"))})
    other, unanchored = kedge.anchor(conv_net()), kedge.Classifier(compact())
    with pytest.raises(InputError, match="model must be given for this file, which holds the weights of a Sequential"):
        again(other)
    with pytest.raises(InputError, match="it is anchored"):
        again(unanchored, kedge.anchor(compact()))
    with pytest.raises(InputError, match="model must be the Compact that was saved; its weights do not fit"):
        again(unanchored, build("compact", width=8, classes=C))
