"""Early exit in one ONNX graph: the second of two graphs runs only for the images that do not exit after the first."""

import copy
from typing import Any

import numpy as np

from kedge.checks import needs
from kedge.export.file import CALIBRATION, EXIT_THRESHOLD

FEW, REST = "few/", "rest/"  # prefixes of the names in the two graphs, except of what they share
OPEN = "open"  # whether an image does not exit early


def join(few: Any, rest: Any, passes: tuple[int, int]) -> Any:
    """One model that runs ``rest`` only for the images that do not exit after ``few``.

    It has their outputs and ``passes``, the number of anchors that each image took.

    Args:
        few: onnx's ModelProto of the first anchors.
        rest: The model of the others; it takes the per-anchor logits of the first as well.
        passes: The anchors of an image that exits early, and of one that does not.
    """
    onnx = needs("onnx", "onnx")
    types, info = onnx.TensorProto, onnx.helper.make_tensor_value_info

    def op(kind: str, inputs: list[str], output: str, **options: Any) -> Any:
        return onnx.helper.make_node(kind, inputs, [output], name=output, **options)

    def branch(prefix: str, nodes: list[Any], tensors: list[Any]) -> Any:
        inside = [_renamed(value, f"{prefix}/{value.name}") for value in scattered]
        return onnx.helper.make_graph(nodes, prefix, [], inside, tensors)

    model, second = _prefixed(few, FEW), _prefixed(rest, REST)
    # The logits are no output of the file, but have their name in the graph.
    scattered = [*few.graph.output, info("logits", types.FLOAT, ["N", None])]
    names = [value.name for value in scattered]
    numbers = {f"{OPEN}/axis": [0], f"{OPEN}/few": passes[0], f"{OPEN}/all": passes[1]}
    constants = {EXIT_THRESHOLD: np.float32(0), **{name: np.array(n, np.int64) for name, n in numbers.items()}}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    model.graph.node.extend(
        [
            op("LessOrEqual", [f"{FEW}score", EXIT_THRESHOLD], f"{OPEN}/not"),
            op("Not", [f"{OPEN}/not"], OPEN),  # a NaN score does not exit
            op("Cast", [OPEN], f"{OPEN}/number", to=types.INT64),
            op("ReduceSum", [f"{OPEN}/number", f"{OPEN}/axis"], f"{OPEN}/sum", keepdims=0),
            op("Cast", [f"{OPEN}/sum"], f"{OPEN}/any", to=types.BOOL),
            op("NonZero", [OPEN], f"{OPEN}/at"),
            op("Transpose", [f"{OPEN}/at"], f"{OPEN}/rows", perm=[1, 0]),
            op("Where", [OPEN, f"{OPEN}/all", f"{OPEN}/few"], "passes"),
        ]
    )
    then = [
        op("Compress", ["images", OPEN], f"{REST}images", axis=0),
        op("Compress", [f"{FEW}hypotheses", OPEN], f"{REST}known", axis=0),
        *second.graph.node,
        *(op("ScatterND", [f"{FEW}{name}", f"{OPEN}/rows", f"{REST}{name}"], f"then/{name}") for name in names),
    ]
    otherwise = [op("Identity", [f"{FEW}{name}"], f"else/{name}") for name in names]
    own = [value for value in second.graph.initializer if value.name not in CALIBRATION]
    both = {"then_branch": branch("then", then, own), "else_branch": branch("else", otherwise, [])}
    model.graph.node.append(onnx.helper.make_node("If", [f"{OPEN}/any"], names, name=f"{OPEN}/if", **both))
    del model.graph.output[:]
    model.graph.output.extend([*few.graph.output, info("passes", types.INT64, ["N"])])
    return model


def parts(model: Any) -> tuple[Any, Any, tuple[int, int]] | None:
    """The two models and the passes that `join` was given; None for a model of another kind."""
    onnx = needs("onnx", "onnx")
    graph = model.graph
    branch = next((node for node in graph.node if node.name == f"{OPEN}/if"), None)
    if branch is None:
        return None
    inside = next(value.g for value in branch.attribute if value.name == "then_branch")
    shared = [value for value in graph.initializer if value.name in CALIBRATION]
    outputs = [value for value in graph.output if value.name != "passes"]
    known = onnx.helper.make_tensor_value_info("known", onnx.TensorProto.FLOAT, ["N", None, None])
    models = []
    for prefix, source, inputs in ((FEW, graph, [graph.input[0]]), (REST, inside, [graph.input[0], known])):
        nodes = [node for node in source.node if node.name.startswith(prefix) and node.op_type != "Compress"]
        own = [value for value in source.initializer if value.name.startswith(prefix)]
        part = copy.deepcopy(model)
        part.graph.CopyFrom(onnx.helper.make_graph(nodes, prefix, inputs, outputs, own + shared))
        _rename(part.graph, lambda name, prefix=prefix: name.removeprefix(prefix))
        models.append(part)
    held = {value.name: value for value in graph.initializer}
    few, all_ = (int(onnx.numpy_helper.to_array(held[f"{OPEN}/{name}"])) for name in ("few", "all"))
    return models[0], models[1], (few, all_)


def _prefixed(model: Any, prefix: str) -> Any:
    """A copy with a prefix before all names except those of the calibration and of the images."""
    shared = {*CALIBRATION, *(["images"] if prefix == FEW else [])}
    prefixed = copy.deepcopy(model)
    for number, node in enumerate(prefixed.graph.node):
        node.name = node.name or f"node {number}"  # `parts` finds them by their names
    _rename(prefixed.graph, lambda name: name if not name or name in shared else prefix + name)
    del prefixed.graph.value_info[:]
    return prefixed


def _rename(graph: Any, rule: Any) -> None:
    """Give the nodes and tensors of a graph, and of graphs inside it, other names."""
    for node in graph.node:
        node.name = rule(node.name)
        for names in (node.input, node.output):
            names[:] = [rule(name) for name in names]
        for value in node.attribute:
            for inside in (value.g, *value.graphs):
                if inside.node:
                    _rename(inside, rule)
    for value in (*graph.initializer, *graph.input, *graph.output):
        value.name = rule(value.name)


def _renamed(value: Any, name: str) -> Any:
    renamed = copy.deepcopy(value)
    renamed.name = name
    return renamed
