"""A network as data: its forward pass as a list of torch's operations, which runs without the network's own code.

`kedge.models.capture` records what a network computes in evaluation mode, `StoredGraph` computes it. A graph holds the
names of operations out of a fixed list, numbers, and names of weights, so that reading one from a file runs no code
from it.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kedge.errors import FileFormatError, InputError

SCHEMA = 1
LARGEST = 2**28  # numbers in one tensor of a graph from a file, for two images
CONSTANTS = "kedge_constants"  # module with the tensors of a graph that are not in the network's state dict
TORCH_LAYERS = {layer.__name__: layer for layer in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_ARITHMETIC = {name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "neg", "getitem")}
# The operations of torch.ops.aten that a graph may have. None reads or writes files or calls back into Python.
_ATEN = frozenset(
    """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d add
    add_ addcmul addmm alias amax amin any arange argmax avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bitwise_and
    bitwise_not bmm broadcast_to cat ceil celu chunk clamp clamp_ clamp_max clamp_min clone col2im concat
    constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d copy_ cos cumsum
    detach detach_ diagonal div div_ dropout dropout_ einsum elu elu_ embedding eq erf exp expand expand_as
    feature_dropout fill fill_ flatten flip floor floor_divide full full_like gather ge gelu gelu_ glu group_norm gt
    hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ im2col index index_put index_put_ index_select
    instance_norm isnan layer_norm le leaky_relu leaky_relu_ lift_fresh_copy linalg_norm linalg_vector_norm linear log
    log1p log_softmax logical_and logical_not logical_or logsumexp lt masked_fill masked_fill_ matmul max max_pool1d
    max_pool2d max_pool3d maximum mean meshgrid min minimum mish mish_ mm movedim mul mul_ narrow ne neg new_full
    new_ones new_zeros norm numpy_T ones ones_like outer pad permute pixel_shuffle pixel_unshuffle pow pow_ prelu prod
    reciprocal reflection_pad2d relu relu6 relu6_ relu_ remainder repeat repeat_interleave replication_pad2d reshape
    reshape_as rms_norm roll round rsqrt rsub scalar_tensor scaled_dot_product_attention select selu selu_ sigmoid
    sigmoid_ sign silu silu_ sin slice softmax softplus split split_with_sizes sqrt square squeeze stack std std_mean
    sub sub_ sum swapaxes sym_size t tan tanh tanh_ tensor_split tile to topk transpose tril triu type_as unbind
    unflatten unfold unsqueeze unsqueeze_ upsample_bicubic2d upsample_bilinear2d upsample_nearest2d var var_mean view
    view_as where zeros zeros_like
    """.split()  # noqa: SIM905
)


class StoredGraph(nn.Module):
    """Runs a graph that `kedge.models.capture` recorded; always in evaluation mode.

    Its modules have the names that they had in the network, so that a hook on a layer sees that layer's output and the
    state dict is the network's own, with the graph's constants.

    Args:
        document: The first thing that `capture` returned.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__()
        self.document = document
        try:
            if document["schema"] != SCHEMA:
                raise FileFormatError(f"a graph of schema {document['schema']!r} needs a newer kedge")
            for name, described in document["layers"].items():
                _set_module(self, name, _layer(described))
            for name, (shape, dtype, is_parameter) in document["tensors"].items():
                _set_tensor(self, name, shape, _torch("dtype", dtype), is_parameter)
            self._steps = self._read()
            self._output = _prepared(document["output"])
            self._shape = tuple(document["shape"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise FileFormatError(f"the graph of the network is damaged: {error}") from error
        super().train(False)

    def train(self, mode: bool = True) -> "StoredGraph":
        """Stay in evaluation mode: a graph holds nothing else."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """All but the operations, which cannot be pickled."""
        return {key: value for key, value in vars(self).items() if key != "_steps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._steps = self._read()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of normalised images (B, D, ...)."""
        if tuple(x.shape[1:]) != self._shape:
            raise InputError(f"x must be (B, {', '.join(map(str, self._shape))}); got {tuple(x.shape)}")
        values: dict[str, Any] = {self.document["input"]: x}

        def decoded(value: Any) -> Any:
            kind = type(value)
            if kind is _Value:
                return values[value.name]
            if kind is list:
                return [decoded(each) for each in value]
            if kind is _Weight:
                return getattr(_at(self, value.path), value.own)
            return x.device if kind is _Device else value

        for name, call, args, kwargs, unused in self._steps:
            function = _at(self, call) if isinstance(call, tuple) else call
            if type(function) is _Named and not (function._forward_hooks or function._forward_pre_hooks):
                values[name] = decoded(args[0])
            else:
                named = {key: decoded(value) for key, value in kwargs.items()} if kwargs else {}
                values[name] = function(*map(decoded, args), **named)
            if x.is_meta:
                _check_size(name, values[name])
            for each in unused:
                del values[each]
        return cast(Tensor, decoded(self._output))

    def passes_on(self, target: str) -> bool:
        """Whether a node's target is a layer that only has a name."""
        kind, _, rest = target.partition(".")
        return kind == "layer" and type(self.get_submodule(rest)) is _Named

    def uses(self) -> tuple[Counter[str], Counter[str]]:
        """How often each result of a node and each tensor is used."""
        found: tuple[Counter[str], Counter[str]] = Counter(), Counter()

        def count(value: Any) -> None:
            for each in value if isinstance(value, list) else ():
                count(each)
            for counter, kind in zip(found, ("node", "tensor"), strict=True):
                if isinstance(value, dict) and kind in value:
                    counter[value[kind]] += 1

        count([self.document["output"], *([args, *kwargs.values()] for _, _, args, kwargs in self.document["nodes"])])
        return found

    def rewrite(self, nodes: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Compute other nodes, with further tensors; tensors that no node needs go."""
        made = {name: [list(t.shape), str(t.dtype).removeprefix("torch."), False] for name, t in tensors.items()}
        self.document = {**self.document, "nodes": nodes, "tensors": {**self.document["tensors"], **made}}
        for name, tensor in tensors.items():
            path, _, own = name.rpartition(".")
            _set_module(self, path).register_buffer(own, tensor)
        used, kept = self.uses()[1], tuple(f"{name}." for name in self.document["layers"])
        for name in [name for name in self.document["tensors"] if not (used[name] or name.startswith(kept))]:
            *path, own = name.split(".")
            delattr(_at(self, tuple(path)), own)
            del self.document["tensors"][name]
        self._steps = self._read()

    def check_sizes(self) -> None:
        """Raise a `FileFormatError` if running the graph on one image would take far more memory than networks do."""
        x = torch.empty((2, *self._shape), device="meta")
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        try:
            functional_call(self, {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}, (x,))
        except FileFormatError:
            raise
        except Exception as error:  # operations raise many kinds if their arguments do not fit
            raise FileFormatError(f"the graph of the network is damaged: {error}") from error

    def _read(self) -> list[tuple[str, Any, list[Any], dict[str, Any], list[str]]]:
        """The nodes with their operations, their arguments and the values that no later one needs."""
        nodes = self.document["nodes"]
        return [
            (
                name,
                self._call(target),
                _prepared(args),
                {key: _prepared(value) for key, value in kwargs.items()},
                unused,
            )
            for (name, target, args, kwargs), unused in zip(
                nodes, _last_uses(nodes, self.document["output"]), strict=True
            )
        ]

    def _call(self, target: str) -> Any:
        """The operation of a node, or the path of the layer that it calls."""
        kind, _, rest = target.partition(".")
        if kind != "layer":
            return operation(target)
        _set_module(self, rest)  # an empty one where the layer is not kept, so that it can be hooked
        return tuple(rest.split("."))


class _Named(nn.Module):
    """The place of a layer whose operations are in the graph: its output passes through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Value(NamedTuple):
    """The result of a node, as an argument of another."""

    name: str


class _Weight(NamedTuple):
    """A tensor of a module, as an argument."""

    path: tuple[str, ...]
    own: str


class _Device:
    """The device of the images, as an argument."""


def _prepared(value: Any) -> Any:
    """An argument of a node, read from plain data."""
    if isinstance(value, list):
        return [_prepared(each) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, name), *_ = value.items()
    if kind == "node":
        return _Value(name)
    if kind == "tensor":
        *path, own = name.split(".")
        return _Weight(tuple(path), own)
    return _Device() if kind == "device" else _torch(kind, name)


def _at(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    """A module by its path; `torch.nn.Module.get_submodule` takes ten times as long, which is felt for one image."""
    for name in path:
        module = cast(nn.Module, module._modules[name])
    return module


def operation(target: str) -> Callable[..., Any]:
    """The operation of a name such as ``"aten.add.Tensor"`` or ``"operator.mul"``, if a graph may have it."""
    kind, _, rest = target.partition(".")
    if kind == "operator" and rest in _ARITHMETIC:
        return cast(Callable[..., Any], _ARITHMETIC[rest])
    name, _, overload = rest.partition(".")
    if kind == "aten" and name in _ATEN:
        return cast(Callable[..., Any], getattr(getattr(torch.ops.aten, name), overload))
    raise FileFormatError(f"the graph of the network has the operation {target!r}, which is not allowed")


def _torch(kind: str, name: str) -> Any:
    value = getattr(torch, name, None)
    if kind not in ("dtype", "layout", "memory_format") or not isinstance(value, getattr(torch, kind)):
        raise FileFormatError(f"the graph of the network has {name!r} as a {kind}")
    return value


def _check_size(name: str, value: Any) -> None:
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, Tensor) and each.numel() > LARGEST:
            raise FileFormatError(
                f"{name} in the graph of the network has {each.numel()} numbers; at most {LARGEST} may"
            )


def _last_uses(nodes: Sequence[Any], output: Any) -> list[list[str]]:
    """For each node, the values that no later one needs."""
    needed = set(_names(output))
    free = []
    for name, _, args, kwargs in reversed(nodes):
        used = set(_names([args, *kwargs.values()])) | {name}
        free.append(sorted(used - needed))
        needed |= used
    return free[::-1]


def _names(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for each in value for name in _names(each)]
    return [value["node"]] if isinstance(value, dict) and "node" in value else []


def _layer(described: Mapping[str, Any]) -> nn.Module:
    if "graph" in described:
        return StoredGraph(described["graph"])
    with torch.device("meta"):
        layer = TORCH_LAYERS[described["kind"]](**described["arguments"])
    return layer.to_empty(device="cpu")


def _set_module(root: nn.Module, name: str, module: nn.Module | None = None) -> nn.Module:
    """Put a module, by default one that only has a name, at a dotted name; return what stands there."""
    for part in name.split(".")[:-1] if name else ():
        if part not in root._modules:
            root.add_module(part, _Named())
        root = cast(nn.Module, root._modules[part])
    last = name.rpartition(".")[2]
    if module is not None or last not in root._modules:
        root.add_module(last, module or _Named())
    return cast(nn.Module, root._modules[last])


def _set_tensor(root: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype, is_parameter: bool) -> None:
    module, _, own = name.rpartition(".")
    parent = _set_module(root, module) if module else root
    if own in parent._parameters or own in parent._buffers:
        return  # a kept layer's own
    if not all(isinstance(side, int) and side >= 0 for side in shape):
        raise ValueError(f"{name} has the shape {shape}")
    empty = torch.empty(shape, dtype=dtype)
    if is_parameter:
        parent.register_parameter(own, nn.Parameter(empty, requires_grad=dtype.is_floating_point))
    else:
        parent.register_buffer(own, empty)
