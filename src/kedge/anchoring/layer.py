"""The anchored layer: two layers in place of one affine layer A, which together compute A on [c, x - c].

``[c, x - c] -> A_x(x - c) + A_c0(c) = A_x(x) + (A_c0(c) - A_x0(c))``, where A_x is the original layer, A_c a copy and
A0 is A without its constant. So the image's part is computed once per image and the anchors' part once for all images.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from kedge.checks import one_of
from kedge.errors import ArchitectureError, NotReadyError
from kedge.models.classifier import evaluating
from kedge.seeds import seeded

INITS = ("preserve", "fresh")
TORCH_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass
class Call:
    """What the anchored layer must do in one forward pass; by itself it applies A_x and keeps what reached it."""

    reached: Tensor | None = field(default=None, init=False)


@dataclass
class Pairs(Call):
    """Training: image i takes image ``permutation[i]`` of its batch as anchor."""

    permutation: Tensor
    clean: Tensor | None = None  # the anchors as they reach the layer, if they are not in this batch
    corrupted: Tensor | None = None  # T(c)
    corrupt: Callable[[Tensor], Tensor] | None = None  # T, if it acts on anchors as they reach the layer
    masked: Tensor | None = None  # the pairs whose anchor half is zero


@dataclass
class Folded(Call):
    """Evaluation: the batch holds B images, once per anchor."""

    images: int
    maps: Tensor  # the anchors' parts, (K, 1 or B, ...)
    views: Sequence[int]  # the augmented view that each anchor is paired with
    image_parts: dict[int, Tensor] = field(default_factory=dict)  # by view; kept for the next group of anchors


@dataclass
class Multiplied(Call):
    """Evaluation of each image once up to the layer, and of every pair of image and anchor behind it; see `inner`."""

    maps: Tensor  # the anchors' parts, (K, 1 or B, ...)


@dataclass
class OneAnchor(Call):
    """Evaluation of each image once, with one anchor's part for all of them or one each; see `inner`."""

    part: Tensor  # (1 or B, ...)


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)  # each thread has its own


@contextlib.contextmanager
def calling(call: Call) -> Iterator[None]:
    """Run the anchored network inside the block as ``call`` describes; threads do not see each other's calls."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


class AnchoredLayer(nn.Module):
    """Takes the place of an affine layer: ``layer_x`` is A_x, for the residual, ``layer_c`` is A_c, for the anchor.

    ``layer_c`` has no bias if it is one of torch's own layers. ``init`` and ``seed`` are those of `kedge.anchor`.
    """

    def __init__(self, layer: nn.Module, init: str, seed: int) -> None:
        super().__init__()
        self.layer_x, self.layer_c = layer, copy.deepcopy(layer)
        if one_of("init", init, INITS) == "fresh":
            _draw(self.layer_x, self.layer_c, seed)
        if _adds_bias(self.layer_c):
            self.layer_c.register_parameter("bias", None)
        self.requires_grad_(True)
        self.training = layer.training

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original layer, which networks read, such as the dtype of its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer_x"), name)

    def anchor_maps(self, anchors: Tensor) -> Tensor:
        """A_c0(c) - A_x0(c) of anchors as they reach the layer: (K, ...) -> (K, ...)."""
        return linear_part(self.layer_c, anchors) - linear_part(self.layer_x, anchors)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the pair to [c, x - c], with the anchors of the current call."""
        call = _CALL.get()
        if call is None:
            raise NotReadyError(
                "the anchored layer needs its anchors: call the Anchored module, not the network inside it"
            )
        call.reached = x
        if isinstance(call, Folded):
            return self._folded(x, call)
        if isinstance(call, Multiplied):
            return cast(Tensor, self.layer_x(x) + call.maps).flatten(0, 1)  # (B, ...) -> (K * B, ...)
        if isinstance(call, OneAnchor):
            return cast(Tensor, self.layer_x(x) + call.part)
        if not isinstance(call, Pairs):
            return cast(Tensor, self.layer_x(x))
        _check_rows(x, len(call.permutation))
        clean = x[call.permutation] if call.clean is None else call.clean
        anchors = clean if call.corrupted is None else call.corrupted
        if call.corrupt is not None:
            anchors = call.corrupt(anchors)
        if call.masked is not None:
            anchors = anchors.masked_fill(call.masked.view((-1,) + (1,) * (x.ndim - 1)), 0)
        return cast(Tensor, self.layer_x(x - clean) + linear_part(self.layer_c, anchors))

    def _folded(self, x: Tensor, call: Folded) -> Tensor:
        _check_rows(x, len(call.maps) * call.images)
        for number, rows in zip(call.views, x.split(call.images), strict=True):
            if number not in call.image_parts:
                call.image_parts[number] = self.layer_x(rows)  # (B, ...)
        parts = [call.image_parts[number] for number in call.views]
        both = (parts[0] if len(set(call.views)) == 1 else torch.stack(parts)) + call.maps
        return both.flatten(0, 1)  # (K, B, ...) -> (K * B, ...)


def linear_part(layer: nn.Module, x: Tensor) -> Tensor:
    """A0(x) = A(x) - A(0) of an affine layer."""
    if not _adds_bias(layer):
        return cast(Tensor, layer(x) - layer(torch.zeros_like(x[:1])))
    if layer.bias is None:
        return cast(Tensor, layer(x))
    bare = object.__new__(type(layer))  # the same layer over the same weights, for this call and thread alone
    bare.__dict__ = {**vars(layer), "_parameters": {**layer._parameters, "bias": None}}
    return cast(Tensor, bare(x))


def is_quantized(module: nn.Module) -> bool:
    """Whether it is one of torch's quantized layers, which pack their weights away."""
    return "quantized" in type(module).__module__


def check_can_be_anchored(layer: nn.Module, name: str) -> None:
    """Raise an `ArchitectureError` if a layer cannot be one of a pair, whatever its input."""
    if is_quantized(layer):
        raise ArchitectureError(
            f"{name} is a quantized {type(layer).__name__}; anchor the float network and quantize afterwards"
        )
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        raise ArchitectureError(f"{name} is lazy and has no weights yet; run one batch through the network first")
    for module in layer.modules():
        if isinstance(module, (_BatchNorm, _DropoutNd)) or getattr(module, "stochastic", False):
            raise ArchitectureError(
                f"{name} contains a {type(module).__name__}, so that it is not one affine function in training; pass "
                "layer= with the name of another layer, or anchor the network before it is converted"
            )


def check_affine(layer: nn.Module, name: str, like: Tensor) -> None:
    """Raise an `ArchitectureError` unless A(a u + (1 - a) v) = a A(u) + (1 - a) A(v) for random u, v like ``like``."""
    like = like.to(next((p.dtype for p in layer.parameters()), like.dtype))
    u, v = torch.randn((2, 2, *like.shape[1:]), generator=torch.Generator().manual_seed(0)).to(like)
    with evaluating(layer), torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        outputs = [layer(z) for z in (u, v, 1.5 * u - 0.5 * v)]
    if all(isinstance(output, Tensor) for output in outputs):
        expected = 1.5 * outputs[0] - 0.5 * outputs[1]
        close = max(1e-4, 30 * torch.finfo(like.dtype).eps) * expected.abs().max()
        if bool((outputs[2] - expected).abs().max() <= close):
            return
    raise ArchitectureError(
        f"{name} is a {type(layer).__name__} that is not affine in its input, so that it cannot be anchored; pass "
        "layer= with the name of a layer that is, such as a convolution, a linear layer or a patch embedding"
    )


def _adds_bias(layer: nn.Module) -> bool:
    """Whether a layer computes what torch's own layers do, which is linear once its bias is None."""
    kind = next((kind for kind in TORCH_LAYERS if isinstance(layer, kind)), None)
    same = all(getattr(type(layer), name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward"))
    return kind is not None and same and "bias" in layer._parameters


def _check_rows(x: Tensor, images: int) -> None:
    if len(x) != images:
        raise ArchitectureError(
            f"the anchored layer must see one row per image; it saw {len(x)} rows for {images} images. "
            "The layers before it change the batch dimension: pass a layer= that comes earlier"
        )


def _draw(layer_x: Any, layer_c: Any, seed: int) -> None:
    """Draw new weights, for torch's own layers and subclasses as torch would for twice the inputs."""
    if parametrize.is_parametrized(layer_x) or not callable(getattr(layer_x, "reset_parameters", None)):
        raise ArchitectureError(
            f'init="fresh" needs a layer whose reset_parameters() draws its weights; {type(layer_x).__name__} has '
            'none, or computes its weight from other parameters: use init="preserve"'
        )
    with seeded(seed):
        if not isinstance(layer_x, TORCH_LAYERS):
            layer_x.reset_parameters()
            layer_c.reset_parameters()
            return
        weight, wide = layer_x.weight, copy.deepcopy(layer_x).cpu()
        wide.weight = nn.Parameter(torch.cat([wide.weight, wide.weight], dim=1).detach())
        wide.reset_parameters()
    with torch.no_grad():
        layer_c.weight.copy_(wide.weight[:, : weight.shape[1]])
        weight.copy_(wide.weight[:, weight.shape[1] :])
        if layer_x.bias is not None:
            layer_x.bias.copy_(cast(Tensor, wide.bias))
