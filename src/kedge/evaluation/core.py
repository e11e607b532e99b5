"""Evaluation: several detectors on one in-distribution test set against several out-of-distribution sets."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kedge.data import ImageSet, Preprocess, gather
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import Cost, Detection, Detector
from kedge.errors import InputError, NotReadyError
from kedge.metrics import Estimate, accuracy, aurc, detection_metrics, ece
from kedge.models.classifier import Classifier

METRICS = ("auroc", "fpr95", "aupr_in", "aupr_out", "dtacc", "fpr95_ood")


@dataclass(frozen=True)
class Result:
    """One detector's results.

    Attributes:
        metrics: By OOD set, then by metric.
        accuracy: On the in-distribution test set, or None without labels.
        ece: Expected calibration error there, of the calibrated probabilities.
        aurc: Area under the risk-coverage curve there: whether the score also tells when the classifier errs.
        flagged: Share of each set that the threshold flags, the in-distribution set among them.
        milliseconds: Wall time per image.
        cost: Passes through the network per image.
        uses_outliers: Whether network or method learned from outliers; the tables mark it with a star.
        detections: What the detector said of each set.
    """

    metrics: dict[str, dict[str, Estimate]]
    accuracy: float | None
    ece: float | None
    aurc: float | None
    flagged: dict[str, float]
    milliseconds: float
    cost: Cost
    uses_outliers: bool
    detections: dict[str, Detection] = field(repr=False)

    def mean(self, metric: str) -> float:
        """The mean of a metric over the OOD sets."""
        return sum(by_metric[metric].value for by_metric in self.metrics.values()) / len(self.metrics)


@dataclass(frozen=True)
class Evaluation:
    """Results by detector, and the sets they were measured on, the in-distribution set first."""

    results: dict[str, Result]
    sets: dict[str, ImageSet]
    id_name: str
    resamples: int

    @property
    def ood_names(self) -> tuple[str, ...]:
        """The names of the OOD sets, in the order given."""
        return tuple(name for name in self.sets if name != self.id_name)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the images and single scores, as plain data for JSON."""
        return {
            "id": self.id_name,
            "sets": {name: {"images": len(s), "sha256": s.checksum} for name, s in self.sets.items()},
            "resamples": self.resamples,
            "results": {
                name: {
                    "accuracy": result.accuracy,
                    "ece": result.ece,
                    "aurc": result.aurc,
                    "milliseconds_per_image": result.milliseconds,
                    "passes_per_image": vars(result.cost),
                    "uses_outliers": result.uses_outliers,
                    "flagged": result.flagged,
                    "mean": {metric: result.mean(metric) for metric in METRICS},
                    "metrics": {
                        ood: {metric: vars(estimate) for metric, estimate in by_metric.items()}
                        for ood, by_metric in result.metrics.items()
                    },
                }
                for name, result in self.results.items()
            },
        }


def evaluate(
    detectors: Mapping[str, Detector],
    id_test: Any,
    ood_sets: Sequence[Any],
    *,
    resamples: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run calibrated detectors over a test set and OOD sets, and measure how well each tells them apart.

    Args:
        detectors: Calibrated, by the name to show.
        id_test: In-distribution images that were neither trained nor calibrated on; anchors and calibration images
            found among them, or in an OOD set, are an error.
        ood_sets: Sets of out-of-distribution images. Each is an `ImageSet`, or a data set or loader whose ``name``, or
            else whose type, names it in the tables.
        resamples: Of the bootstrap for intervals; 0 for none.
        seed: Of the bootstrap.
        progress: Called with the number of images done and the number in all.

    Example:
        >>> import torch
        >>> from kedge import MSP
        >>> noise = lambda name: ImageSet(torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8), name=name)
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> msp = MSP(net).fit(noise("train")).calibrate(noise("held out"))
        >>> evaluation = evaluate({"MSP": msp}, noise("test"), [noise("other")])
        >>> 0 <= evaluation.results["MSP"].mean("auroc") <= 1
        True
    """
    if not isinstance(ood_sets, Sequence):
        raise InputError(f"ood_sets must be a list of sets, got {type(ood_sets).__name__}; for one set pass [set]")
    if not detectors or not ood_sets:
        raise InputError("detectors and ood_sets must each hold at least one; give evaluate something to compare")
    shape = next(iter(detectors.values())).preprocess
    id_test, *ood_sets = (_in_memory(s, shape) for s in (id_test, *ood_sets))
    sets = {s.name: s for s in (id_test, *ood_sets)}
    if len(sets) != 1 + len(ood_sets):
        raise InputError(f"the sets must have different names, got {[id_test.name, *(s.name for s in ood_sets)]}")
    _refuse_leaks(detectors, sets)
    total, done = len(detectors) * sum(map(len, sets.values())), 0
    results = {}
    for name, detector in detectors.items():
        detections, started = {}, time.perf_counter()
        for set_name, images in sets.items():
            before = done
            report = None if progress is None else (lambda n, before=before: progress(before + n, total))
            detections[set_name] = detector(images, progress=report)
            done += len(images)
        seconds = time.perf_counter() - started
        results[name] = _result(detector, detections, id_test, seconds, resamples, seed)
    return Evaluation(results, sets, id_test.name, resamples)


def _in_memory(images: Any, preprocess: Preprocess | None) -> ImageSet:
    """A set as an `ImageSet`; data sets and loaders are read once, at the size that the first detector takes."""
    if isinstance(images, ImageSet):
        return images
    if preprocess is None:
        raise NotReadyError("the detectors are not fitted: call fit(train_set) and calibrate(held_out) first")
    return gather(images, preprocess)


def _refuse_leaks(detectors: Mapping[str, Detector], sets: Mapping[str, ImageSet]) -> None:
    """Raise if a set holds images that a detector was made with: its score there would say nothing about new images."""
    seen: dict[tuple[Preprocess | None, str], Tensor] = {}  # fingerprints of what a detector sees of a set
    for name, detector in detectors.items():
        if detector.preprocess is None:
            raise NotReadyError(f"{name!r} is not fitted: call fit(train_set) and calibrate(held_out) first")
        ours = {}
        if detector.calibration is not None:
            ours["calibration image"] = detector.calibration.fingerprints
        anchors = [net.anchors for net in detector.anchored if net.anchors is not None]
        if anchors:
            ours["anchor"] = torch.cat([fingerprints(images) for images in anchors])
        if detector.outliers is not None:
            ours["training outlier"] = detector.outliers
        nets = (module for module in detector.net.modules() if isinstance(module, Classifier))
        trained_on = {net.record.get("data", {}).get("sha256") for net in nets} - {None}
        for set_name, images in sets.items():
            if images.checksum in trained_on:
                raise InputError(
                    f"the set {set_name!r} is what the network of {name!r} was trained and its statistics taken on; "
                    "evaluate on other images"
                )
            for what, prints in ours.items():
                key = (detector.preprocess, set_name)
                if key not in seen:
                    seen[key] = fingerprints(detector.preprocess.batch(images.images))
                found = shared(prints, seen[key])
                if len(found):
                    raise InputError(
                        f"{len(found)} of the images in {set_name!r} are among the {what}s of {name!r} (the first is "
                        f"number {int(found[0])}); leave them out of one or the other: set.subset(...)"
                    )


def _result(
    detector: Detector,
    detections: dict[str, Detection],
    id_test: ImageSet,
    seconds: float,
    resamples: int,
    seed: int,
) -> Result:
    inside = detections[id_test.name]
    labels: Tensor | None = id_test.labels
    return Result(
        metrics={
            name: detection_metrics(inside.score, outside.score, resamples=resamples, seed=seed)
            for name, outside in detections.items()
            if name != id_test.name
        },
        accuracy=None if labels is None else accuracy(inside.label, labels),
        ece=None if labels is None else ece(inside.probability, labels),
        aurc=None if labels is None else aurc(inside.score, inside.label == labels),
        flagged={name: float(d.is_ood.double().mean()) for name, d in detections.items()},
        milliseconds=1000 * seconds / sum(map(len, detections.values())),
        cost=detector.cost,
        uses_outliers=detector.needs_outliers or detector.outliers is not None,
        detections=detections,
    )
