"""`load`: read a saved detector."""

import os
from typing import Any

from torch import Tensor, nn

from kedge.data import Preprocess
from kedge.detectors.base import Calibration, Detector
from kedge.detectors.registry import registered
from kedge.errors import FileFormatError, InputError
from kedge.io import artifact
from kedge.io.migrate import migrate, migrate_tensors
from kedge.io.rebuild import rebuild
from kedge.scores import Score


def load(path: str | os.PathLike[str], *, model: nn.Module | None = None, score: Score | None = None) -> Detector:
    """Read a detector that `Detector.save` wrote. Loading never runs code from the file.

    Args:
        path: The file, or the name of a detector that comes with kedge: ``"cifar10"``.
        model: For networks that are not kedge's own: the network, freshly built, as it was before anchoring.
        score: For detectors that were saved with a custom score function: that function.

    Example:
        >>> import tempfile, torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> path = tempfile.mkdtemp() + "/flat.kedge"
        >>> from kedge import MSP
        >>> MSP(net).fit(torch.rand(8, 3, 2, 2)).calibrate(torch.rand(20, 3, 2, 2)).save(path)
        >>> load(path, model=nn.Sequential(nn.Flatten(), nn.Linear(12, 2))).calibration.alpha
        0.05
    """
    header, tensors = artifact.read(path)
    try:
        return _detector(migrate(header), migrate_tensors(header, tensors), model, score)
    except (KeyError, TypeError, AttributeError) as error:  # the checksum is right, the content is not
        raise FileFormatError(f"{path} is a kedge file, but no detector that this kedge can read: {error}") from error


def _detector(
    header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | None, score: Score | None
) -> Detector:
    name, config, calibrated = header["detector"]["name"], header["detector"]["config"], header["calibration"]
    method = registered().get(name)
    if method is None:
        raise FileFormatError(
            f"the file holds a {name!r} detector, which this kedge does not have: install a newer one"
        )
    custom = config.get("score", "") is None
    if custom and score is None:
        raise InputError("this detector was saved with a score function of its own; pass it again as score=")
    if score is not None and not custom:
        raise InputError("score must not be given: the file says which score this detector uses")
    net = rebuild(header["network"], artifact.part(tensors, "net."), model)
    detector = method(net, **config | ({"score": score} if custom else {}))
    detector.preprocess = Preprocess.from_record(header["preprocess"])
    detector.classes = tuple(header["classes"])
    detector.load_state(artifact.part(tensors, "detector."))
    if calibrated is not None:
        values: dict[str, Any] = {name: value for name, value in calibrated.items() if name != "images"}
        detector.calibration = Calibration(**values, **artifact.part(tensors, "calibration."))
    return detector
