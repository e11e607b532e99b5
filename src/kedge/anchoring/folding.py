"""Batch norms folded into the layers before them: the same function with less work, for inference."""

import copy
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kedge.anchoring.layer import AnchoredLayer
from kedge.models.classifier import Classifier

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
POOL_FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


class _Tracer(fx.Tracer):
    """Traces into a network's own modules, but not into an anchored layer."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, AnchoredLayer) or super().is_leaf_module(module, name)


def folded(net: Classifier) -> Classifier:
    """A copy of a network for inference, with batch norms folded into the convolutions before them.

    Exact but for rounding. A norm behind max pooling is folded through it if its scale is positive. What cannot be
    traced, is used twice or follows no convolution stays as it is.

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
    try:
        nodes = list(_Tracer().trace(fast.network).nodes)
    except Exception:
        return fast
    modules = dict(fast.network.named_modules())
    used = Counter(str(node.target) for node in nodes if node.op == "call_module")
    for node in nodes:
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, NORMS) or used[str(node.target)] != 1 or norm.running_var is None:
            continue
        before, pooled = _before(node, modules)
        if before is None or used[before] != 1:
            continue
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.double()
        if not pooled or bool((scale > 0).all()):
            _fold(modules[before], norm, scale)
            fast.network.set_submodule(str(node.target), nn.Identity())
    return fast


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
    """Whether it is torch's own convolution, or an anchored one; a norm behind a linear layer may be that of tokens."""
    layer = layer.layer_x if isinstance(layer, AnchoredLayer) else layer
    if layer is None or type(layer) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    return set(layer._parameters) == {"weight", "bias"}


def _is_pool(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), POOLS)
    return node.op == "call_function" and node.target in POOL_FUNCTIONS


@torch.no_grad()
def _fold(layer: Any, norm: Any, scale: Tensor) -> None:
    if isinstance(layer, AnchoredLayer):
        _scale_weight(layer.layer_c, scale)
        layer = layer.layer_x
    shift = -norm.running_mean.double() * scale + (0 if norm.bias is None else norm.bias.double())
    shift = shift + (0 if layer.bias is None else layer.bias.double() * scale)
    _scale_weight(layer, scale)
    layer.bias = nn.Parameter(shift.to(layer.weight), requires_grad=False)


def _scale_weight(layer: Any, scale: Tensor) -> None:
    weight = layer.weight
    scaled = (weight.double() * scale.view(-1, *(1,) * (weight.ndim - 1))).to(weight)
    layer.weight = nn.Parameter(torch.empty_like(weight).copy_(scaled), requires_grad=False)  # in its memory format
