"""Run an exported detector with onnxruntime or OpenVINO, and compare its results with those of the detector."""

import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.checks import at_least, needs, one_of
from kedge.data import batches
from kedge.detectors import Detector
from kedge.errors import FileFormatError, InputError, KedgeWarning, NotReadyError
from kedge.export.file import PREFIX, WEIGHT_BITS, checked_metadata, preprocess_of
from kedge.export.graph import OUTPUTS
from kedge.threads import sums_products_exactly

ENGINES = ("onnxruntime", "openvino")
OLD_NAMES = {"temperature": "tau"}  # of outputs in files of kedge 0.1
CLOSE = 1e-4  # of the largest score or logit, as far as float32 carries through a network
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

        if self.metadata.get(WEIGHT_BITS) == "8" and not sums_products_exactly():
            warnings.warn(
                f"{file} has weights of 8 bits, whose sums overflow on this processor, which has no VNNI: quantise it "
                "again here, or with weight_bits=7 (kedge export --weight-bits 7)",
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


@dataclass(frozen=True)
class Difference:
    """The difference between the results of a file and of its detector.

    Attributes:
        largest: The largest difference of two scores.
        scale: The largest absolute score.
        verdicts: Images with another label or decision that rounding does not explain.
    """

    largest: float
    scale: float
    verdicts: int

    @property
    def is_close(self) -> bool:
        """Whether the difference is only rounding."""
        return self.largest <= CLOSE * self.scale and not self.verdicts  # NaN is not close


def compare_verdicts(detector: Detector, path: str | os.PathLike[str], *, images: int = 8, seed: int = 0) -> Difference:
    """Compare a calibrated detector with the file it was exported to, on random images, at once and one by one."""
    if detector.preprocess is None or detector.calibration is None:
        raise NotReadyError("the detector must be fitted and calibrated before it is compared: call fit and calibrate")
    shape = (at_least("images", images, 1), *detector.preprocess.shape)
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    expected, exported = detector(pixels), OnnxDetector(path)
    both = [exported(pixels, batch_size=size) for size in (images, 1)]
    scores, logits = expected.score.double().numpy(), expected.logits.double().sort(dim=1).values.numpy()
    scale = float(np.abs(scores).max())
    sure_label = logits[:, -1] - logits[:, -2:][:, 0] > CLOSE * np.abs(logits).max()
    sure_decision = np.abs(scores - detector.calibration.threshold) > CLOSE * scale
    sure_exit = np.ones(images, np.bool_)  # rounding cannot change whether these images exit early
    if getattr(detector, "exit_threshold", None) is not None:
        method: Any = detector
        with torch.no_grad():
            few = method.per_anchor_logits(method.as_input(pixels), range(method.min_anchors))
            score = method.of_per_anchor_logits(few).score.double().numpy()
        sure_exit = np.abs(score - method.exit_threshold) > CLOSE * np.abs(score).max()
    largest, others = 0.0, np.zeros(images, np.bool_)
    for outputs in both:
        others |= sure_label & (outputs["label"] != expected.label.numpy())
        others |= sure_decision & (outputs["is_ood"] != expected.is_ood.numpy())
        largest = float(np.max(np.abs(outputs["score"] - scores)[sure_exit], initial=largest))
    if not all(np.isfinite(outputs["score"]).all() for outputs in both):
        largest = math.nan
    return Difference(largest, scale, int((others & sure_exit).sum()))


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
