"""Batch norms folded into the layers before them: the same function with less work, for inference."""

import copy
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kedge.anchoring.layer import AnchoredLayer
from kedge.models.classifier import Classifier
from kedge.models.graph import CONSTANTS, StoredGraph

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
CLOSE = 1e-4  # of the largest output
POOL_FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


class _Tracer(fx.Tracer):
    """Traces into a network's own modules, but not into an anchored layer, nor into kinds of convolution and norm."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, (AnchoredLayer, *CONVOLUTIONS, *NORMS)) or super().is_leaf_module(module, name)


def folded(net: Classifier) -> Classifier:
    """A copy of a network for inference, with batch norms folded into the convolutions before them.

    Exact but for rounding. A norm behind max pooling is folded through it if its scale is positive. Of a norm with
    layers inside, such as timm's with an activation, these remain. What cannot be traced, is used twice or follows no
    convolution stays as it is.

    Args:
        net: In evaluation mode; stays as it is.

    Example:
        >>> from kedge.models import build
        >>> net = Classifier(build("compact", width=4)).eval()
        >>> x = torch.rand(2, 3, 32, 32)
        >>> bool(torch.allclose(folded(net)(x), net(x), atol=1e-5))
        True
    """
    fast = copy.deepcopy(net).eval()
    if isinstance(fast.network, StoredGraph):
        _fold_graph(fast.network)
        return fast
    try:
        nodes = list(_Tracer().trace(fast.network).nodes)
    except Exception:
        return fast
    modules = dict(fast.network.named_modules())
    used = Counter(str(node.target) for node in nodes if node.op == "call_module")
    for node in nodes:
        norm: Any = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, NORMS) or used[str(node.target)] != 1 or norm.running_var is None:
            continue
        before, pooled = _before(node, modules)
        if before is None or used[before] != 1:
            continue
        scale, shift = _scale_and_shift(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        if pooled and not bool((scale > 0).all()):
            continue
        layer, rest = copy.deepcopy(modules[before]), _without_norm(norm)
        _fold(layer, scale, shift)
        if _same(layer, rest, modules[before], norm):
            modules[before] = layer
            fast.network.set_submodule(before, layer)
            fast.network.set_submodule(str(node.target), rest)
    return fast


def _without_norm(norm: nn.Module) -> nn.Module:
    """What a norm does after it has normalised: nothing if it is torch's own, otherwise the layers inside it."""
    return nn.Identity() if type(norm) in NORMS else nn.Sequential(*norm.children())


def _same(layer: Any, rest: nn.Module, unfolded: Any, norm: Any) -> bool:
    """Whether folding is right, by the output for noise where a layer or its norm has a forward of its own."""
    layer, unfolded = (each.layer_x if isinstance(each, AnchoredLayer) else each for each in (layer, unfolded))
    if type(layer) in CONVOLUTIONS and type(norm) in NORMS:
        return True
    weight = layer.weight
    sides = [(size - 1) * each + 4 for size, each in zip(weight.shape[2:], layer.dilation, strict=True)]
    shape = (2, layer.in_channels, *sides)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight)
    try:
        with torch.no_grad():
            expected: Tensor = norm(unfolded(noise))
            output: Tensor = rest(layer(noise))
    except Exception:  # of a layer that takes images of one size alone
        return False
    return output.shape == expected.shape and bool((output - expected).abs().max() <= CLOSE * expected.abs().max())


def _before(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str | None, bool]:
    """The layer whose output alone goes into a norm, if any, and whether it goes through max pooling."""
    before: Any = node.args[0] if node.args else node.kwargs.get("input")
    pooled = isinstance(before, fx.Node) and _is_pool(before, modules) and len(before.users) == 1
    if pooled:
        before = before.args[0]
    if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
        return None, False
    name = str(before.target)
    return (name, pooled) if _can_fold(modules.get(name)) else (None, False)


def _can_fold(layer: nn.Module | None) -> bool:
    """Whether it is a convolution, or an anchored one; a norm behind a linear layer may be that of tokens."""
    layer = layer.layer_x if isinstance(layer, AnchoredLayer) else layer
    return isinstance(layer, CONVOLUTIONS) and set(layer._parameters) == {"weight", "bias"}


def _is_pool(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), POOLS)
    return node.op == "call_function" and node.target in POOL_FUNCTIONS


@torch.no_grad()
def _scale_and_shift(
    mean: Any, variance: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """What a norm multiplies by and adds, per channel, in double precision."""
    scale = (variance.double() + eps).rsqrt() * (1 if weight is None else weight.double())
    return scale, (0 if bias is None else bias.double()) - mean.double() * scale


def _fold(layer: Any, scale: Tensor, shift: Tensor) -> None:
    if isinstance(layer, AnchoredLayer):
        of_anchor: Any = layer.layer_c
        of_anchor.weight = nn.Parameter(_scaled(of_anchor.weight, scale), requires_grad=False)
        layer = layer.layer_x
    layer.bias = nn.Parameter(_shifted(layer.bias, scale, shift, layer.weight), requires_grad=False)
    layer.weight = nn.Parameter(_scaled(layer.weight, scale), requires_grad=False)


@torch.no_grad()
def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    scaled = (weight.double() * scale.view(-1, *(1,) * (weight.ndim - 1))).to(weight)
    return torch.empty_like(weight).copy_(scaled)  # in its memory format


@torch.no_grad()
def _shifted(bias: Tensor | None, scale: Tensor, shift: Tensor, like: Tensor) -> Tensor:
    return (shift if bias is None else shift + bias.double() * scale).to(like)


def _fold_graph(graph: StoredGraph) -> None:
    """Take out the batch norms of a stored graph that alone follow a convolution."""
    nodes = copy.deepcopy(graph.document["nodes"])
    at = {name: number for number, (name, *_) in enumerate(nodes)}
    values, tensors = graph.uses()
    state = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    made: dict[str, Tensor] = {}
    for number, (name, target, args, _) in enumerate(nodes):
        if target != "aten.batch_norm.default" or args[5] is not False or not args[3]:
            continue
        before = args[0]["node"]
        while values[before] == 1 and before in at and graph.passes_on(nodes[at[before]][1]):
            before = nodes[at[before]][2][0]["node"]  # the marks of layers that only have a name
        if values[before] != 1 or before not in at:
            continue
        _, kind, given, options = nodes[at[before]]
        weight, bias, mean, variance = (None if each is None else state[each["tensor"]] for each in args[1:5])
        scale, shift = _scale_and_shift(mean, variance, weight, bias, args[7])
        layer = graph.get_submodule(kind.removeprefix("layer.")) if kind.startswith("layer.") else None
        if layer is not None and _can_fold(layer):
            _fold(layer, scale, shift)
        elif (
            kind.startswith("aten.conv")
            and "transpose" not in kind
            and not options
            and tensors[given[1]["tensor"]] == 1
        ):
            old, own = state[given[1]["tensor"]], f"{CONSTANTS}.folded{number}"
            own_bias = None if len(given) < 3 or given[2] is None else state[given[2]["tensor"]]
            made[f"{own}_weight"] = _scaled(old, scale)
            made[f"{own}_bias"] = _shifted(own_bias, scale, shift, old)
            given[1:3] = [{"tensor": f"{own}_weight"}, {"tensor": f"{own}_bias"}]
        else:
            continue
        nodes[number] = [name, "aten.alias.default", args[:1], {}]
    graph.rewrite(nodes, made)
