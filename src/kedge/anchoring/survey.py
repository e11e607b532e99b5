"""Which layer reads the input? Found by running the network, not by the names of its layers."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from kedge.anchoring.stem import SUPPORTED, check_supported
from kedge.errors import ArchitectureError
from kedge.models.classifier import evaluating

# Layers that may stand between the input and the stem: anchors pass through them as images do.
_PREFIX = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.PReLU)


@dataclass
class Survey:
    """What one forward pass showed: the layers with weights in calling order, and the largest output of one image."""

    calls: list[str] = field(default_factory=list)
    row_bytes: int = 1


def survey(network: nn.Module, forward: Callable[[], Any]) -> Survey:
    """Run a forward pass of one image and note which layers with weights were called, in order."""
    found = Survey()

    def note(name: str, module: nn.Module, output: Any) -> None:
        if _has_weights(module):
            found.calls.append(name)
        # A weight that is computed from others is no activation.
        if isinstance(output, Tensor) and ".parametrizations." not in f".{name}":
            found.row_bytes = max(found.row_bytes, output.numel() * output.element_size())

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(network))
        stack.enter_context(torch.no_grad())
        for name, module in _leaves(network):
            hook = module.register_forward_hook(lambda m, _, out, name=name: note(name, m, out))
            stack.callback(hook.remove)
        forward()
    return found


def first_called(network: nn.Module, found: Survey) -> str | None:
    """The name of the first layer with weights that the input reached, normalisation in front of it apart."""
    return next((name for name in found.calls if not isinstance(network.get_submodule(name), _PREFIX)), None)


def first_layer(network: nn.Module, found: Survey) -> str:
    """The name of the first layer that the input reached, if it can be widened."""
    name = first_called(network, found)
    if name is None:
        raise ArchitectureError(
            "no Conv1d, Conv2d, Conv3d or Linear layer was called; pass layer= with the name of the layer to widen"
        )
    check_supported(network.get_submodule(name), f"the first layer that reads the input, {name!r},")
    return name


def first_registered(network: nn.Module) -> str:
    """The first layer in registration order that can be widened: a guess, to be checked at the first forward."""
    for name, module in _leaves(network):
        if isinstance(module, SUPPORTED) or _is_quantised(module):
            check_supported(module, f"the first layer, {name!r},")
            return name
    raise ArchitectureError("the network has no Conv1d, Conv2d, Conv3d or Linear layer that could take the anchor")


def check_sole_reader(
    network: nn.Module, stem: str, found: Survey, x: Tensor, forward: Callable[[Tensor], Any]
) -> None:
    """Raise if the input reaches anything but the stem, which was called once.

    Layers' outputs are cut off from the gradient, so that whatever still depends on the input read it directly.
    """
    others: list[str] = []
    before = set(found.calls[: found.calls.index(stem)])

    def note(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensors = [v for v in (*values, *options.values()) if isinstance(v, Tensor)]
        if name != stem and any(t.requires_grad for t in tensors):
            others.append(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(network))
        stack.enter_context(_frozen(network))
        for name, leaf in _leaves(network):
            if _has_weights(leaf) and name not in before:
                hook = leaf.register_forward_pre_hook(lambda _m, a, k, name=name: note(name, a, k), with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(leaf.register_forward_hook(_detach).remove)
        with torch.enable_grad():
            output = forward(x.detach().clone().requires_grad_().clone())  # a clone, so in-place layers may write
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if others:
        names = ", ".join(repr(name) for name in (stem, *dict.fromkeys(others)))
        raise ArchitectureError(
            f"several layers read the input: {names}. kedge widens one: pass layer={stem!r} to widen that one and let "
            "the others see the image without an anchor, or put one convolution in front of them"
        )
    if isinstance(logits, Tensor) and logits.requires_grad:
        raise ArchitectureError(
            f"the input also goes around the layer {stem!r} (a skip connection over it); pass layer={stem!r} to widen "
            "it all the same, or put one convolution in front"
        )


def check_called_once(stem: str, found: Survey) -> None:
    """Raise if the stem was not called exactly once in a forward pass."""
    count = found.calls.count(stem)
    if count == 0:
        raise ArchitectureError(
            f"the layer {stem!r} was not called in a forward pass; pass layer= with the name of the one that reads the "
            "input"
        )
    if count > 1:
        raise ArchitectureError(
            f"the layer {stem!r} is called {count} times in one forward pass; a shared stem cannot carry one anchor: "
            "give its uses separate layers"
        )


def check_untied(network: nn.Module, stem: str) -> None:
    """Raise if another module uses the stem's weights too."""
    weights = {id(p) for p in network.get_submodule(stem).parameters(recurse=False)}
    for name, module in network.named_modules(remove_duplicate=False):
        if name != stem and any(id(p) in weights for p in module.parameters(recurse=False)):
            raise ArchitectureError(
                f"the layer {stem!r} shares its weights with {name!r}; give them separate weights before anchoring"
            )


def _detach(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output


@contextlib.contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    flags = [(p, p.requires_grad) for p in network.parameters()]
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


def _leaves(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers: modules without children, and those whose children only hold their weights."""
    for name, module in network.named_modules():
        if isinstance(module, SUPPORTED) or _is_quantised(module) or next(module.children(), None) is None:
            yield name, module


def _has_weights(module: nn.Module) -> bool:
    return _is_quantised(module) or next(module.parameters(), None) is not None


def _is_quantised(module: nn.Module) -> bool:
    return "quantized" in type(module).__module__  # such layers pack their weights away
