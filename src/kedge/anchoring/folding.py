"""Batch norms folded into the layers before them: the same function with fewer steps, for inference."""

import copy
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kedge.anchoring.stem import Stem
from kedge.models.classifier import Classifier

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
POOL_FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


class _Tracer(fx.Tracer):
    """Looks into a network's own modules, but not into the first layer of an anchored one, which asks for its job."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, Stem) or super().is_leaf_module(module, name)


def folded(net: Classifier) -> Classifier:
    """A copy of a network for inference, in which convolutions do the work of the batch norms behind them.

    Exact but for rounding. A norm behind a maximum pooling is folded through it where its scale is positive. What
    cannot be traced, is used twice or follows no convolution stays as it is.

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
        layer = None if before is None else modules.get(str(before.target))
        if before is None or layer is None or used[str(before.target)] != 1:
            continue
        scale = _scale(norm)
        if pooled and not bool((scale > 0).all()):
            continue
        _fold(layer, norm, scale)
        fast.network.set_submodule(str(node.target), nn.Identity())
    return fast


def _before(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[fx.Node | None, bool]:
    """The layer whose output alone goes into a norm, if any, and whether it goes through a maximum pooling."""
    before: Any = node.args[0] if node.args else node.kwargs.get("input")
    pooled = isinstance(before, fx.Node) and _is_pool(before, modules) and len(before.users) == 1
    if pooled:
        before = before.args[0]
    if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
        return None, False
    layer = modules.get(str(before.target))
    # Not their children, which may do more; and no linear layer, behind which a norm may be that of tokens.
    known = type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) or (isinstance(layer, Stem) and layer.weight.ndim > 2)
    own = {"bias", *layer._parameters} if known and layer is not None else set()  # a stem may have no place for a bias
    return (before, pooled) if own == {"weight", "bias"} else (None, False)


def _is_pool(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), POOLS)
    return node.op == "call_function" and node.target in POOL_FUNCTIONS


def _scale(norm: nn.Module) -> Tensor:
    assert isinstance(norm, NORMS)
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    return scale if norm.weight is None else scale * norm.weight.double()


@torch.no_grad()
def _fold(layer: Any, norm: Any, scale: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    if bias is not None:
        shift = shift + bias.double() * scale
    rows = scale.view(-1, *(1,) * (weight.ndim - 1))
    layer.weight = nn.Parameter((weight.double() * rows).to(weight), requires_grad=False)
    layer.bias = nn.Parameter(shift.to(weight), requires_grad=False)
    if weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
