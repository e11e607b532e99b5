"""How a detector shows itself: one line, a table of facts, a summary."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    "maps": "the logits and maps inside the network",
    "passes": "several outputs of the network for an image",
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
