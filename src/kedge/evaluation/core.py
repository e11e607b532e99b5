"""Evaluation: several detectors on one in-distribution test set against several out-of-distribution sets."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kedge.data import Features, ImageSet, Preprocess, gather
from kedge.data.labels import renumbered
from kedge.detectors import Detection, Detector, RescoringDetector
from kedge.errors import InputError, NotReadyError
from kedge.evaluation.leaks import refuse_leaks
from kedge.evaluation.result import Evaluation, EvaluationResult, ShiftedResult, inside_right, inside_scores
from kedge.metrics import CLASSIFIER_METRICS, Estimate, Predictions, aurc, detection_metrics
from kedge.progress import progress_bar

PERMUTED = ", tau permuted"  # follows the name of the detector that a control belongs to


def evaluate(
    detectors: Mapping[str, Detector] | Detector,
    id_test: Any,
    ood_sets: Sequence[Any],
    *,
    shifted: Sequence[ImageSet] = (),
    known_in: Mapping[str, ImageSet] | None = None,
    apart: Sequence[str] = (),
    controls: bool = False,
    resamples: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run calibrated detectors on a test set and OOD sets, and measure how well each separates them.

    Args:
        detectors: Calibrated, by the name to show; or one detector.
        id_test: In-distribution images that were neither trained nor calibrated on; anchors and calibration images
            among them, or in an OOD set, are an error.
        ood_sets: Sets of out-of-distribution images. Each is an `ImageSet`, or a data set or loader, shown under its
            ``name`` or else its type; or `Features`, for detectors that take them.
        shifted: Labelled images of known classes in other conditions: how accurate is the classifier there, and does
            the detector accept the correct predictions?
        known_in: By the name of an OOD set, images from the same source that show known classes. They count as in
            distribution, like ``id_test``, when this set is measured.
        apart: Names of OOD sets to leave out of the means: a set of another kind than the others, or one that was
            used to make a choice.
        controls: Add a row for every AMP detector, and every student of one, with tau permuted across all images. A
            gain that remains does not come from the tau of the single image.
        resamples: Number of bootstrap resamples for intervals; 0 for no intervals.
        seed: Random seed of the bootstrap and of the permutation.
        progress: Called with the number of images done and the total, instead of a bar in a terminal.

    Example:
        >>> import torch
        >>> from kedge import MSP
        >>> noise = lambda name: ImageSet(torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8), name=name)
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> msp = MSP(net).fit(noise("train")).calibrate(noise("held out"))
        >>> evaluation = evaluate(msp, noise("test"), [noise("other")])
        >>> 0 <= evaluation.results["msp"].mean("auroc") <= 1
        True
    """
    if not isinstance(ood_sets, Sequence):
        raise InputError(f"ood_sets must be a list of sets, got {type(ood_sets).__name__}; for one set pass [set]")
    if isinstance(detectors, Detector):
        detectors = {detectors.name: detectors}
    if not detectors or not ood_sets:
        raise InputError("detectors and ood_sets must each hold at least one; give evaluate something to compare")
    streams, first = (id_test, *ood_sets), next(iter(detectors.values())).preprocess
    id_test, *ood_sets = (_in_memory(s, first) for s in streams)
    id_test = _renumbered(id_test, detectors)
    oods = [s.name for s in ood_sets]
    known = dict(known_in or {})
    _check_names("known_in", known, oods)
    _check_names("apart", apart, oods)
    if set(apart) >= set(oods):
        raise InputError("apart must leave at least one OOD set to take means over")
    if taken := [name for name in detectors if controls and name + PERMUTED in detectors]:
        raise InputError(f"with controls no detector may be called {taken[0] + PERMUTED!r}; rename it")
    every = (id_test, *ood_sets, *_image_sets("shifted", shifted, True), *_image_sets("known_in", known.values()))
    sets = {s.name: s for s in every}
    if len(sets) != len(every):
        raise InputError(f"the sets must have different names, got {[s.name for s in every]}")
    # What is not an ImageSet is read at the size that each detector takes.
    versions = {first: sets}
    for detector in detectors.values():
        if detector.preprocess not in versions:
            test, *others = (_in_memory(s, detector.preprocess) for s in streams)
            versions[detector.preprocess] = sets | {s.name: s for s in (_renumbered(test, detectors), *others)}
    for preprocess, version in versions.items():
        refuse_leaks({name: d for name, d in detectors.items() if d.preprocess == preprocess}, version)
    shifted_names, known_names = tuple(s.name for s in shifted), {ood: s.name for ood, s in known.items()}
    table = Evaluation({}, sets, id_test.name, resamples, shifted_names, known_names, tuple(apart))
    total, done = len(detectors) * sum(map(len, sets.values())), 0
    with progress_bar("evaluating", total) as update:
        report: Callable[[int, int], None] = progress or update
        for name, detector in detectors.items():
            detections, started = {}, time.perf_counter()
            version = versions[detector.preprocess]
            for set_name, images in version.items():
                detections[set_name] = detector(images, progress=lambda n: report(done + n, total))  # noqa: B023
                done += len(images)
            seconds = time.perf_counter() - started
            table.results[name] = result_of(name, detector, detections, table, version, seconds, seed)
            if controls and isinstance(detector, RescoringDetector) and detector.rescores:  # the type that has with_tau
                permuted = _permuted(detector, detections, seed)
                table.results[name + PERMUTED] = result_of(name, detector, permuted, table, version, seconds, seed)
    return table


def _check_names(argument: str, given: Sequence[str] | Mapping[str, Any], oods: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in oods]:
        raise InputError(f"{argument} must name OOD sets, some of {', '.join(oods)}; got {', '.join(unknown)}")


def _image_sets(argument: str, given: Iterable[Any], labelled: bool = False) -> list[ImageSet]:
    given = list(given)
    for images in given:
        known = isinstance(images, (ImageSet, Features))
        if not known or (labelled and images.labels is None):
            got = repr(images.name) if known else type(images).__name__
            raise InputError(f"{argument} must hold ImageSets{' with labels' * labelled}; got {got}")
    return given


def _renumbered(test: ImageSet, detectors: Mapping[str, Detector]) -> ImageSet:
    """The test set with its labels as the detectors number their classes; classes that one lacks are refused."""
    named = {name: detector.classes for name, detector in detectors.items() if detector.classes}
    if test.labels is None or not named:
        return test
    if len(set(named.values())) > 1:
        raise InputError(
            f"detectors must have the same classes in the same order; {', '.join(map(repr, named))} have not: "
            "evaluate them one by one"
        )
    name, classes = next(iter(named.items()))
    labels = renumbered(test.labels, test.classes, classes)
    _refuse_other_classes(name, classes, len(classes), test, labels)
    return replace(test, labels=labels, classes=classes)


def _refuse_other_classes(name: str, classes: Sequence[str], count: int, test: ImageSet, labels: Tensor) -> None:
    assert test.labels is not None
    others = test.labels[(test.labels >= 0) & ((labels < 0) | (labels >= count))].unique().tolist()
    shown = [test.classes[i] if i < len(test.classes) else str(i) for i in others[:3]]
    if test.classes and not classes and len(test.classes) != count:
        shown = [f"{len(test.classes)} classes"]
    if shown:
        have = f"{', '.join(classes[:5])}{', ...' * (count > 5)}" if classes else f"{count}, 0 to {count - 1}"
        raise InputError(
            f"id_test must show the classes of {name!r}, which are {have}; {test.name!r} has {', '.join(shown)}"
            f"{', ...' * (len(others) > 3)}: name and number classes as the detector does, or leave these images out"
        )


def _permuted(detector: RescoringDetector, detections: Mapping[str, Detection], seed: int) -> dict[str, Detection]:
    """The detections that follow if tau is permuted across the images of all sets."""
    taus = torch.cat([d.tau for d in detections.values() if d.tau is not None])
    order = torch.randperm(len(taus), generator=torch.Generator().manual_seed(seed))
    parts = taus[order].split([len(d) for d in detections.values()])
    return {name: detector.with_tau(d, part) for (name, d), part in zip(detections.items(), parts, strict=True)}


def _in_memory(images: Any, preprocess: Preprocess | None) -> Any:
    """A set as an `ImageSet`, or `Features`; data sets and loaders are read at the size that a detector takes."""
    if isinstance(images, (ImageSet, Features)):
        return images
    if preprocess is None:
        raise NotReadyError("the detectors are not fitted: call fit(train_set) and calibrate(held_out) first")
    return gather(images, preprocess)


def result_of(
    name: str,
    detector: Detector,
    detections: dict[str, Detection],
    table: Evaluation,
    sets: Mapping[str, Any],
    seconds: float,
    seed: int = 0,
    classifier: Mapping[str, float] = MappingProxyType({}),
) -> EvaluationResult:
    """The result of a detector whose detections on all sets took some seconds.

    Args:
        name: The detector's, for errors.
        detector: Calibrated.
        detections: By set.
        table: What the result is for: its sets, groups and resamples.
        sets: By name, as the detector took them.
        seconds: For all images.
        seed: Random seed of the bootstrap.
        classifier: Metrics of the classifier that are known already.
    """
    test = sets[table.id_name]
    if test.labels is not None:  # as many classes as the network has, where the detector has no names for them
        classes = detections[test.name].probability.shape[1]
        _refuse_other_classes(name, detector.classes, classes, test, test.labels)
    metrics = {}
    for ood in table.ood_names:
        known = table.known_in.get(ood)
        inside, right = inside_scores(detections, test.name, known), inside_right(detections, test, known)
        metrics[ood] = detection_metrics(inside, detections[ood].score, right, resamples=table.resamples, seed=seed)
    predictions = _predictions(detector, detections[test.name], test)[0]
    return EvaluationResult(
        metrics=metrics,
        classifier={}
        if predictions is None
        else {
            name: classifier[name] if name in classifier else metric(predictions)
            for name, metric in CLASSIFIER_METRICS.items()
        },
        flagged={name: float(d.is_ood.double().mean()) for name, d in detections.items()},
        milliseconds=1000 * seconds / sum(map(len, detections.values())),
        cost=detector.cost,
        uses_outliers=detector.needs_outliers or detector.outliers is not None,
        detections=detections,
        shifted={name: _shifted(detector, detections[name], sets[name]) for name in table.shifted_names},
        apart=table.apart,
        groups={
            group: {m: Estimate(fmean(metrics[ood][m].value for ood in oods)) for m in metrics[oods[0]]}
            for group, oods in table.groups.items()
        },
        tuned="" if detector.tuned is None else str(detector.tuned),
    )


def _predictions(detector: Detector, detection: Detection, images: ImageSet) -> tuple[Predictions | None, Tensor]:
    """The images of classes that the detector knows, by name if both have names; None without any. And which."""
    if images.labels is None:
        return None, torch.zeros(len(images), dtype=torch.bool)
    labels = renumbered(images.labels, images.classes, detector.classes)
    covered = (labels >= 0) & (labels < detection.probability.shape[1])
    if not bool(covered.any()):
        return None, covered
    values = detection.label, detection.probability, detection.score, labels
    return Predictions(*(value[covered] for value in values)), covered


def _shifted(detector: Detector, detection: Detection, images: ImageSet) -> ShiftedResult:
    predictions, covered = _predictions(detector, detection, images)
    if predictions is None:
        raise InputError(f"shifted must show classes that the detectors know; {images.name!r} has none of them")
    right = torch.as_tensor(predictions.label == predictions.truth)
    accepted = right[~detection.is_ood[covered]]
    return ShiftedResult(
        accuracy=float(right.double().mean()),
        accepted_accuracy=float(accepted.double().mean()) if len(accepted) else None,
        aurc=aurc(predictions.score, right),
    )
