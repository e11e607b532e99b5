"""A calibrated detector as one ONNX file: images in, results out."""

import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kedge.checks import at_least, needs
from kedge.detectors import Detector
from kedge.errors import ArchitectureError, InputError, KedgeError, NotReadyError
from kedge.export.cascade import join
from kedge.export.file import EXIT_THRESHOLD, PREFIX, rule, set_metadata, set_tensors, write_calibration, write_model
from kedge.export.graph import OUTPUTS, Graph, check_exportable

FIRST_OPSET, LAST_OPSET = 18, 25  # what torch's exporter writes, and the last that onnxscript converts it to
OPSET = 20  # has GELU as one operation, which is twice as fast as its parts


def export_onnx(
    detector: Detector, path: str | os.PathLike[str], *, opset: int = OPSET, sha256: str | None = None
) -> None:
    """Write a calibrated detector to one ONNX file that needs neither kedge nor torch.

    Input: ``images``, uint8 (N, D, H, W) of the network's size. Outputs: ``label``, ``probability`` of that label,
    ``score``, ``tau`` (AMP and Student), ``p_value`` and ``is_ood``, (N,) each, and with early exit the number of
    ``passes``. Normalisation, anchors, score and calibration are inside; resizing is not, and is described in the
    metadata ``kedge.preprocess``.

    Args:
        detector: AMP with anchors that all images share, Student, TemperatureScaling, or another method that reads the
            logits alone, or with them the input of the last layer, as KNN and ViM do; calibrated.
        path: The file to write.
        opset: Version of ONNX's operations, from 18 to 25.
        sha256: Hash of the detector's own file, for the metadata; by default that of what `Detector.save` would write.

    Raises:
        InputError: The detector is of another kind.
        NotReadyError: It is not calibrated, or the extra ``onnx`` is not installed.
        ArchitectureError: The network has operations that ONNX lacks.

    Example:
        >>> from kedge.detectors import MSP
        >>> from kedge.export import OnnxDetector
        >>> folder, net = tempfile.mkdtemp(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> detector = MSP(net).fit(torch.rand(8, 3, 2, 2)).calibrate(torch.rand(20, 3, 2, 2))
        >>> export_onnx(detector, folder + "/flat.onnx")
        >>> OnnxDetector(folder + "/flat.onnx")(torch.zeros(4, 3, 2, 2, dtype=torch.uint8))["is_ood"].shape
        (4,)
    """
    if not isinstance(detector, Detector):
        raise InputError(f"detector must be a kedge detector, got {type(detector).__name__}")
    if at_least("opset", opset, FIRST_OPSET) > LAST_OPSET:
        raise InputError(f"opset must be a whole number from {FIRST_OPSET} to {LAST_OPSET}; got {opset!r}")
    check_exportable(detector)
    if detector.preprocess is None or detector.calibration is None:
        raise NotReadyError("the detector must be fitted and calibrated before it is exported: call fit and calibrate")
    images = torch.zeros(2, *detector.preprocess.shape, dtype=torch.uint8)
    detector(images)  # raises if anything else is not ready
    model = _model(detector, images, opset)
    set_metadata(model, _facts(detector, sha256 or _sha256(detector)))
    values = {name: value for name, value in vars(detector.calibration).items() if name != "fingerprints"}
    write_calibration(model, **values)
    write_model(model, path)


def _model(detector: Any, images: torch.Tensor, opset: int) -> Any:
    """The detector as onnx's ModelProto."""
    k, least = getattr(detector.net, "k", 0), getattr(detector, "min_anchors", 0)
    if not least or k <= least:
        return _traced(Graph(detector), [images], opset)
    first = Graph(detector, range(least))
    with torch.no_grad():
        known = dict(zip(first.names, first(images), strict=True))["hypotheses"]
    few = _traced(first, [images], opset)
    model = join(few, _traced(Graph(detector, range(least, k)), [images, known], opset), (least, k))
    set_tensors(model, {EXIT_THRESHOLD: np.float32(detector.exit_threshold)})
    return model


def _traced(graph: Graph, inputs: Sequence[torch.Tensor], opset: int) -> Any:
    """The graph as onnx's ModelProto, with an open number of images."""
    needs("onnx", "onnx")
    needs("onnxscript", "onnx")
    try:
        with _quiet(), torch.no_grad():
            # Captured here: if this fails, the exporter would try other ways, and bake a branch into the graph.
            names = ("images", "known")[: len(inputs)]
            shapes = {name: {0: torch.export.Dim("N")} for name in names}
            captured = torch.export.export(graph, tuple(inputs), dynamic_shapes=shapes, strict=False)
            options: Any = {"input_names": list(names), "output_names": list(graph.names), "opset_version": opset}
            program = torch.onnx.export(captured, (), dynamo=True, verbose=False, **options)
    except KedgeError:
        raise
    except Exception as error:  # the exporter raises many kinds
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise ArchitectureError(
            f"{type(graph.net.network).__name__} cannot be exported to ONNX, opset {opset}: {reason}. Its forward must "
            "consist of tensor operations, for any number of images"
        ) from error
    assert program is not None
    model = program.model_proto
    written = next(each.version for each in model.opset_import if not each.domain)
    if written != opset:  # the exporter only logs that it could not convert
        raise InputError(
            f"opset must be one that the installed onnxscript knows; {opset} gave a file of opset {written}: "
            f"pass {OPSET}, or pip install -U onnxscript"
        )
    _strip(model)
    return model


def _strip(model: Any) -> None:
    """Remove the file names and lines of this machine's source, which no reader needs."""
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer, model.graph):
        del part.metadata_props[:]
        part.doc_string = ""
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    outputs = [value for value in model.graph.output if value.name in OUTPUTS]
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def _facts(detector: Detector, sha256: str) -> dict[str, str]:
    assert detector.preprocess is not None
    return {
        f"{PREFIX}method": detector.name,
        f"{PREFIX}options": json.dumps(detector.config()),
        f"{PREFIX}classes": json.dumps(list(detector.classes)),
        f"{PREFIX}preprocess": rule(detector.preprocess),
        f"{PREFIX}detector_sha256": sha256,
        f"{PREFIX}version": version("kedge"),
    }


def _sha256(detector: Detector) -> str:
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        file = Path(folder) / "detector.kedge"
        detector.save(file)
        return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's notices, which a user cannot act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
