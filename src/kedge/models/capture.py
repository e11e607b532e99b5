"""`capture`: what a network computes, as plain data that `kedge.models.graph.StoredGraph` runs."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from kedge.errors import ArchitectureError, FileFormatError
from kedge.models.classifier import logits_of
from kedge.models.graph import CONSTANTS, SCHEMA, TORCH_LAYERS, operation

_CONVOLUTION = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"
)  # fmt: skip
_BLOCKS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")  # what the exporter makes of `with` statements
_WITHOUT_EFFECT = ("_assert", "sym_constrain")  # checks of the exporter, by the beginning of their names
_PLAIN = (bool, int, float, str, type(None))


@torch.library.custom_op("kedge::mark", mutates_args=())
def _mark(x: Tensor, name: str) -> Tensor:
    """Mark a tensor as the output of a layer, which detectors may read."""
    return x.clone()


@torch.library.custom_op("kedge::keep", mutates_args=())
def _keep(x: Tensor, y: Tensor | None, name: str) -> Tensor:
    """Mark a tensor as the output y of a layer for x; the layer stays a module."""
    assert y is not None
    return y.clone()


_mark.register_fake(lambda x, name: torch.empty_like(x))
_keep.register_fake(lambda x, y, name: torch.empty_like(y))


class _Traced(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output = self.network(x)
        return output if isinstance(output, Tensor) else logits_of(output)


def capture(
    network: nn.Module, example: Tensor, *, keep: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Record what a network computes in evaluation mode, for batches of any size of images like an example.

    Args:
        network: Any network that takes one tensor and returns logits, or an object with ``.logits``.
        example: At least two images, as the network takes them.
        keep: Names of layers that stay modules of their own: the head, a layer to anchor.

    Returns:
        The graph as plain data, and the tensors that it needs beyond the network's state dict.

    Raises:
        ArchitectureError: The forward pass is no fixed list of operations, or has one that is not supported.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> from kedge.models.graph import StoredGraph
        >>> document, constants = capture(net, torch.rand(2, 3, 2, 2))
        >>> graph = StoredGraph(document)
        >>> _ = graph.load_state_dict({**net.state_dict(), **constants})
        >>> x = torch.rand(5, 3, 2, 2)
        >>> bool(torch.equal(graph(x), net(x)))
        True
    """
    traced = copy.deepcopy(network).eval()
    layers = {name: _describe_layer(traced, name, example) for name in keep}
    for name, module in traced.named_modules():
        if name in keep:
            module.register_forward_hook(_keeping(name))
        elif name and not any(f"{name}.".startswith(f"{kept}.") for kept in keep):
            module.register_forward_hook(_marking(name))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of caches that the copy of the network keeps
            batch = {0: torch.export.Dim("N")}
            program = torch.export.export(_Traced(traced), (example,), dynamic_shapes=(batch,), strict=False)
    except Exception as error:  # the exporter raises many kinds
        reason = str(error).strip().split("\n")[0]
        raise ArchitectureError(
            f"the forward pass of {type(network).__name__} cannot be recorded for any number of images: {reason}"
        ) from error
    return _document(program, network, layers, example)


def _marking(name: str) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda _, inputs, output: torch.ops.kedge.mark(output, name) if isinstance(output, Tensor) else None


def _keeping(name: str) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda _, inputs, output: torch.ops.kedge.keep(inputs[0], output, name)


def _describe_layer(network: nn.Module, name: str, example: Tensor) -> dict[str, Any]:
    """A layer as data: one of torch's own by its arguments, another by its graph."""
    layer = network.get_submodule(name)
    kind = TORCH_LAYERS.get(type(layer).__name__)
    if type(layer) is kind:
        names = ["in_features", "out_features"] if kind is nn.Linear else _CONVOLUTION
        arguments = {each: getattr(layer, each) for each in names}
        return {"kind": kind.__name__, "arguments": {**arguments, "bias": layer.bias is not None}}
    reached: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda _, inputs: reached.append(inputs[0])), torch.no_grad():
        network(example)
    document, constants = capture(layer, reached[0])
    if constants:
        raise ArchitectureError(f"the layer {name!r} has tensors outside its state dict: {list(constants)}")
    return {"graph": document}


def _document(
    program: torch.export.ExportedProgram, network: nn.Module, layers: Mapping[str, Any], example: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An exported program as plain data, and the tensors that are not in the network's state dict."""
    _inline(program.graph_module)
    for node in program.graph.nodes:
        if node.target == torch.ops.kedge.keep.default:
            node.args = (node.args[0], None, node.args[2])  # so that the layer's own operations are dead code
    program.graph.eliminate_dead_code()
    signature, state = program.graph_signature, network.state_dict(keep_vars=True)
    lifted = signature.inputs_to_lifted_tensor_constants
    tensors = {**program.state_dict, **program.constants}
    constants: dict[str, Tensor] = {}
    references: dict[str, dict[str, str]] = {}
    used = {node.name for node in program.graph.nodes if node.users}
    for placeholder, full in {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **lifted}.items():
        name = full.removeprefix("network.")
        if placeholder not in used:
            continue
        if name not in state:
            name = f"{CONSTANTS}.c{len(constants)}"
            constants[name] = tensors[full].detach().clone()
        references[placeholder] = {"tensor": name}
    nodes = []
    for node in program.graph.nodes:
        if node.op == "call_function" and not node.name.startswith(_WITHOUT_EFFECT):
            target, args = _target(node)
            nodes.append([node.name, target, _encoded(args, references), _encoded(node.kwargs, references)])
    described = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), isinstance(tensor, nn.Parameter)]
        for name, tensor in {**state, **constants}.items()
        if isinstance(tensor, Tensor)
    }
    output = next(node for node in program.graph.nodes if node.op == "output")
    return {
        "schema": SCHEMA,
        "shape": list(example.shape[1:]),
        "input": signature.user_inputs[0],
        "nodes": nodes,
        "output": _encoded(output.args[0][0], references),
        "layers": dict(layers),
        "tensors": described,
    }, constants


def _inline(module: fx.GraphModule) -> None:
    """Put the operations of blocks without autocast or gradients into the graph around them."""
    graph = module.graph
    for block in [node for node in graph.nodes if getattr(node.target, "__name__", "") in _BLOCKS]:
        first = next(i for i, value in enumerate(block.args) if isinstance(value, fx.Node) and value.op == "get_attr")
        inner = getattr(module, block.args[first].target)
        _inline(inner)
        inputs = (node for node in inner.graph.nodes if node.op == "placeholder")
        with graph.inserting_before(block):
            outputs: Any = graph.graph_copy(inner.graph, dict(zip(inputs, block.args[first + 1 :], strict=True)))
        for user in list(block.users):  # each takes one of the outputs
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(block)


def _target(node: fx.Node) -> tuple[str, Sequence[Any]]:
    """What a node of the exported graph calls, checked, and its arguments."""
    if node.target in (torch.ops.kedge.mark.default, torch.ops.kedge.keep.default):
        return f"layer.{node.args[-1]}", node.args[:1]
    function: Any = node.target
    if isinstance(function, torch._ops.OpOverload):
        name = str(function)
    else:
        name = f"operator.{getattr(function, '__name__', function)}"
    try:
        operation(name)
    except FileFormatError as error:
        raise ArchitectureError(f"the network computes {name}, which a stored graph does not support") from error
    return name, node.args


def _encoded(value: Any, references: Mapping[str, dict[str, str]]) -> Any:
    """An argument of a node as plain data."""
    if isinstance(value, fx.Node):
        return references.get(value.name, {"node": value.name})
    if isinstance(value, (list, tuple)):
        return [_encoded(each, references) for each in value]
    if isinstance(value, Mapping):
        return {key: _encoded(each, references) for key, each in value.items()}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.device):
        return {"device": ""}  # that of the images
    for kind in ("dtype", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise ArchitectureError(f"the network computes with a {type(value).__name__}, which a stored graph cannot hold")
