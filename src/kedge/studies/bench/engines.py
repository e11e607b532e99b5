"""The engines that are timed on the same images, each started from files, in this process or in another."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.checks import one_of
from kedge.detectors import AMP, Detector, for_inference, load
from kedge.errors import InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.export import OnnxDetector, export_onnx, quantise
from kedge.export.runtime import ENGINES, package
from kedge.models import Spec
from kedge.studies.bench import early_exit
from kedge.studies.bench.plain import Naive, channels_last, without_anchors
from kedge.studies.bench.subjects import HELD_OUT, noise_images

FULL_SHARE = 0.2  # default share of images that take all anchors under early exit
UNANCHORED, EXACT, EARLY_EXIT = "unanchored", "kedge", "early-exit"
TITLES = {
    UNANCHORED: "one forward pass, unanchored",
    "naive": "naive AMP, K passes of pairs",
    EXACT: "kedge",
    "folded": "kedge, norms folded",
    EARLY_EXIT: "kedge, norms folded, early exit",
}
for _exit, (_runtime, _title), _kind in product(
    ("", f"-{EARLY_EXIT}"), (("onnxruntime", "onnxruntime"), ("openvino", "OpenVINO")), ("fp32", "int8")
):
    _words = [_title, "float32" if _kind == "fp32" else _kind, *(["early exit"] if _exit else [])]
    TITLES[f"{_runtime}-{_kind}{_exit}"] = ", ".join(_words)


class BenchEngine(Protocol):
    """Computes the detection of a batch of uint8 images (B, D, H, W), in any form."""

    def __call__(self, images: Tensor) -> Any:
        """The detection."""


@dataclass(frozen=True)
class Prepared:
    """The files of all engines.

    Attributes:
        folder: Folder of the files.
        shape: Shape of an image, (D, H, W).
        passes: The most passes through the network for one image.
        engines: Those that can run, the unanchored forward pass first.
        left_out: By engine, why it cannot run.
    """

    folder: Path
    shape: tuple[int, ...]
    passes: int
    engines: tuple[str, ...]
    left_out: Mapping[str, str]

    def start(self, engine: str, *, threads: int | None = None) -> BenchEngine:
        """Load one of `engines`; ``threads`` of engines that are not torch are by default as many as torch's."""
        name, folder = one_of("engine", engine, self.engines), self.folder
        runtime, _, kind = name.partition("-")
        if runtime in ENGINES:
            early = kind.endswith(EARLY_EXIT)
            path = folder / (f"{name}.onnx" if kind.startswith("int8") else _exact_file(early))
            if early:
                return early_exit.OnnxEarlyExit(path, runtime, threads)
            return _at_once(OnnxDetector(path, engine=runtime, threads=threads))
        if name == EARLY_EXIT:
            return early_exit.EarlyExitEngine(for_inference(load(folder / "early-exit.kedge")))
        detector = load(folder / "detector.kedge")
        if name == UNANCHORED:
            return _forward(detector)
        if name == "naive":
            assert isinstance(detector, AMP)
            return Naive(detector)
        return _at_once(for_inference(detector) if name == "folded" else detector)


def check_engines(engines: Sequence[str] | None) -> None:
    """Raise unless all are known; None stands for all of them."""
    for name in engines or ():
        one_of("engine", name, tuple(TITLES))


def prepare_engines(
    detector: Detector,
    folder: Path,
    *,
    engines: Sequence[str] | None = None,
    training_images: Any = None,
    held_out: Any = None,
    report: Callable[[str], None] | None = None,
) -> Prepared:
    """Write the files that the engines start from: the detector, a copy with early exit, and ONNX files.

    Copies with other scores, those with early exit and of 8-bit integers, are calibrated on their own scores.

    Args:
        detector: Calibrated, on one network of kedge's own.
        folder: Where to write.
        engines: Engines to prepare, beside the unanchored forward pass and kedge itself; all by default.
        training_images: For the ranges of 8-bit integers; random ones by default, which do for timing.
        held_out: Images to calibrate on; random ones by default.
        report: Called with the title of each step.
    """
    if detector.preprocess is None or detector.calibration is None:
        raise NotReadyError("the detector must be fitted and calibrated before it is measured: call fit and calibrate")
    if not isinstance(getattr(detector.net.network, "spec", None), Spec):
        raise InputError("detector must have one network, of kedge's own, since every engine loads it from a file")
    check_engines(engines)
    folder.mkdir(parents=True, exist_ok=True)
    shape, note = detector.preprocess.shape, report or (lambda step: None)
    wanted = tuple(name for name in TITLES if engines is None or name in (UNANCHORED, EXACT, *engines))
    early = [name for name in wanted if name.endswith(EARLY_EXIT)]
    training_images = noise_images(64, shape, seed=2) if training_images is None else training_images
    left_out: dict[str, str] = {}
    with warnings.catch_warnings():
        if held_out is None:
            held_out = noise_images(HELD_OUT, shape, seed=3)
            warnings.simplefilter("ignore", KedgeWarning)  # they may be too few for alpha, which does not matter here
        detector = early_exit.without_early_exit(detector, held_out)
        detector.save(folder / "detector.kedge")
        if reason := early_exit.why_no_naive(detector):
            left_out["naive"] = reason
        if reason := early_exit.why_no_early_exit(detector):
            left_out |= dict.fromkeys(early, reason)
        elif early:
            note("early exit")
            with _leaving_out(left_out, early):
                early_exit.with_early_exit(detector, held_out).save(folder / "early-exit.kedge")
        exports = [name for name in wanted if name.partition("-")[0] in ENGINES and name not in left_out]
        for source, names in (
            ("detector.kedge", [name for name in exports if name not in early]),
            ("early-exit.kedge", [name for name in exports if name in early]),
        ):
            if names:
                note("export to ONNX")
                with _leaving_out(left_out, names):
                    export_onnx(load(folder / source), folder / _exact_file(names[0] in early))
        for name in exports:
            if name not in left_out:
                note(TITLES[name])
                with _leaving_out(left_out, (name,)):
                    runtime, kind = name.split("-")[:2]
                    package(runtime)
                    if kind == "int8":
                        exact, target = folder / _exact_file(name in early), folder / f"{name}.onnx"
                        quantise(exact, target, training_images, held_out, engine=runtime)
    kept = {name: reason for name, reason in left_out.items() if name in wanted}
    return Prepared(folder, shape, int(detector.cost.forward), tuple(name for name in wanted if name not in kept), kept)


@contextmanager
def _leaving_out(left_out: dict[str, str], engines: Sequence[str]) -> Iterator[None]:
    """Record an error as the reason why some engines are left out."""
    try:
        yield
    except KedgeError as error:
        left_out.update(dict.fromkeys(engines, str(error)))


def _exact_file(early: bool) -> str:
    return "early-exit.onnx" if early else "fp32.onnx"


def _forward(detector: Detector) -> BenchEngine:
    """The forward pass of the network without anchors."""
    net = without_anchors(detector.net) if isinstance(detector.net, Anchored) else detector.net
    fast = channels_last(net).eval()

    @torch.inference_mode()
    def run(images: Tensor) -> Any:
        return fast(images)

    return run


def _at_once(detector: Detector | OnnxDetector) -> BenchEngine:
    return lambda images: detector(images, batch_size=len(images))
