"""The widened first layer: it receives x alone and adds the anchor's part itself.

A first layer is affine, so ``stem([c, x - c]) = W_x * x + (W_c - W_x) * c + b``: the image's part is computed once per
image, the anchors' part once for all images.
"""

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.checks import one_of
from kedge.errors import ArchitectureError, NotReadyError
from kedge.seeds import seeded

INITS = ("preserve", "fresh")
SUPPORTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class Captured(Exception):  # noqa: N818 -- a signal to stop early, not an error
    """Carries what reached the stem out of a forward pass that need not go on."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclass
class Capture:
    """Stop at the stem and hand back what reached it."""


@dataclass
class Pair:
    """Training: image i takes image ``permutation[i]`` of its batch as anchor.

    ``clean`` holds the anchors as they reach the stem where they are not in this batch; ``corrupted`` holds T(c);
    ``masked`` marks the pairs whose anchor half is zero.
    """

    permutation: Tensor
    clean: Tensor | None = None
    corrupted: Tensor | None = None
    masked: Tensor | None = None


@dataclass
class Fold:
    """Evaluation: the batch holds B images, once per anchor; ``maps`` are the anchors' parts, (K, 1 or B, ...).

    ``views`` has the number of the view that each anchor is held against.
    """

    images: int
    maps: Tensor
    views: Sequence[int]
    image_parts: dict[int, Tensor] = field(default_factory=dict)  # by view; kept for the next group of anchors


Job = Capture | Pair | Fold
_JOBS = threading.local()  # a stem's job by its id; not in the stem, which may be used by several threads and copied


class Stem(nn.Module):
    """Takes the place of a network's first layer; its weight has the anchor's half first.

    Args:
        layer: The layer to widen.
        init: ``"preserve"`` gives both halves the layer's weights; ``"fresh"`` draws new ones.
        seed: For ``"fresh"``.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, init: str, seed: int) -> None:
        super().__init__()
        check_supported(layer, "the layer")
        weight, bias = cast(nn.Parameter, layer.weight), cast("nn.Parameter | None", layer.bias)
        self.split = weight.shape[1]  # channels, or features of a Linear
        self.channel_dim = -1 if isinstance(layer, nn.Linear) else 1
        # Stride, padding and dilation of the layer without its weights; in a tuple, so that it is no submodule.
        self._geometry = (copy.deepcopy(layer).to("meta"),)
        if one_of("init", init, INITS) == "fresh":
            self.weight, self.bias = _fresh(layer, seed)
        else:
            self.weight = nn.Parameter(torch.cat([weight.detach(), weight.detach()], dim=1))
            self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.training = layer.training

    @property
    def job(self) -> Job | None:
        """What the current thread asks of this stem."""
        return vars(_JOBS).get(str(id(self)))

    @contextlib.contextmanager
    def doing(self, job: Job) -> Iterator[None]:
        """Apply the stem for a job inside the block. Threads have jobs of their own, so they may share a network."""
        try:
            vars(_JOBS)[str(id(self))] = job
            yield
        finally:
            del vars(_JOBS)[str(id(self))]

    def extra_repr(self) -> str:
        """Describe the layer that was widened."""
        return f"anchored {self._geometry[0]}"

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer's own geometry with other weights."""
        layer = self._geometry[0]
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, bias)
        convolution = cast("nn.Conv1d | nn.Conv2d | nn.Conv3d", layer)
        return cast(Tensor, convolution._conv_forward(x, weight, bias))

    def layer(self, weight: Tensor) -> nn.Module:
        """A plain layer of the same geometry with other weights, for as many inputs as these have."""
        made = copy.deepcopy(self._geometry[0]).to_empty(device=weight.device)
        made.weight = nn.Parameter(weight.detach().clone())
        made.register_parameter("bias", None if self.bias is None else nn.Parameter(self.bias.detach().clone()))
        setattr(made, "in_features" if isinstance(made, nn.Linear) else "in_channels", weight.shape[1])
        return made

    def anchor_maps(self, anchors: Tensor) -> Tensor:
        """(W_c - W_x) * c for anchors as they reach the stem: (K, ...) -> (K, ...)."""
        return self.affine(anchors, self.weight[:, : self.split] - self.weight[:, self.split :], None)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [c, x - c], for the anchors of the current job."""
        job = self.job
        if isinstance(job, Capture):
            raise Captured(x)
        if isinstance(job, Pair):
            return self._pair(x, job)
        if isinstance(job, Fold):
            return self._fold(x, job)
        raise NotReadyError(
            "the stem of an anchored network needs its anchors: call the Anchored module, not the network inside it"
        )

    def _pair(self, x: Tensor, job: Pair) -> Tensor:
        _check_rows(x, len(job.permutation))
        clean = x[job.permutation] if job.clean is None else job.clean
        anchor = clean if job.corrupted is None else job.corrupted
        if job.masked is not None:
            anchor = anchor.masked_fill(job.masked.view((-1,) + (1,) * (x.ndim - 1)), 0)
        return self.affine(torch.cat([anchor, x - clean], dim=self.channel_dim), self.weight, self.bias)

    def _fold(self, x: Tensor, job: Fold) -> Tensor:
        _check_rows(x, len(job.maps) * job.images)
        for number, rows in zip(job.views, x.split(job.images), strict=True):
            if number not in job.image_parts:
                job.image_parts[number] = self.affine(rows, self.weight[:, self.split :], self.bias)  # (B, ...)
        parts = [job.image_parts[number] for number in job.views]
        both = (parts[0] if len(set(job.views)) == 1 else torch.stack(parts)) + job.maps
        return both.flatten(0, 1)  # (K, B, ...) -> (K * B, ...)


def check_supported(layer: nn.Module, name: str) -> None:
    """Raise an `ArchitectureError` that says what to do if a layer cannot be widened."""
    kind = next((kind for kind in SUPPORTED if isinstance(layer, kind)), None)
    remedy = "pass layer= with the name of another layer"
    if kind is None:
        raise ArchitectureError(
            f"{name} is a {type(layer).__name__}; kedge widens Conv1d, Conv2d, Conv3d and Linear. If it is quantised, "
            f"anchor the float network and quantise afterwards; otherwise {remedy}"
        )
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ArchitectureError(f"{name} is lazy and has no weights yet; run one batch through the network first")
    if set(layer._parameters) != {"weight", "bias"} or not isinstance(layer.weight, nn.Parameter):
        raise ArchitectureError(
            f"{name} computes its weight from other parameters (weight_norm, spectral_norm, ...); remove that "
            "parametrisation first, for instance with torch.nn.utils.parametrize.remove_parametrizations"
        )
    methods = ("forward", "_conv_forward") if kind is not nn.Linear else ("forward",)
    if any(getattr(type(layer), method) is not getattr(kind, method) for method in methods):
        raise ArchitectureError(
            f"{name} is a {type(layer).__name__} with a forward of its own, which kedge cannot split in two; "
            f"replace it by a plain {kind.__name__}, or {remedy}"
        )
    if getattr(layer, "groups", 1) != 1:
        raise ArchitectureError(
            f"{name} has groups={layer.groups}, which would keep anchor and residual apart; use groups=1, or {remedy}"
        )


def _check_rows(x: Tensor, images: int) -> None:
    if len(x) != images:
        raise ArchitectureError(
            f"the stem must see one row per image; it saw {len(x)} rows for {images} images. "
            "The layers before it change the batch dimension: pass a layer= that comes earlier"
        )


def _fresh(layer: nn.Module, seed: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weights for twice the inputs, as torch's own layer would draw them."""
    old = cast(nn.Parameter, layer.weight)
    wide = copy.deepcopy(layer).cpu()
    wide.weight = nn.Parameter(torch.empty((old.shape[0], 2 * old.shape[1], *old.shape[2:]), dtype=old.dtype))
    with seeded(seed):
        wide.reset_parameters()  # type: ignore[operator]
    wide.to(old.device)
    return wide.weight, cast("nn.Parameter | None", wide.bias)
