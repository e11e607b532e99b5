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
from kedge.io.facts import readable_options

if TYPE_CHECKING:
    from kedge.detectors.base import Detector

READS = {  # in words, by `Detector.reads`
    "logits": "the logits",
    "per_anchor_logits": "the logits under each anchor",
    "output": "the network's output",
    "features": "the logits and features inside the network",
    "gradients": "the logits and gradients",
    "images": "the pixels",
    "network": "the network",
}
LIMITS = (
    "how many unknown images it finds: it has seen none. Measure it by `kedge evaluate --ood` with some you expect",
    "the share flagged where images come to differ from the held-out ones, as with another camera or season: calibrate "
    "again on images from there, and watch the stream with `kedge watch`",
    "that an image it accepts is classified correctly",
)
VERBS = {"summary", "fit", "calibrate", "score", "save", "plot", "config", "cost", "name", "reads"}


def detector_facts(detector: "Detector") -> Mapping[str, str]:
    """What a user wants to know of a detector, by name."""
    options = ", ".join(f"{name}={value!r}" for name, value in readable_options(detector.config()).items())
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


def summary(detector: "Detector") -> str:
    """What a detector is, what was measured on held-out images, and what it cannot promise, in a few lines."""
    facts, calibrated = detector_facts(detector), detector.calibration
    if detector.preprocess is None or calibrated is None:
        raise NotReadyError("there is nothing to sum up yet: call fit and calibrate first")
    measured = detector.net.record.get("held_out", {})
    n, all_held_out = len(calibrated.scores), len(calibrated.fingerprints)
    learned = f", {all_held_out - n:,} of them to learn from" if all_held_out > n else ""
    lines = {
        "detector": f"{facts['method']} of {facts['classes']}, input {facts['input']}",
        "reads": f"{READS[detector.reads]}; forward passes for an image: {detector.cost.forward}",
        "held out": f"{counted(all_held_out, 'image')}{learned}; the threshold is set on {n:,}",
    }
    if measured:
        judged = f"of {counted(measured['judged'], 'held-out image')} that the threshold was not set on"
        lines["flagged"] = f"{measured['flagged']:.1%} {judged}; at most {calibrated.alpha:.1%} are expected"
        right = measured["accuracy"]
        lines["accuracy"] = "unknown: the labels are not the network's" if right is None else f"{right:.1%} {judged}"
    width = max(map(len, lines))
    limits = ("It cannot promise", *(f"- {limit};" for limit in LIMITS[:-1]), f"- {LIMITS[-1]}.")
    return "\n".join([*(f"{name:{width}}  {words}" for name, words in lines.items()), *limits])


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
    figure = pyplot.Figure(figsize=(2.6 * columns, (3.5 if names else 3.3) * rows), layout="constrained")
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
