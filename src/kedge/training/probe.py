"""What one small pass shows about a network: the order of its layers, the memory of an image, and so the batch size."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kedge.models.classifier import Classifier
from kedge.threads import memory

STEPS = 32  # per epoch, if `FEWEST` and `MOST` allow it
FEWEST, MOST = 16, 64  # images per step
MOST_BYTES = 4 << 30  # of activations in main memory; a larger batch does not make a CPU faster


def layer_depths(net: Classifier, shape: tuple[int, ...]) -> dict[str, int]:
    """The position of each parameter's layer in the order in which a forward pass calls the layers, by name.

    A parameter of a module that is not called itself counts as one of the module around it.

    Example:
        >>> net = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> layer_depths(net, (3, 2, 2))
        {'network.1.weight': 0, 'network.1.bias': 0, 'network.3.weight': 1, 'network.3.bias': 1}
    """
    called: dict[str, int] = {}

    def watch(probe: nn.Module) -> None:
        for name, module in probe.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: called.update({name: called.get(name, len(called))}))

    _pass(net, shape, watch)
    order = {}
    for name, _ in net.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in called:
            owner = owner.rpartition(".")[0]
        order[name] = called[owner]
    ranks = {place: rank for rank, place in enumerate(sorted(set(order.values())))}
    return {name: ranks[place] for name, place in order.items()}


def activation_bytes(net: Classifier, shape: tuple[int, ...]) -> int:
    """Bytes per image that a training pass keeps for the gradients; the weights are not counted."""
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value  # a reference, so that its place is not used again
        return value

    probe = _pass(net, shape)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        output = _run(probe, shape)
    for weight in (*probe.parameters(), *probe.buffers()):
        kept.pop(weight.untyped_storage().data_ptr(), None)
    total = sum(value.untyped_storage().nbytes() for value in kept.values())
    del output
    return max(1, total // 2)


def auto_batch(images: int, net: Classifier, shape: tuple[int, ...], world: int = 1) -> int:
    """Images per step, over all processes: a 32nd of the set, from 16 to 64, or fewer if memory requires it."""
    device = net.mean.device
    room = torch.cuda.mem_get_info(device)[1] // 2 if device.type == "cuda" else min(MOST_BYTES, memory() // 4)
    fitting = room // activation_bytes(net, shape) * world
    return max(2, min(images, max(FEWEST, images // STEPS), MOST, fitting))


def _pass(net: Classifier, shape: tuple[int, ...], prepare: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """A copy of the network in training mode, after a pass; the network itself is not changed."""
    with torch.random.fork_rng(), torch.no_grad():
        probe = copy.deepcopy(net).train()
        _run(probe, shape)  # an anchored network examines its layers in its first pass
        if prepare is not None:
            prepare(probe)
            _run(probe, shape)
    return probe


def _run(probe: nn.Module, shape: tuple[int, ...]) -> Any:
    weight = next(probe.parameters())
    return probe(torch.full((2, *shape), 0.5, dtype=weight.dtype, device=weight.device))
