"""Run an exported detector with onnxruntime or OpenVINO."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.checks import at_least, needs, one_of
from kedge.data import batches
from kedge.errors import FileFormatError, InputError, KedgeWarning
from kedge.export.file import PREFIX, checked_metadata, preprocess_of
from kedge.export.graph import OUTPUTS

ENGINES = ("onnxruntime", "openvino")
OLD_NAMES = {"temperature": "tau"}  # of outputs in files of kedge 0.1
BATCH = 16  # times the anchors; the activations of larger batches do not fit into the caches

Arrays = dict[str, NDArray[Any]]
Run = Callable[[NDArray[np.uint8]], Arrays]


class OnnxDetector:
    """An exported detector: images in, a dictionary of arrays out.

    Args:
        path: A file that `export_onnx` or `quantise` wrote.
        engine: ``"onnxruntime"`` or ``"openvino"``.
        threads: Threads of the engine; by default torch's number.

    Attributes:
        metadata: The description in the file, by key.
        preprocess: How images become inputs.
        outputs: The names of the arrays.

    Example:
        >>> OnnxDetector("no-such.onnx")
        Traceback (most recent call last):
        kedge.errors.InputError: path must be an ONNX file that kedge exported; there is no file no-such.onnx
    """

    def __init__(
        self, path: str | os.PathLike[str], *, engine: str = "onnxruntime", threads: int | None = None
    ) -> None:
        package(engine)
        file = Path(path)
        if not file.is_file():
            raise InputError(f"path must be an ONNX file that kedge exported; there is no file {path}")
        start = _onnxruntime if engine == "onnxruntime" else _openvino
        count = torch.get_num_threads() if threads is None else at_least("threads", threads, 1)
        self._run, metadata, names = start(file, count)
        self.metadata = checked_metadata(metadata, file)
        self._names = {OLD_NAMES.get(name, name): name for name in names}
        self.outputs = tuple(self._names)
        self.preprocess = preprocess_of(self.metadata)
        calibrated_for = self.metadata.get(f"{PREFIX}engine", engine)
        if calibrated_for != engine:
            warnings.warn(
                f"{file} was calibrated on the scores of {calibrated_for}, and {engine} rounds differently, so its "
                f"threshold is not exact: calibrate it again with engine={engine!r}",
                KedgeWarning,
                stacklevel=2,
            )

    def __call__(self, images: Any, *, batch_size: int = BATCH) -> Arrays:
        """The results for N images, an array (N,) for each of `outputs`.

        Args:
            images: In any form that `kedge.data.batches` takes; floating point ones are rounded to the file's 8 bits.
            batch_size: Images at a time.
        """
        loaded = batches(images, self.preprocess, size=at_least("batch_size", batch_size, 1))
        parts = [self._run(np.ascontiguousarray(as_uint8(x).cpu().numpy())) for x, _ in loaded]
        return {name: np.concatenate([part[stored] for part in parts]) for name, stored in self._names.items()}


def as_uint8(images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] as 8-bit ones."""
    return images if images.dtype == torch.uint8 else (images * 255).round().clamp(0, 255).to(torch.uint8)


def package(engine: str) -> Any:
    """The package of an engine, imported; if it is missing, an error that says how to install it."""
    one_of("engine", engine, ENGINES)
    if engine == "onnxruntime":
        return needs("onnxruntime", "onnx")
    # openvino reports its import over the network, unless its telemetry package cannot be imported.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return needs("openvino", "openvino")


def _onnxruntime(file: Path, threads: int) -> tuple[Run, dict[str, str], tuple[str, ...]]:
    runtime = package("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = threads
    try:
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no base but Exception
        raise FileFormatError(f"onnxruntime cannot read {file}: {error}") from error
    names = tuple(output.name for output in session.get_outputs())

    def run(images: NDArray[np.uint8]) -> Arrays:
        return dict(zip(names, session.run(names, {"images": images}), strict=True))

    return run, dict(session.get_modelmeta().custom_metadata_map), names


def _names(known_as: Sequence[Set[str]]) -> tuple[str, ...]:
    """The outputs' own names, in order: OpenVINO gives a tensor the names of all that are equal to it."""
    chosen: list[str] = []
    for names in known_as:
        own = [name for name in (*OUTPUTS, *OLD_NAMES, "logits") if name in names and name not in chosen]
        chosen.append(own[0] if own else sorted(names)[0])
    return tuple(chosen)


def _openvino(file: Path, threads: int) -> tuple[Run, dict[str, str], tuple[str, ...]]:
    openvino = package("openvino")
    # Processors with bfloat16 would use it by default, and the scores would differ from the file's.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    try:
        core = openvino.Core()
        model = core.read_model(file)
        keys = model.rt_info["framework"] if model.has_rt_info("framework") else ()
        metadata = {key: model.get_rt_info(["framework", key]).astype(str) for key in keys}
        compiled = core.compile_model(model, "CPU", exact)
    except RuntimeError as error:
        raise FileFormatError(f"OpenVINO cannot read {file}: {error}") from error
    names = _names([output.names for output in compiled.outputs])
    request = compiled.create_infer_request()

    def run(images: NDArray[np.uint8]) -> Arrays:
        results = request.infer({"images": images})
        return {name: np.array(results[name]) for name in names}  # a copy: the next call writes into the same memory

    return run, metadata, names
