"""How a detector shows itself: one line, a table of facts, its verdicts on pictures."""

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kedge.checks import needs
from kedge.data.batches import batches, names_of
from kedge.display import counted
from kedge.errors import NotReadyError

if TYPE_CHECKING:
    from kedge.detectors.base import Detector

VERBS = {"fit", "calibrate", "score", "save", "plot", "config", "cost", "name", "reads"}


def detector_facts(detector: "Detector") -> Mapping[str, str]:
    """What a user wants to know of a detector, by name."""
    options = ", ".join(f"{name}={value!r}" for name, value in detector.config().items() if value is not None)
    calibrated = detector.calibration
    return {
        "method": f"{type(detector).__name__}({options})",
        "network": repr(detector.net),
        "classes": counted(len(detector.classes), "class", "classes") if detector.classes else "without names",
        "input": "not fitted" if detector.preprocess is None else " x ".join(map(str, detector.preprocess.shape)),
        "threshold": "not calibrated"
        if calibrated is None
        else f"alpha {calibrated.alpha:g}, on {counted(len(calibrated.scores), 'image')}",
    }


def describe_detector(detector: "Detector") -> str:
    """One line."""
    facts = detector_facts(detector)
    rest = "; ".join(facts[name] for name in ("network", "input", "threshold"))
    return f"<{facts['method']}: {rest}>"


def plot_verdicts(detector: "Detector", images: Any, most: int) -> Any:
    """See `Detector.plot`."""
    pyplot = needs("matplotlib.figure", "report", "plot")
    if detector.preprocess is None or detector.calibration is None or not detector.preprocess.is_image:
        raise NotReadyError("plot needs a fitted and calibrated detector of images: call fit and calibrate first")
    read = itertools.islice(batches(images, detector.preprocess, size=most), 1)
    x = torch.cat([part for part, _ in read])[:most]
    names = names_of(images)
    columns = min(len(x), 4)
    rows = math.ceil(len(x) / columns)
    figure = pyplot.Figure(figsize=(2.6 * columns, 3.3 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.axis("off")
    pictures = detector.as_input(x).float().cpu().clamp(0, 1).permute(0, 2, 3, 1).numpy()  # (N, H, W, D)
    for place, row in enumerate(detector(x).to_rows()):
        axes, picture = panels[place], pictures[place]
        axes.imshow(picture if picture.shape[2] == 3 else picture[..., 0], cmap="gray", vmin=0, vmax=1)
        label = row["class"] or f"class {row['label']}"
        words = [
            *names[place : place + 1],
            f"{label} {row['probability'] or 0:.0%}",
            f"{'out of' if row['is_ood'] else 'in'} distribution, p {row['p_value']:.2g}",
            *([row["reason"]] if row["reason"] else []),
        ]
        axes.set_title("\n".join(words), fontsize=8, color="#b3261e" if row["is_ood"] else "black")
    return figure
