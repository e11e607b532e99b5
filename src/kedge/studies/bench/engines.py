"""Everything that can give a verdict on the same images, each started from files, in this process or in another."""

import math
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.checks import between, one_of
from kedge.detectors import AMP, Detector, for_inference, load
from kedge.errors import InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.experimental import EarlyExit
from kedge.export import OnnxDetector, export_onnx, quantise
from kedge.export.file import EXIT_THRESHOLD, read_model, set_tensors, write_model
from kedge.export.runtime import ENGINES, package
from kedge.models import Spec
from kedge.studies.bench.plain import Naive, channels_last, without_anchors
from kedge.studies.bench.subjects import HELD_OUT, noise

OPEN = 0.2  # share of images that take all anchors with early exit, by default
MIN_ANCHORS = 2  # for every image, with early exit
PLAIN, EXACT = "plain", "kedge"
TITLES = {
    PLAIN: "one plain forward pass",
    "naive": "naive AMP, K passes of pairs",
    EXACT: "kedge",
    "folded": "kedge, norms folded",
    "auto": "kedge, norms folded, early exit",
    "onnxruntime-fp32": "onnxruntime, float32",
    "onnxruntime-int8": "onnxruntime, int8",
    "openvino-fp32": "OpenVINO, float32",
    "openvino-int8": "OpenVINO, int8",
    "onnxruntime-fp32-auto": "onnxruntime, float32, early exit",
    "onnxruntime-int8-auto": "onnxruntime, int8, early exit",
    "openvino-fp32-auto": "OpenVINO, float32, early exit",
    "openvino-int8-auto": "OpenVINO, int8, early exit",
}


class Run(Protocol):
    """Gives the verdict on a batch of uint8 images (B, D, H, W), in whatever form."""

    def __call__(self, images: Tensor) -> Any:
        """The verdict."""


@dataclass(frozen=True)
class Prepared:
    """The files of all engines.

    Attributes:
        folder: Where they lie.
        shape: Of an image, (D, H, W).
        passes: Of the network for one image, at most.
        engines: Those that can run, the plain forward pass first.
        left_out: By engine, why it cannot run.
    """

    folder: Path
    shape: tuple[int, ...]
    passes: int
    engines: tuple[str, ...]
    left_out: Mapping[str, str]

    def start(self, engine: str, *, threads: int | None = None) -> Run:
        """Load an engine.

        Args:
            engine: One of `engines`.
            threads: Of engines that are not torch; by default as many as torch takes.
        """
        one_of("engine", engine, self.engines)
        return _STARTS[engine](self.folder, threads)


def check_engines(engines: Sequence[str] | None) -> None:
    """Raise unless all are known; None stands for all of them.

    Example:
        >>> check_engines(["kedge", "folded"])
    """
    for name in engines or ():
        one_of("engine", name, tuple(TITLES))


def prepare(
    detector: Detector,
    folder: Path,
    *,
    engines: Sequence[str] | None = None,
    training_images: Any = None,
    held_out: Any = None,
    report: Callable[[str], None] | None = None,
) -> Prepared:
    """Write what the engines start from: the detector, an adaptive twin of it, and ONNX files.

    Twins that give other scores, the adaptive one and those of 8-bit integers, are calibrated on their own scores.

    Args:
        detector: Calibrated, on one network of kedge's own.
        folder: Where to write.
        engines: Those to write for, beside the plain forward pass and kedge itself; all by default.
        training_images: For the ranges of 8-bit integers; random ones by default, which do for timing.
        held_out: To calibrate on; random ones by default.
        report: Called with what is done next.
    """
    if detector.preprocess is None or detector.calibration is None:
        raise NotReadyError("the detector must be fitted and calibrated before it is measured: call fit and calibrate")
    if not isinstance(getattr(detector.net.network, "spec", None), Spec):
        raise InputError("detector must have one network, of kedge's own, since every engine loads it from a file")
    check_engines(engines)
    folder.mkdir(parents=True, exist_ok=True)
    shape, said = detector.preprocess.shape, report or (lambda what: None)
    wanted = tuple(name for name in TITLES if engines is None or name in (PLAIN, EXACT, *engines))
    training_images = noise(64, shape, seed=2) if training_images is None else training_images
    left_out: dict[str, str] = {}
    with warnings.catch_warnings():
        if held_out is None:
            held_out = noise(HELD_OUT, shape, seed=3)
            warnings.simplefilter("ignore", KedgeWarning)  # they may be too few for the promise, which does not matter
        if isinstance(detector, EarlyExit):
            promised = detector.calibration
            detector = detector.without_early_exit()
            detector.calibrate(held_out, alpha=promised.alpha, delta=promised.delta)
        detector.save(folder / "detector.kedge")
        shared = isinstance(detector, AMP) and detector.net.per_image is None
        adaptive = [name for name in wanted if name.endswith("auto")]
        if not shared:
            left_out |= dict.fromkeys(("naive", *adaptive), "it is for AMP with anchors that all images share")
        elif detector.cost.forward <= MIN_ANCHORS:
            left_out |= dict.fromkeys(adaptive, f"it is for AMP with more than {MIN_ANCHORS} anchors")
        elif adaptive:
            said("adaptive anchors")
            _attempt(left_out, adaptive, lambda: _write_adaptive(detector, folder / "auto.kedge", held_out))
        exports = [name for name in wanted if name.partition("-")[0] in ENGINES and name not in left_out]
        for file, source in (("fp32.onnx", "detector.kedge"), ("auto.onnx", "auto.kedge")):
            if those := [name for name in exports if (name in adaptive) == (source == "auto.kedge")]:
                said("export to ONNX")
                _attempt(left_out, those, partial(_export, folder / source, folder / file))
        for name in exports:
            if name not in left_out:
                said(TITLES[name])
                _attempt(left_out, (name,), partial(_write_onnx, name, folder, training_images, held_out))
    kept = {name: reason for name, reason in left_out.items() if name in wanted}
    return Prepared(folder, shape, detector.cost.forward, tuple(name for name in wanted if name not in kept), kept)


class Adaptive(ABC):
    """AMP with early exit, whose exit threshold can be set so that a given share of images takes all anchors."""

    @abstractmethod
    def __call__(self, images: Tensor) -> Any:
        """The verdict."""

    @abstractmethod
    def settle(self, bound: float) -> None:
        """Set the exit threshold."""

    @abstractmethod
    def mean_passes(self, images: Tensor) -> float:
        """The mean number of passes that images take."""

    def leave_open(self, images: Tensor, share: float) -> None:
        """Set the bound by these images: for timing alone, since the threshold does not follow."""
        between("share", share, 0, 1)
        self.settle(math.inf)
        ordered = sorted(arrays(self(images))["score"].tolist())
        edges, settled = [-math.inf, *ordered, math.inf], round((1 - share) * len(images))
        self.settle((edges[settled] + edges[settled + 1]) / 2)  # between two, so that rounding moves none


class _TorchAdaptive(Adaptive):
    def __init__(self, detector: EarlyExit) -> None:
        self.detector = detector

    def __call__(self, images: Tensor) -> Any:
        return self.detector(images, batch_size=len(images))

    def settle(self, bound: float) -> None:
        self.detector.exit_threshold = bound

    def mean_passes(self, images: Tensor) -> float:
        return self.detector.mean_passes(images)


class _OnnxAdaptive(Adaptive):
    def __init__(self, path: Path, runtime: str, threads: int | None) -> None:
        self.path, self.start = path, partial(OnnxDetector, engine=runtime, threads=threads)
        self.detector = self.start(path)

    def __call__(self, images: Tensor) -> Any:
        return self.detector(images, batch_size=len(images))

    def settle(self, bound: float) -> None:
        model = read_model(self.path)
        set_tensors(model, {EXIT_THRESHOLD: np.float32(bound)})
        with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
            write_model(model, Path(folder) / "bound.onnx")
            self.detector = self.start(Path(folder) / "bound.onnx")

    def mean_passes(self, images: Tensor) -> float:
        return float(self.detector(images)["passes"].mean())


def arrays(verdict: Any) -> dict[str, NDArray[Any]]:
    """Labels, scores and decisions of a detector of kedge or an exported one, in one form."""
    names = ("label", "score", "is_ood")
    if isinstance(verdict, Mapping):
        return {name: verdict[name] for name in names}
    return {name: getattr(verdict, name).numpy() for name in names}


def _write_adaptive(detector: Detector, path: Path, held_out: Any) -> None:
    assert isinstance(detector, AMP)
    assert detector.calibration is not None
    promised = detector.calibration
    EarlyExit(detector).calibrate(held_out, alpha=promised.alpha, delta=promised.delta).save(path)


def _export(source: Path, path: Path) -> None:
    export_onnx(load(source), path)


def _write_onnx(name: str, folder: Path, training_images: Any, held_out: Any) -> None:
    """The file of an engine that is not torch, once it is known that the engine is there."""
    runtime, kind, *auto = name.split("-")
    package(runtime)
    if kind == "int8":
        exact = "auto.onnx" if auto else "fp32.onnx"
        quantise(folder / exact, folder / f"{name}.onnx", training_images, held_out, engine=runtime)


def _attempt(left_out: dict[str, str], engines: Sequence[str], action: Callable[[], Any]) -> None:
    """Do what some engines need, or note down why they are left out."""
    try:
        action()
    except KedgeError as error:
        left_out.update(dict.fromkeys(engines, str(error)))


def _plain(folder: Path, threads: int | None) -> Run:
    net = load(folder / "detector.kedge").net
    plain = channels_last(without_anchors(net) if isinstance(net, Anchored) else net).eval()

    @torch.inference_mode()
    def run(images: Tensor) -> Any:
        return plain(images)

    return run


def _naive(folder: Path, threads: int | None) -> Run:
    detector = load(folder / "detector.kedge")
    assert isinstance(detector, AMP)
    return Naive(detector)


def _kedge(folder: Path, threads: int | None) -> Run:
    return _at_once(load(folder / "detector.kedge"))


def _folded(folder: Path, threads: int | None) -> Run:
    return _at_once(for_inference(load(folder / "detector.kedge")))


def _auto(folder: Path, threads: int | None) -> Run:
    detector = for_inference(load(folder / "auto.kedge"))
    assert isinstance(detector, EarlyExit)
    return _TorchAdaptive(detector)


def _onnx(file: str, runtime: str) -> Callable[[Path, int | None], Run]:
    return lambda folder, threads: _at_once(OnnxDetector(folder / file, engine=runtime, threads=threads))


def _onnx_auto(file: str, runtime: str) -> Callable[[Path, int | None], Run]:
    return lambda folder, threads: _OnnxAdaptive(folder / file, runtime, threads)


def _at_once(detector: Detector | OnnxDetector) -> Run:
    return lambda images: detector(images, batch_size=len(images))


_STARTS: dict[str, Callable[[Path, int | None], Run]] = {
    PLAIN: _plain,
    "naive": _naive,
    EXACT: _kedge,
    "folded": _folded,
    "auto": _auto,
    "onnxruntime-fp32": _onnx("fp32.onnx", "onnxruntime"),
    "onnxruntime-int8": _onnx("onnxruntime-int8.onnx", "onnxruntime"),
    "openvino-fp32": _onnx("fp32.onnx", "openvino"),
    "openvino-int8": _onnx("openvino-int8.onnx", "openvino"),
    "onnxruntime-fp32-auto": _onnx_auto("auto.onnx", "onnxruntime"),
    "onnxruntime-int8-auto": _onnx_auto("onnxruntime-int8-auto.onnx", "onnxruntime"),
    "openvino-fp32-auto": _onnx_auto("auto.onnx", "openvino"),
    "openvino-int8-auto": _onnx_auto("openvino-int8-auto.onnx", "openvino"),
}
