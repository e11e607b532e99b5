"""Outputs of named layers, read in one forward."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from kedge.checks import shape_of
from kedge.errors import InputError
from kedge.threads import own_thread

INPUT = ":in"  # after a layer's name: what goes into it


def read_features(net: nn.Module, x: Tensor, layers: Sequence[str] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Run ``net`` once and return its output together with the outputs of the named layers.

    Training mode and grad mode stay as the caller set them. Where gradients are recorded, the output has a gradient
    with respect to each feature.

    Args:
        net: Any network.
        x: A batch of images, (B, D, H, W).
        layers: Names of submodules, as in ``net.named_modules()``; ``"fc:in"`` reads the input of ``fc`` instead of its
            output. A built-in network reads its ``feature_layers`` by default: its stages, then ``flatten``, which
            gives the penultimate vector (the input of ``fc``).

    Returns:
        What ``net(x)`` returns, and a dictionary from name to output in the order of ``layers``.

    Example:
        >>> import torch
        >>> from kedge.models import build
        >>> logits, features = read_features(build("compact", width=8), torch.rand(2, 3, 32, 32))
        >>> features["stage1"].shape
        torch.Size([2, 16, 16, 16])
    """
    modules = _select(net, layers)
    features: dict[str, Tensor] = {}

    def keep(name: str, value: Any) -> Tensor:
        if name in features:
            raise InputError(f"layer {name!r} runs more than once in one forward; read a layer that runs once")
        if not isinstance(value, Tensor):
            verb = "takes" if name.endswith(INPUT) else "returns"
            raise InputError(f"layer {name!r} {verb} {shape_of(value)}, not a tensor; read a layer inside it")
        features[name] = value
        # The network goes on with a copy: a later in-place layer would overwrite what is kept here.
        return value.clone()

    def hook(name: str, module: nn.Module) -> Any:
        if name.endswith(INPUT):
            before = own_thread(lambda _, inputs: (keep(name, inputs[0]), *inputs[1:]))
            return module.register_forward_pre_hook(before)
        return module.register_forward_hook(own_thread(lambda _, inputs, output: keep(name, output)))

    with ExitStack() as hooks:  # removes the hooks also when the forward fails
        for name, module in modules.items():
            hooks.enter_context(hook(name, module))
        output = net(x)

    idle = [name for name in modules if name not in features]
    if idle:
        raise InputError(f"layers {idle} did not run in this forward; read layers that net(x) calls")
    return output, {name: features[name] for name in modules}


def _select(net: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    layers = getattr(net, "feature_layers", None) if layers is None else layers
    if layers is None:
        top = [name for name, _ in net.named_children()]
        raise InputError(f"layers must be given, since {type(net).__name__} has no feature_layers; try some of {top}")
    if isinstance(layers, str):
        raise InputError(f"layers must be a sequence of names; got {layers!r}, pass [{layers!r}]")
    return {name: _layer(net, name) for name in layers}


def _layer(net: nn.Module, name: Any) -> nn.Module:
    path = str(name).removesuffix(INPUT)
    with suppress(AttributeError):
        if path:
            return net.get_submodule(path)
    names = [other for other, _ in net.named_modules(remove_duplicate=False) if other]
    near = get_close_matches(path, names, n=5)
    hint = f"did you mean {near}?" if near else f"see net.named_modules(); it starts with {names[:5]}"
    raise InputError(f"{type(net).__name__} has no layer {path!r}; {hint}")
