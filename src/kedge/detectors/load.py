"""`load`: read a saved detector."""

import contextlib
import math
import os
from typing import Any

import torch
from torch import Tensor, nn

from kedge.calibration import allowed
from kedge.checks import between, one_of
from kedge.detectors.base import Calibration, Detector
from kedge.detectors.reading import outputs_of
from kedge.detectors.registry import registered
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.io import artifact
from kedge.io.migrate import migrate, migrate_tensors
from kedge.io.rebuild import rebuild, saved_preprocess
from kedge.io.schema import CalibrationPart, Header, arguments, check, readable
from kedge.io.tuned import Tuned
from kedge.scores import Score

MOST_PASSES = 4096  # per image; a file that needs more is damaged, and would seem to hang


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | str | None = None,
    score: Score | None = None,
    expected_sha256: str | None = None,
) -> Detector:
    """Read a detector that `Detector.save` wrote. Loading never runs code from the file.

    Every field is checked, the threshold is computed again from the stored calibration scores, and one image of noise
    is scored. The hash inside the file guards against damage, not against an attacker: for that, pass a hash that you
    trust as ``expected_sha256``.

    Args:
        path: The file, or the name of a detector that comes with kedge: ``"cifar10"``.
        model: The network to load the weights into, instead of the graph in the file: freshly built, as it was before
            anchoring; or its name: ``"package.module:factory"``, a function that returns it, or the name by which
            `kedge.network` built it.
        score: For detectors that were saved with a custom score function: that function.
        expected_sha256: SHA-256 of the whole file, as ``sha256sum`` prints it; another file is refused.

    Example:
        >>> import tempfile, torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> path = tempfile.mkdtemp() + "/flat.kedge"
        >>> from kedge import MSP
        >>> MSP(net).fit(torch.rand(8, 3, 2, 2)).calibrate(torch.rand(20, 3, 2, 2)).save(path)
        >>> load(path, model=nn.Sequential(nn.Flatten(), nn.Linear(12, 2))).calibration.alpha
        0.05
    """
    saved, stored = artifact.read(path, expected_sha256=expected_sha256)
    with readable(path, "a detector"):
        header: Any = migrate(saved)
        check(header, Header, "header")
        tensors = migrate_tensors(saved, stored)
        name, config = header["detector"]["name"], header["detector"]["config"]
        method = registered()[one_of("method", name, tuple(registered()))]
    custom = config.get("score", "") is None
    if custom and score is None:
        raise InputError("this detector was saved with a score function of its own; pass it again as score=")
    if score is not None and not custom:
        raise InputError("score must not be given: the file names the score of this detector")
    with readable(path, "a detector", keep=(InputError,)):
        net = rebuild(header["network"], artifact.part(tensors, "net."), model, artifact.part(tensors, "graph."))
    with readable(path, "a detector"):
        plain = {name: value for name, value in config.items() if not (custom and name == "score")}
        detector = method(net, **arguments(method, plain, "config"), **({"score": score} if custom else {}))
        detector.preprocess = saved_preprocess(header["preprocess"])
        detector.classes = tuple(header["classes"])
        prints = tensors.get("fit.prints", detector.fitted_on)  # older files have none
        if prints.ndim != 1 or prints.dtype != torch.int64:
            raise FileFormatError(f"fit.prints must be whole numbers (N,); got {prints.dtype} {tuple(prints.shape)}")
        detector.fitted_on = prints
        detector.load_state(artifact.part(tensors, "detector."))
        detector.tuned = Tuned.read(header.get("tuned"), artifact.part(tensors, "tuned."))
        if header["calibration"] is not None:
            detector.calibration = _calibration(header["calibration"], **artifact.part(tensors, "calibration."))
        _try_out(detector)
    return detector


def load_calibration(path: str | os.PathLike[str]) -> Calibration | None:
    """The threshold of a saved detector and the scores it was set on; None before `Detector.calibrate`."""
    saved, stored = artifact.read(path)
    with readable(path, "a detector"):
        header: Any = migrate(saved)
        check(header, Header, "header")
        if header["calibration"] is None:
            return None
        return _calibration(header["calibration"], **artifact.part(migrate_tensors(saved, stored), "calibration."))


def _calibration(saved: CalibrationPart, scores: Tensor, fingerprints: Tensor) -> Calibration:
    alpha, delta, images = saved["alpha"], saved["delta"], saved["images"]
    if scores.shape != (images,) or scores.dtype != torch.float64 or bool(scores.isnan().any()):
        raise FileFormatError(f"calibration.scores must be {images} numbers in double precision")
    if fingerprints.ndim != 2 or fingerprints.shape[1] != 16 or fingerprints.dtype != torch.uint8:
        raise FileFormatError(f"calibration.fingerprints must be (N, 16) bytes, got {tuple(fingerprints.shape)}")
    k = allowed(images, alpha, delta)
    threshold = float(scores.sort().values[-k]) if k else math.inf
    if saved["threshold"] != threshold or isinstance(saved["threshold"], bool):
        raise FileFormatError(
            f"calibration.threshold must be {threshold}, by alpha, delta and the scores; got {saved['threshold']!r}"
        )
    temperature = between("temperature", saved["temperature"], 1e-4, 1e4)
    return Calibration(scores, fingerprints, alpha, delta, threshold, temperature)


def _try_out(detector: Detector) -> None:
    """Score an image, which fails where the shapes of the file's parts do not fit each other."""
    assert detector.preprocess is not None
    if detector.cost.forward > MOST_PASSES:
        raise FileFormatError(f"the method must need at most {MOST_PASSES} passes; got {detector.cost.forward}")
    shape = detector.preprocess.shape
    image = torch.linspace(0, 1, math.prod(shape)).view(1, *shape)
    with contextlib.suppress(NotReadyError):  # saved before it was calibrated
        outputs, _, _ = outputs_of(detector, image, 1)
        if outputs.score.shape != (1,) or len(detector.classes) > outputs.logits.shape[1]:
            raise FileFormatError(
                f"classes must be at most the {outputs.logits.shape[1]} of the network; got {len(detector.classes)}"
            )
