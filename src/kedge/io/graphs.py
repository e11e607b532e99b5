"""Graphs of networks in files, so that a file opens without the network's code."""

import contextlib
import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.errors import ArchitectureError, FileFormatError
from kedge.models import Spec
from kedge.models.capture import capture
from kedge.models.classifier import Classifier, logits_of
from kedge.models.ensemble import Ensemble
from kedge.models.graph import StoredGraph
from kedge.models.head import find_head

TOLERANCE = 1e-4  # between a network and its graph, as a share of the largest logit


def graphs(
    net: Classifier, shape: Sequence[int], *, fixed: bool = True, prefix: str = ""
) -> tuple[dict[str, Tensor], list[str]]:
    """The graphs of the networks that are not kedge's own, as tensors for a file, and warnings where there is none.

    Args:
        net: The detector's network, or an ensemble.
        shape: Shape of one input.
        fixed: Whether the method leaves the network as it is, rather than running parts of it in training mode.
        prefix: Of the network's names in the file.
    """
    if isinstance(net, Ensemble):
        tensors: dict[str, Tensor] = {}
        reasons: list[str] = []
        for number, member in enumerate(net.members):
            more, why = graphs(member, shape, fixed=fixed, prefix=f"{prefix}network.{number}.")
            tensors, reasons = tensors | more, reasons + why
        return tensors, reasons
    spec = getattr(net.network, "spec", None)
    if isinstance(spec, Spec) and ":" not in spec.name:
        return {}, []
    try:
        if not fixed:
            raise ArchitectureError("the method changes how the network runs, which a graph does not record")
        document, constants = _captured(net, shape)
    except ArchitectureError as error:
        return {}, [f"the file holds no graph of the network, so that it opens only with {_needed(spec)}: {error}"]
    content = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    tensors = {f"net.{prefix}network.{name}": value for name, value in constants.items()}
    return tensors | {f"graph.{prefix}document": content}, []


def _needed(spec: object) -> str:
    """What opens a file that has no graph."""
    if isinstance(spec, Spec):
        return f"the package of {spec.name} installed"
    return "the network's own code (--model package.module:factory, or kedge.load with model=)"


def _captured(net: Classifier, shape: Sequence[int]) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """The graph of one network, checked against it."""
    if isinstance(net.network, StoredGraph):
        return net.network.document, {}  # its constants are in its state dict
    if getattr(net.network, "conversions", []):
        raise ArchitectureError("the network was changed for a method, which a graph does not record")
    network = copy.deepcopy(net.network).cpu().eval()
    keep = []
    if isinstance(net, Anchored):
        network.set_submodule(net.layer, cast(nn.Module, network.get_submodule(net.layer).layer_x))
        keep.append(net.layer)
    images = torch.rand((3, *shape), generator=torch.Generator().manual_seed(0), dtype=net.mean.dtype)
    reader = Classifier(network, mean=net.mean.cpu(), std=net.std.cpu())
    with contextlib.suppress(ArchitectureError):  # methods that need the head say so themselves
        keep.append(find_head(reader, images))
    x = reader.normalise(images)
    document, constants = capture(network, x, keep=list(dict.fromkeys(keep)))
    graph = StoredGraph(document)
    graph.load_state_dict({**network.state_dict(), **constants})
    with torch.no_grad():
        for batch in (x, x[:1]):
            expected = logits_of(network(batch))
            difference = float((graph(batch) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
            if not difference <= TOLERANCE:
                raise ArchitectureError(f"the recorded forward pass differs from the network by {difference:.1g}")
    return document, constants


def stored_graph(document: Tensor, numbers: int) -> StoredGraph:
    """The network of a file's graph, without weights; ``numbers`` are those that the file has for it."""
    try:
        parsed = json.loads(document.numpy().tobytes())
        needed = sum(math.prod(shape) for shape, *_ in parsed["tensors"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"the graph of the network is damaged: {error}") from error
    if needed > numbers:
        raise FileFormatError(f"the graph of the network needs {needed} numbers, and the file has only {numbers}")
    graph = StoredGraph(parsed)
    graph.check_sizes()
    return graph
