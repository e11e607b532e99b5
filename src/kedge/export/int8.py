"""8-bit quantisation: a smaller, faster file, whose scores differ a little and which gets a threshold of its own."""

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge import calibration
from kedge.anchoring.sampling import choose
from kedge.checks import at_least, needs
from kedge.data import Preprocess, batches
from kedge.data.leakage import fingerprints, halves, shared
from kedge.errors import InputError
from kedge.experimental.early_exit import exit_threshold
from kedge.export import file
from kedge.export.cascade import join, parts
from kedge.export.file import EXIT_THRESHOLD, PREFIX, WEIGHT_BITS, metadata, set_metadata, set_tensors
from kedge.export.runtime import OnnxDetector, as_uint8, package
from kedge.threads import sums_products_exactly

LINEAR = ("Conv", "Gemm", "MatMul")
QUANTISED = (
    *LINEAR,
    "Add",
    "Clip",
    "MaxPool",
    "Relu",
)  # operations that onnxruntime computes in 8 bits from end to end
IMAGES = 256
BATCH = 16


def quantise(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    training_images: Any,
    held_out: Any,
    *,
    images: int = IMAGES,
    engine: str = "onnxruntime",
    weight_bits: int | None = None,
    seed: int = 0,
) -> None:
    """Write an exported detector with 8-bit weights and activations, calibrated on its own scores.

    Weights have a scale for each channel. The first layer, and everything from the last linear layer on, stay in
    float32. The scores change, so the file gets a new threshold.

    Args:
        path: A file that `export_onnx` wrote.
        out: Where to write; may be the same file.
        training_images: Images for the ranges of activations, in any form that `kedge.data.batches` takes.
        held_out: Other in-distribution images, which were not trained on; see `recalibrate`.
        images: Number of training images to use, drawn at random.
        engine: The engine that will run the file; engines round 8-bit sums differently.
        weight_bits: 8, or 7 for processors whose sums of 8-bit products overflow, which are those with AVX2 and without
            VNNI; by default what suits this one. `OnnxDetector` warns where a file has too many.
        seed: Random seed of the draw.
    """
    if weight_bits is None:
        weight_bits = 8 if sums_products_exactly() else 7
    elif weight_bits not in (7, 8):
        raise InputError(f"weight_bits must be 7 or 8; got {weight_bits!r}")
    package(engine)
    quantization = needs("onnxruntime.quantization", "onnx")
    model = file.read_model(path)
    facts = metadata(model)
    preprocess = file.preprocess_of(facts)
    chosen = choose(training_images, preprocess, at_least("images", images, 1), "random", seed, at_least=1)
    given = {"images": as_uint8(chosen).numpy()}
    if (both := parts(model)) is None:
        quantised = _quantised(model, given, quantization, weight_bits)
    else:
        few, rest, passes = both
        known = {"known": _first_logits(few, given)}
        first = _quantised(few, given, quantization, weight_bits)
        quantised = join(first, _quantised(rest, given | known, quantization, weight_bits), passes)
    set_metadata(quantised, facts | {f"{PREFIX}quantised": "int8", WEIGHT_BITS: str(weight_bits)})
    file.write_model(_recalibrated(quantised, held_out, engine, None, None, seen=fingerprints(chosen)), out)


def _quantised(model: Any, given: Mapping[str, NDArray[Any]], quantization: Any, weight_bits: int) -> Any:
    in_float = _float_nodes(model)
    # The exporter has done what onnxruntime would do first; without this mark it would log a request for it.
    set_metadata(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        target = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            model,
            target,
            _Reader(given),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            reduce_range=weight_bits == 7,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=in_float,
        )
        return needs("onnx", "onnx").load(target)


def recalibrate(
    path: str | os.PathLike[str],
    held_out: Any,
    *,
    out: str | os.PathLike[str] | None = None,
    alpha: float | None = None,
    delta: float | None = None,
    engine: str = "onnxruntime",
) -> None:
    """Set a new threshold for an exported file, on the file's own scores.

    If the images have labels, the temperature of ``probability`` is fitted too; otherwise it is kept.

    Args:
        path: A file that `export_onnx` or `quantise` wrote.
        held_out: In-distribution images that the network was neither trained nor quantised on.
        out: The file to write; by default the same file.
        alpha: The largest share of in-distribution images to flag; by default the file's.
        delta: See `kedge.detectors.Detector.calibrate`; by default the file's, and None if ``alpha`` is given.
        engine: The engine that will run the file.
    """
    file.write_model(_recalibrated(file.read_model(path), held_out, engine, alpha, delta), path if out is None else out)


def _recalibrated(
    model: Any, held_out: Any, engine: str, alpha: float | None, delta: float | None, seen: Tensor | None = None
) -> Any:
    facts = metadata(model)
    if alpha is None:
        alpha, before = file.guarantee_of(facts)
        delta = before if delta is None else delta
    preprocess = file.preprocess_of(facts)
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    if EXIT_THRESHOLD in held:
        why = "the file learns from one which images need all anchors, and its threshold from the other"
        first, second = halves(held_out, preprocess, why)
        held_out = list(zip(second.images, second.labels.tolist(), strict=True))
        scores = []
        for bound in (math.inf, -math.inf):  # every image exits early, or none
            set_tensors(model, {EXIT_THRESHOLD: np.float32(bound)})
            scores.append(_scored(model, preprocess, first.images, engine, seen)[0])
        set_tensors(model, {EXIT_THRESHOLD: np.float32(exit_threshold(scores[0], scores[1], alpha))})
    own_scores, logits, labels = _scored(model, preprocess, held_out, engine, seen)
    if bool((labels >= 0).any()):
        temperature = calibration.temperature_of_known(logits, labels)
    else:
        temperature = float(needs("onnx", "onnx").numpy_helper.to_array(held[file.TEMPERATURE]))
    threshold = calibration.threshold(own_scores, alpha, delta)
    file.write_calibration(model, own_scores, threshold=threshold, temperature=temperature, alpha=alpha, delta=delta)
    set_metadata(model, metadata(model) | {f"{PREFIX}engine": engine})
    return model


def _scored(
    model: Any, preprocess: Preprocess, images: Any, engine: str, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, logits and labels of images, -1 for no label; images with a fingerprint in ``seen`` are refused."""
    scores, logits, labels = [], [], []
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        probe = Path(folder) / "probe.onnx"
        probe.write_bytes(_probe(model, "logits", 2))
        detector = OnnxDetector(probe, engine=engine)
        for x, y in batches(images, preprocess, size=BATCH):
            if seen is not None and len(shared(seen, fingerprints(x))):
                raise InputError("held_out must be other images than training_images; some are in both: use new ones")
            outputs = detector(x)
            scores.append(torch.from_numpy(outputs["score"]))
            logits.append(torch.from_numpy(outputs["logits"]))
            labels.append(torch.full((len(x),), -1) if y is None else y)
    return torch.cat(scores), torch.cat(logits), torch.cat(labels)


class _Reader:
    """Batches, in the form that onnxruntime's quantisation reads."""

    def __init__(self, given: Mapping[str, NDArray[Any]]) -> None:
        self.given, self.starts = given, iter(range(0, len(given["images"]), BATCH))

    def get_next(self) -> dict[str, Any] | None:
        start = next(self.starts, None)
        return None if start is None else {name: rows[start : start + BATCH] for name, rows in self.given.items()}


def _first_logits(few: Any, given: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The logits of the images under the first anchors, (N, K, C): an input of the graph of the others."""
    session, reader = package("onnxruntime").InferenceSession(_probe(few, "hypotheses", 3)), _Reader(given)
    return np.concatenate([session.run(["hypotheses"], part)[0] for part in iter(reader.get_next, None)])


def _probe(model: Any, output: str, ndim: int) -> bytes:
    """A copy of a model with a tensor inside it as an output too, for any engine."""
    onnx = needs("onnx", "onnx")
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    set_metadata(probe, {key: value for key, value in metadata(model).items() if key != f"{PREFIX}engine"})
    shape = ["N", *[None] * (ndim - 1)]
    probe.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, shape))
    content: bytes = probe.SerializeToString()
    return content


def _float_nodes(model: Any) -> list[str]:
    """The nodes to leave in float32: up to the first layer with its anchors' part, and from the last linear one on."""
    nodes = list(model.graph.node)  # an ONNX graph lists them in the order of computation
    behind_first: set[str] = set()  # tensors that depend on a linear layer
    late = set()
    for node in nodes:
        if behind_first.intersection(node.input):
            late.add(node.name)
        if node.op_type in LINEAR or node.name in late:
            behind_first.update(node.output)
    to_logits, to_last = {"logits"}, set[str]()  # tensors without and with a linear layer between them and the logits
    early = set()
    for node in reversed(nodes):
        if to_last.intersection(node.output):
            early.add(node.name)
            to_last.update(node.input)
        elif to_logits.intersection(node.output):
            (to_last if node.op_type in LINEAR else to_logits).update(node.input)
    adds_anchors = {node.name for node in nodes if any(name.endswith("anchor_maps") for name in node.input)}
    middle = late & early - adds_anchors
    if not any(node.op_type in LINEAR for node in nodes if node.name in middle):
        raise InputError("the network must have layers between its first and its last to be quantised; it has none")
    return [node.name for node in nodes if node.name not in middle]
