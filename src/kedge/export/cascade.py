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
    make, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    model, second = _prefixed(few, FEW), _prefixed(rest, REST)
    graph, outputs = model.graph, [copy.deepcopy(value) for value in few.graph.output]
    outputs.append(onnx.helper.make_tensor_value_info("passes", onnx.TensorProto.INT64, ["N"]))
    names = [value.name for value in outputs]
    carried = [*names, "logits"]  # not an output, but it has its name in the graph
    graph.initializer.extend(
        [
            tensor(np.float32(0), EXIT_THRESHOLD),
            tensor(np.array([0], np.int64), f"{OPEN}/axis"),
            *(
                tensor(np.array(count, np.int64), f"{OPEN}/{name}")
                for name, count in zip(("few", "all"), passes, strict=True)
            ),
        ]
    )
    graph.node.extend(
        [
            make("LessOrEqual", [f"{FEW}score", EXIT_THRESHOLD], [f"{OPEN}/not"], name=f"{OPEN}/not"),
            make("Not", [f"{OPEN}/not"], [OPEN], name=OPEN),  # a NaN score does not exit
            make("Cast", [OPEN], [f"{OPEN}/number"], name=f"{OPEN}/number", to=onnx.TensorProto.INT64),
            make("ReduceSum", [f"{OPEN}/number", f"{OPEN}/axis"], [f"{OPEN}/sum"], name=f"{OPEN}/sum", keepdims=0),
            make("Cast", [f"{OPEN}/sum"], [f"{OPEN}/any"], name=f"{OPEN}/any", to=onnx.TensorProto.BOOL),
            make("NonZero", [OPEN], [f"{OPEN}/at"], name=f"{OPEN}/at"),
            make("Transpose", [f"{OPEN}/at"], [f"{OPEN}/rows"], name=f"{OPEN}/rows", perm=[1, 0]),
            make("Where", [OPEN, f"{OPEN}/all", f"{OPEN}/few"], ["passes"], name="passes"),
        ]
    )
    scattered = [name for name in carried if name != "passes"]
    second_branch = [
        make("Compress", ["images", OPEN], [f"{REST}images"], name=f"{REST}images", axis=0),
        make("Compress", [f"{FEW}hypotheses", OPEN], [f"{REST}known"], name=f"{REST}known", axis=0),
        *second.graph.node,
        *(
            make("ScatterND", [f"{FEW}{name}", f"{OPEN}/rows", f"{REST}{name}"], [f"then/{name}"], name=f"then/{name}")
            for name in scattered
        ),
    ]
    kept = [make("Identity", [f"{FEW}{name}"], [f"else/{name}"], name=f"else/{name}") for name in scattered]
    own = [value for value in second.graph.initializer if value.name not in CALIBRATION]
    typed = {value.name: value for value in outputs} | {
        "logits": onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", None])
    }
    graph.node.append(
        make(
            "If",
            [f"{OPEN}/any"],
            scattered,
            name=OPEN + "/if",
            then_branch=onnx.helper.make_graph(
                second_branch, "rest", [], [_renamed(typed[n], f"then/{n}") for n in scattered], own
            ),
            else_branch=onnx.helper.make_graph(kept, "few", [], [_renamed(typed[n], f"else/{n}") for n in scattered]),
        )
    )
    del graph.output[:]
    graph.output.extend(outputs)
    return model


def parts(model: Any) -> tuple[Any, Any, tuple[int, int]] | None:
    """The two models and the passes that `join` was given; None for a model of another kind."""
    onnx = needs("onnx", "onnx")
    branch = next((node for node in model.graph.node if node.name == f"{OPEN}/if"), None)
    if branch is None:
        return None
    inside = next(value.g for value in branch.attribute if value.name == "then_branch")
    shared = [value for value in model.graph.initializer if value.name in CALIBRATION]
    outputs = [value for value in model.graph.output if value.name != "passes"]
    models = []
    for prefix, nodes, tensors in (
        (FEW, model.graph.node, model.graph.initializer),
        (REST, inside.node, inside.initializer),
    ):
        inputs = [copy.deepcopy(model.graph.input[0])]
        if prefix == REST:
            inputs.append(onnx.helper.make_tensor_value_info("known", onnx.TensorProto.FLOAT, ["N", None, None]))
        one = onnx.helper.make_graph(
            [copy.deepcopy(n) for n in nodes if n.name.startswith(prefix) and n.op_type != "Compress"],
            prefix,
            inputs,
            outputs,
            [copy.deepcopy(value) for value in tensors if value.name.startswith(prefix)] + shared,
        )
        _rename(one, lambda name, prefix=prefix: name.removeprefix(prefix))
        part = copy.deepcopy(model)
        part.graph.CopyFrom(one)
        models.append(part)
    held = {value.name: value for value in model.graph.initializer}
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
