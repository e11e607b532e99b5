"""A network as plain data in a saved file, and the network built again from it."""

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored, anchor
from kedge.anchoring.corruption import Corruption, FeatureNoise, describe_corruption
from kedge.anchoring.options import AnchoringOptions
from kedge.checks import one_of
from kedge.data import Preprocess
from kedge.errors import ArchitectureError, FileFormatError, InputError
from kedge.io import artifact
from kedge.io.graphs import stored_graph
from kedge.io.schema import arguments
from kedge.models import Spec
from kedge.models.classifier import Classifier
from kedge.models.conversion import CONVERSIONS, apply
from kedge.models.ensemble import Ensemble
from kedge.models.graph import CONSTANTS
from kedge.models.named import from_factory, rebuilt
from kedge.seeds import seeded


def describe(net: Classifier) -> dict[str, Any]:
    """What beside the weights is needed to build a network again, for a file's header.

    Example:
        >>> from kedge.models import build
        >>> describe(Classifier(build("compact", width=8)))["spec"]["name"]
        'compact'
    """
    if isinstance(net, Ensemble):
        return {"ensemble": [describe(member) for member in net.members], "record": net.record}
    spec = getattr(net.network, "spec", None)
    described: dict[str, Any] = {
        "spec": {"name": spec.name, "arguments": dict(spec.arguments)} if isinstance(spec, Spec) else None,
        "type": getattr(net.network, "stored_type", type(net.network).__name__),
        "normalised": net.has_statistics,
        "anchored": None,
        "conversions": getattr(net.network, "conversions", []),
        "channels_last": _channels_last(net),
        "record": net.record,
    }
    if isinstance(net, Anchored):
        options = {**vars(net.options), "corruption": describe_corruption(net.options.corruption)}
        described["anchored"] = {"layer": net.layer, "options": options}
    return described


def rebuild(
    described: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    model: nn.Module | str | None,
    graphs: Mapping[str, Tensor] | None = None,
) -> Classifier:
    """Build a network from its description and weights.

    Args:
        described: What `describe` returned.
        weights: Its state dict, with the constants of its graph.
        model: The network to use instead of a graph; or its name: ``"package.module:factory"``, or that of the spec.
        graphs: The ``"document"`` of its graph if there is one, or those of an ensemble's members by their names.
    """
    graphs = graphs or {}
    if "ensemble" in described:
        return _ensemble(described, weights, model, graphs)
    anchored, spec = described["anchored"], described["spec"]
    numbers = sum(tensor.numel() for tensor in weights.values())
    if model is None:
        document = graphs.get("document")
        if document is not None:
            model = stored_graph(document, numbers)
            model.stored_type = described["type"]
            model.spec = None if spec is None else Spec(**spec)  # type: ignore[assignment]
        elif spec is not None:
            _check_sizes(spec["arguments"], weights)
            model = _built_in(spec, numbers)
        else:
            raise InputError(
                f"model must be given for this file, which holds the weights of a {described['type']} and no graph of "
                "its forward pass: name a function that returns the network freshly built, as package.module:factory"
            )
    elif graphs:
        weights = {name: value for name, value in weights.items() if f"network.{CONSTANTS}." not in name}
    if isinstance(model, str):
        own = spec is not None and spec["name"] == model
        model = _built_in(spec, numbers) if own else from_factory(model, "model")
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if anchored is not None and not isinstance(model, Anchored):
        options = dict(anchored["options"])
        corruption = _corruption(options.pop("corruption", None))
        options = {**arguments(AnchoringOptions, options, "anchored.options"), "corruption": corruption}
        try:
            model = anchor(model, layer=anchored["layer"], **options)
        except (ArchitectureError, InputError) as error:
            raise InputError(f"model must be the {described['type']} as it was before anchoring: {error}") from error
    net = model if isinstance(model, Classifier) else Classifier(model)
    if not getattr(net.network, "conversions", None):
        for step in described["conversions"]:
            _check_sizes(step["arguments"], weights)
            function = CONVERSIONS[one_of("conversion", step["name"], tuple(CONVERSIONS))]
            net.network = apply(net.network, step["name"], **arguments(function, step["arguments"], step["name"]))
    if anchored is None and isinstance(net, Anchored):
        raise InputError("model must be the unanchored network that was saved; it is anchored")
    for name, tensor in itertools.chain(net.named_parameters(), net.named_buffers()):
        saved = weights.get(name, tensor)
        if tensor.is_floating_point() and saved.is_floating_point():
            tensor.data = tensor.data.to(saved.dtype)  # loading alone would round double to single precision
    try:
        net.load_state_dict(dict(weights))
    except RuntimeError as error:
        saved_type = f"the {described['type']} that was saved"
        raise InputError(f"model must be {saved_type}; its weights do not fit: {error}") from error
    if described["channels_last"]:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if described["normalised"] or net.has_statistics:
        net.set_statistics(net.mean, net.std)  # checks them
    net.record = dict(described["record"])
    if net.record.get("preprocess") is not None:
        saved_preprocess(net.record["preprocess"])  # for `Detector.fit`
    return net.eval()


def saved_preprocess(saved: Any) -> Preprocess:
    """The preprocessing that a file names."""
    return Preprocess.from_record(arguments(Preprocess, saved, "preprocess"))


def _ensemble(
    described: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    model: nn.Module | str | None,
    graphs: Mapping[str, Tensor],
) -> Ensemble:
    members = []
    for number, member in enumerate(described["ensemble"]):
        own = None if member.get("spec") else copy.deepcopy(model)  # kedge's own networks are built from their spec
        prefix = f"network.{number}."
        members.append(rebuild(member, artifact.part(weights, prefix), own, artifact.part(graphs, prefix)))
    net = Ensemble(members)
    net.record = dict(described["record"])
    return net.eval()


def _channels_last(net: nn.Module) -> bool:
    """Whether the weights lie in memory as training leaves them; sums in another order differ in the last bit."""
    maps = [p for p in net.parameters() if p.ndim == 4 and not p.is_contiguous()]
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in maps)


def _built_in(spec: Mapping[str, Any], numbers: int) -> nn.Module:
    try:
        with torch.device("meta"):  # takes no memory, whatever size the file names
            needed = sum(p.numel() for p in rebuilt(spec["name"], spec["arguments"]).parameters())
        if needed > numbers:
            raise InputError(f"it has {needed} weights and the file only {numbers}")
        with seeded(0):  # the weights are replaced; drawing them must not move torch's own generator
            return rebuilt(spec["name"], spec["arguments"])
    except InputError as error:
        raise FileFormatError(f"this kedge cannot build the file's network: {error}; install a newer one") from error


def _check_sizes(sizes: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """No layer is wider than the file has numbers, and no network deeper than it has tensors."""
    for name, value in sizes.items():
        most = len(weights) if name == "depth" else sum(tensor.numel() for tensor in weights.values())
        size = math.prod(value) if isinstance(value, list) else value
        if name != "seed" and isinstance(size, int) and size > most:
            raise FileFormatError(f"{name} must be at most {most}, as large as the file's network; got {size}")


def _corruption(saved: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    if "function" in saved:  # it is not in the file, and only training needs it
        return None
    if "scale" in saved:
        return FeatureNoise(**arguments(FeatureNoise, saved, "corruption"))
    return Corruption(**arguments(Corruption, saved, "corruption"))
