"""Find the layer that reads the input, and what comes before it, by running the network."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.flop_counter import FlopCounterMode

from kedge.anchoring.layer import TORCH_LAYERS, AnchoredLayer, is_quantized
from kedge.errors import ArchitectureError
from kedge.models.classifier import evaluating
from kedge.threads import own_thread

# Layers with weights that may come before the anchored one: anchors pass through them as images do.
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.PReLU)


@dataclass
class Survey:
    """One forward pass of one image: all layers in calling order, the bytes of their outputs, and the operations."""

    calls: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes, 0 if the output is no tensor
    operations: list[int] = field(default_factory=list)  # so far, as each layer returns
    all_operations: int = 0

    def before(self, name: str) -> list[str]:
        """The layers that were called before the one of that name."""
        return self.calls[: self.calls.index(name)]

    def row_bytes(self, since: str) -> int:
        """The bytes of the largest output, of the layer of that name or a later one."""
        return max(1, *self.sizes[self.calls.index(since) :])

    def share_behind(self, name: str) -> float:
        """The share of the pass's operations that come after the layer of that name."""
        return 1 - self.operations[self.calls.index(name)] / max(1, self.all_operations)


def survey(network: nn.Module, forward: Callable[[], Any]) -> Survey:
    """Run a forward pass of one image and record which layers are called, in order."""
    result, counter = Survey(), FlopCounterMode(display=False)

    @own_thread
    def note(name: str, output: Any) -> None:
        result.calls.append(name)
        result.sizes.append(output.numel() * output.element_size() if isinstance(output, Tensor) else 0)
        result.operations.append(counter.get_total_flops())

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(network))
        for name, module in _leaves(network):
            if ".parametrizations." not in f".{name}":  # such a module computes a weight, not an activation
                stack.enter_context(module.register_forward_hook(lambda _m, _i, out, name=name: note(name, out)))
        with torch.no_grad(), counter:
            forward()
    result.all_operations = counter.get_total_flops()
    return result


def has_weights_before(network: nn.Module, layer: str, result: Survey) -> bool:
    """Whether layers with weights, apart from normalization, were called before the one of that name."""
    return _first_called(network, result) != layer


def _first_called(network: nn.Module, result: Survey) -> str | None:
    """The name of the first layer with weights that was called, apart from normalization before it."""
    modules = {name: network.get_submodule(name) for name in result.calls}
    return next((n for n, module in modules.items() if _has_weights(module) and not isinstance(module, _NORMS)), None)


def first_layer(network: nn.Module, forward: Callable[[], Any]) -> str:
    """The name of the first layer that is called in a forward pass."""
    name = _first_called(network, survey(network, forward))
    if name is None:
        raise ArchitectureError("no layer with weights was called; pass layer= with the name of the layer to anchor")
    return name


def first_registered(network: nn.Module) -> str:
    """The first convolution or linear layer in registration order: a guess that the first forward pass checks."""
    for name, module in _leaves(network):
        if isinstance(module, TORCH_LAYERS) or is_quantized(module):
            return name
    raise ArchitectureError("the network has no Conv1d, Conv2d, Conv3d or Linear layer; pass example= or layer=")


def check_first(network: nn.Module, layer: str, result: Survey, x: Tensor, forward: Callable[[Tensor], Any]) -> None:
    """Raise unless the anchored layer is the only one that reads the input.

    Layers' outputs are cut off from the gradient, so that whatever still depends on the input reads it directly.
    """
    first = _first_called(network, result)
    if first != layer:
        raise ArchitectureError(
            f"the layer {layer!r} was taken for the first because it is registered first, but {first!r} reads the "
            "input before it; pass example= (a batch of images) or layer= to kedge.anchor"
        )
    readers, before = {layer: None}, set(result.before(layer))
    flags = [(parameter, parameter.requires_grad) for parameter in network.parameters()]

    @own_thread
    def note(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(isinstance(value, Tensor) and value.requires_grad for value in (*values, *options.values())):
            readers[name] = None

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(network))
        for name, leaf in _leaves(network):
            if _has_weights(leaf) and name not in before:
                hook = leaf.register_forward_pre_hook(lambda _m, a, k, name=name: note(name, a, k), with_kwargs=True)
                stack.enter_context(hook)
                stack.enter_context(leaf.register_forward_hook(own_thread(_detach)))
        try:
            network.requires_grad_(False)
            with torch.enable_grad():
                output = forward(x.detach().clone().requires_grad_().clone())  # a clone, so in-place layers may write
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
    if len(readers) > 1:
        raise ArchitectureError(
            f"several layers read the input: {', '.join(map(repr, readers))}. kedge anchors one: pass layer={layer!r} "
            "to anchor that one and let the others see the image without an anchor, or put one convolution in front of "
            "them"
        )
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.requires_grad:
        raise ArchitectureError(
            f"the input also goes around the layer {layer!r} (a skip connection over it); pass layer={layer!r} to "
            "anchor it all the same, or put one convolution in front"
        )


def check_called_once(layer: str, result: Survey) -> None:
    """Raise if the layer was not called exactly once in a forward pass."""
    count = result.calls.count(layer)
    if count != 1:
        raise ArchitectureError(
            f"the layer {layer!r} must be called once in a forward pass, and is called {count} times; pass layer= with "
            "the name of the one that reads the input, or give the uses of a shared layer separate layers"
        )


def check_untied(network: nn.Module, layer: str) -> None:
    """Raise if a module outside the layer uses its weights too."""
    weights = {id(p) for p in network.get_submodule(layer).parameters()}
    for name, module in network.named_modules(remove_duplicate=False):
        inside = f"{name}.".startswith(f"{layer}.")
        if not inside and any(id(p) in weights for p in module.parameters(recurse=False)):
            raise ArchitectureError(
                f"the layer {layer!r} shares its weights with {name!r}; give them separate weights before anchoring"
            )


def in_turn(network: nn.Module, names: Sequence[str], x: Tensor, reached: Tensor) -> bool:
    """Whether applying the layers before the anchored one in turn is all that happens to the input."""
    with evaluating(network), torch.no_grad():
        try:
            for name in names:
                x = network.get_submodule(name)(x)
        except Exception:  # a layer that takes something else than the output of the one before
            return False
    return x.shape == reached.shape and torch.equal(x, reached)


def through(layers: Sequence[nn.Module], anchors: Tensor, batch: Tensor | None = None) -> Tensor:
    """Anchors after the layers before the anchored one.

    In training, batch norms normalize the anchors by the statistics of the images in ``batch``, so that T(c) = c stays
    where c is, and no layer's running statistics change.
    """
    batch = batch.clone() if batch is not None and layers else None  # layers may work in place
    for layer in layers:
        if batch is None:
            anchors = layer(anchors)
        elif isinstance(layer, _BatchNorm) and layer.training:
            variance, mean = torch.var_mean(batch.detach(), [d for d in range(batch.ndim) if d != 1], correction=0)
            anchors, batch = (
                F.batch_norm(v, mean, variance, layer.weight, layer.bias, eps=layer.eps) for v in (anchors, batch)
            )
        else:
            buffers = {name: value.clone() for name, value in layer.named_buffers()}
            anchors, batch = (functional_call(layer, buffers, (v,)) for v in (anchors, batch))
    return anchors


def _detach(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output


def _leaves(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers: modules without children, and those whose children only hold their weights."""
    inside: tuple[str, ...] = ()
    for name, module in network.named_modules():
        whole = isinstance(module, (*TORCH_LAYERS, AnchoredLayer)) or is_quantized(module)
        if not (inside and name.startswith(inside)) and (whole or next(module.children(), None) is None):
            inside = (*inside, f"{name}.")
            yield name, module


def _has_weights(module: nn.Module) -> bool:
    return is_quantized(module) or next(module.parameters(), None) is not None
