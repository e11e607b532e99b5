"""Evaluation: several detectors on one in-distribution test set against several out-of-distribution sets."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.data import ImageSet, Preprocess, gather
from kedge.data.labels import renumbered
from kedge.detectors import Detection, Detector, RescoringDetector
from kedge.errors import InputError, NotReadyError
from kedge.evaluation.leaks import refuse_leaks
from kedge.evaluation.result import Evaluation, Result, Shifted, inside_scores
from kedge.metrics import accuracy, aurc, detection_metrics, ece

PERMUTED = ", tau permuted"  # behind the name of the detector that a control belongs to


def evaluate(
    detectors: Mapping[str, Detector],
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
    """Run calibrated detectors over a test set and OOD sets, and measure how well each tells them apart.

    Args:
        detectors: Calibrated, by the name to show.
        id_test: In-distribution images that were neither trained nor calibrated on; anchors and calibration images
            found among them, or in an OOD set, are an error.
        ood_sets: Sets of out-of-distribution images. Each is an `ImageSet`, or a data set or loader whose ``name``, or
            else whose type, names it in the tables.
        shifted: Labelled images of known classes in other conditions: how accurate is the classifier there, and does
            the detector accept what it gets right?
        known_in: By the name of an OOD set, images from the same source that show known classes. They count as in
            distribution beside ``id_test`` when this set is measured.
        apart: Names of OOD sets that stand by themselves and are left out of the means: a set that is of another kind
            than the others, or that a choice was made with.
        controls: Add a row for every AMP detector, and every student of one, with its temperatures permuted across all
            images: what is left of a gain then does not come from the temperature of the single image.
        resamples: Of the bootstrap for intervals; 0 for none.
        seed: Of the bootstrap, and of the permutation.
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
    streams, first = (id_test, *ood_sets), next(iter(detectors.values())).preprocess
    id_test, *ood_sets = (_in_memory(s, first) for s in streams)
    twice = [name for name in detectors if controls and name + PERMUTED in detectors]
    if twice:
        raise InputError(f"with controls no detector may be called {twice[0] + PERMUTED!r}; rename it")
    known = _checked_known(known_in or {}, ood_sets)
    every = (id_test, *ood_sets, *_labelled(shifted), *known.values())
    sets = {s.name: s for s in every}
    if len(sets) != len(every):
        raise InputError(f"the sets must have different names, got {[s.name for s in every]}")
    # By how a detector takes images: what is no ImageSet is read at the size of each.
    seen = {first: sets}
    for detector in detectors.values():
        if detector.preprocess not in seen:
            others = (_in_memory(s, detector.preprocess) for s in streams)
            seen[detector.preprocess] = sets | {s.name: s for s in others}
    for shape, versions in seen.items():
        refuse_leaks({name: d for name, d in detectors.items() if d.preprocess == shape}, versions)
    _check_apart(apart, [s.name for s in ood_sets])
    table = Evaluation(
        {},
        sets,
        id_test.name,
        resamples,
        tuple(s.name for s in shifted),
        {ood: s.name for ood, s in known.items()},
        tuple(apart),
    )
    total, done = len(detectors) * sum(map(len, sets.values())), 0
    for name, detector in detectors.items():
        detections, started = {}, time.perf_counter()
        own = seen[detector.preprocess]
        for set_name, images in own.items():
            before = done
            report = None if progress is None else (lambda n, before=before: progress(before + n, total))
            detections[set_name] = detector(images, progress=report)
            done += len(images)
        seconds = time.perf_counter() - started
        table.results[name] = _result(detector, detections, table, own, seconds, seed)
        if controls and isinstance(detector, RescoringDetector) and detector.rescores:
            permuted = _permuted(detector, detections, seed)
            table.results[name + PERMUTED] = _result(detector, permuted, table, own, seconds, seed)
    return table


def _check_apart(apart: Sequence[str], names: Sequence[str]) -> None:
    unknown = [name for name in apart if name not in names]
    if unknown:
        raise InputError(f"apart must name OOD sets, some of {', '.join(names)}; got {', '.join(unknown)}")
    if set(apart) >= set(names):
        raise InputError("apart must leave at least one OOD set to take means over")


def _checked_known(known_in: Mapping[str, ImageSet], ood_sets: Sequence[ImageSet]) -> dict[str, ImageSet]:
    names = [s.name for s in ood_sets]
    wrong = [name for name, images in known_in.items() if not isinstance(images, ImageSet)]
    if wrong:
        raise InputError(f"known_in must hold ImageSets by the name of an OOD set; that of {wrong[0]!r} is none")
    unknown = [name for name in known_in if name not in names]
    if unknown:
        raise InputError(f"known_in must name OOD sets, some of {', '.join(names)}; got {', '.join(unknown)}")
    return dict(known_in)


def _labelled(shifted: Sequence[ImageSet]) -> Sequence[ImageSet]:
    for images in shifted:
        if not isinstance(images, ImageSet) or images.labels is None:
            raise InputError(
                "shifted must be a list of ImageSets with labels, such as kedge.data.corrupt gives; got "
                + (f"{images.name!r} without" if isinstance(images, ImageSet) else type(images).__name__)
            )
    return shifted


def _permuted(detector: RescoringDetector, detections: Mapping[str, Detection], seed: int) -> dict[str, Detection]:
    """The detections that follow when the images of all sets have exchanged their temperatures."""
    said = list(detections.values())
    temperatures = torch.cat([d.tau for d in said if d.tau is not None])
    order = torch.randperm(len(temperatures), generator=torch.Generator().manual_seed(seed))
    parts = temperatures[order].split([len(d) for d in said])
    return {name: detector.with_tau(d, part) for (name, d), part in zip(detections.items(), parts, strict=True)}


def _in_memory(images: Any, preprocess: Preprocess | None) -> ImageSet:
    """A set as an `ImageSet`; data sets and loaders are read at the size that a detector takes."""
    if isinstance(images, ImageSet):
        return images
    if preprocess is None:
        raise NotReadyError("the detectors are not fitted: call fit(train_set) and calibrate(held_out) first")
    return gather(images, preprocess)


def _result(
    detector: Detector,
    detections: dict[str, Detection],
    table: Evaluation,
    sets: Mapping[str, ImageSet],
    seconds: float,
    seed: int,
) -> Result:
    inside = detections[table.id_name]
    labels, known = _known_labels(detector, sets[table.id_name])
    return Result(
        metrics={
            ood: detection_metrics(
                inside_scores(detections, table.id_name, table.known_in.get(ood)),
                detections[ood].score,
                resamples=table.resamples,
                seed=seed,
            )
            for ood in table.ood_names
        },
        accuracy=None if labels is None else accuracy(inside.label[known], labels),
        ece=None if labels is None else ece(inside.probability[known], labels),
        aurc=None if labels is None else aurc(inside.score[known], inside.label[known] == labels),
        flagged={name: float(d.is_ood.double().mean()) for name, d in detections.items()},
        milliseconds=1000 * seconds / sum(map(len, detections.values())),
        cost=detector.cost,
        uses_outliers=detector.needs_outliers or detector.outliers is not None,
        detections=detections,
        shifted={name: _shifted(detector, detections[name], sets[name]) for name in table.shifted_names},
        apart=table.apart,
    )


def _known_labels(detector: Detector, images: ImageSet) -> tuple[Tensor | None, Tensor]:
    """The labels of images of classes that the detector knows, by name where both have names, and where they are."""
    if images.labels is None:
        return None, torch.zeros(len(images), dtype=torch.bool)
    labels = renumbered(images.labels, images.classes, detector.classes)
    known = labels >= 0
    return labels[known] if bool(known.any()) else None, known


def _shifted(detector: Detector, said: Detection, images: ImageSet) -> Shifted:
    labels, known = _known_labels(detector, images)
    if labels is None:
        raise InputError(f"shifted must show classes that the detectors know; {images.name!r} has none of them")
    right = said.label[known] == labels
    accepted = right[~said.is_ood[known]]
    return Shifted(
        accuracy=float(right.double().mean()),
        accepted_accuracy=float(accepted.double().mean()) if len(accepted) else None,
        aurc=aurc(said.score[known], right),
    )
