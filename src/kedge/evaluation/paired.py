"""Which detector is best beyond noise: a bootstrap that redraws the same images for every detector.

Two detectors err on the same hard images, so their values rise and fall together from sample to sample. The interval
of their difference is therefore much narrower than their two intervals suggest, and it is what a comparison needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.checks import one_of
from kedge.evaluation.result import Drawn, Evaluation, EvaluationResult
from kedge.metrics import COUNTED, DETECTION_METRICS, METRICS, Estimate, Repeated

RESAMPLES = 500
LEVEL = 0.95
FEWEST = 20  # images of a set: with fewer, a resample is too much like the sample and noise looks smaller than it is


@dataclass(frozen=True)
class Best:
    """The detectors that are best beyond noise; None if there is no such detector.

    Attributes:
        overall: By metric: of the mean over the OOD sets, and of the accuracy.
        by_set: By OOD set and metric.
        enough: Whether every set has enough images for such a statement.
        resamples: Number of bootstrap resamples.
    """

    overall: dict[str, str | None]
    by_set: dict[tuple[str, str], str | None]
    enough: bool
    resamples: int = RESAMPLES


def redraw(
    scores: Sequence[Sequence[NDArray[Any]]],
    *,
    resamples: int,
    seed: int = 0,
    pairs: Sequence[tuple[tuple[int, ...], int]] = (),
    right: Sequence[Sequence[Any]] | None = None,
    metrics: Sequence[str] = tuple(DETECTION_METRICS),
) -> NDArray[np.float64]:
    """Metrics of ID against OOD images, for every detector on the same redrawn images.

    Args:
        scores: By detector, then by set, one score per image (N,).
        resamples: How often every set's images are redrawn with replacement.
        seed: The same seed draws the same images.
        pairs: For each OOD set the places of the sets that are in distribution against it, and its own; by default
            the first set is in distribution and all others are not.
        right: By detector, then by pair, whether the images in distribution were classified correctly, as in
            `kedge.metrics.detection_metrics`; only for metrics that need it.
        metrics: The names of those to compute.

    Returns:
        (resamples, detectors, OOD sets, metrics).
    """
    rng = np.random.default_rng(seed)
    pairs = pairs or [((0,), place) for place in range(1, len(scores[0]))]
    samples = [
        [
            Repeated(np.concatenate([sets[place] for place in inside]), sets[outside], right and right[detector][pair])
            for pair, (inside, outside) in enumerate(pairs)
        ]
        for detector, sets in enumerate(scores)
    ]
    functions = [COUNTED[name] for name in metrics]
    drawn = np.empty((resamples, len(scores), len(pairs), len(functions)))
    for values in drawn:
        sizes = [len(images) for images in scores[0]]
        times = [np.bincount(rng.integers(size, size=size), minlength=size) for size in sizes]  # how often each image
        for place, (inside, outside) in enumerate(pairs):
            repeats = np.concatenate([times[each] for each in inside]), times[outside]
            for detector, by_pair in enumerate(samples):
                counts = by_pair[place](*repeats)
                values[detector, place] = [metric(counts) for metric in functions]
    return drawn


def redrawn_results(
    evaluation: Evaluation, labels: Sequence[str], metrics: Sequence[str], resamples: int, seed: int
) -> NDArray[np.float64]:
    """`redraw` for detectors of an evaluation."""
    detections = [evaluation.results[label].detections for label in labels]
    scores = [[by_set[name].score.double().numpy() for name in evaluation.sets] for by_set in detections]
    joint = any(METRICS[name].joint for name in metrics)
    right = [[evaluation.right(label, ood) for ood in evaluation.ood_names] for label in labels] if joint else None
    return redraw(scores, resamples=resamples, seed=seed, pairs=evaluation.pairs(), right=right, metrics=metrics)


def winner(values: Sequence[float], drawn: NDArray[np.float64], sign: int) -> int | None:
    """Place of the best value, if the interval of its lead over any other excludes zero; drawn: (resamples, N)."""
    if len(values) < 2:
        return None
    best = int(np.argmax(sign * np.asarray(values)))
    leads = sign * (drawn[:, [best]] - np.delete(drawn, best, axis=1))  # (resamples, the others)
    lowest = np.quantile(leads, (1 - LEVEL) / 2, axis=0)
    return best if bool((lowest > 0).all()) else None


def best_beyond_noise(evaluation: Evaluation, *, resamples: int = RESAMPLES, seed: int = 0) -> Best:
    """Find the detectors that lead in the mean over the OOD sets, on single sets, and in accuracy.

    The images are the only noise considered: another training run may change the order of the detectors too.

    Args:
        evaluation: Of two or more detectors; with one, or with sets that are too small, none is best. Its own
            redrawn metrics are used if it has some, see `with_intervals`.
        resamples: Number of bootstrap resamples.
        seed: Random seed of the bootstrap.
    """
    names, results, oods = list(evaluation.results), list(evaluation.results.values()), evaluation.ood_names
    enough = min(len(evaluation.sets[name]) for name in (evaluation.id_name, *oods)) >= FEWEST
    if len(names) < 2 or not enough:
        return Best({}, {}, enough, resamples)

    def named(values: Sequence[float], drawn: NDArray[np.float64], metric: str) -> str | None:
        place = winner(values, drawn, METRICS[metric].sign)
        return None if place is None else names[place]

    if evaluation.drawn is None:
        metrics: Sequence[str] = results[0].measured
        drawn = redrawn_results(evaluation, names, metrics, resamples, seed)
    else:
        metrics, drawn = evaluation.drawn.metrics, evaluation.drawn.values
        resamples = len(drawn)
    overall: dict[str, str | None] = {}
    by_set: dict[tuple[str, str], str | None] = {}
    for m, metric in enumerate(metrics):
        means = drawn[:, :, evaluation.averaged, m].mean(axis=2)
        overall[metric] = named([r.mean(metric) for r in results], means, metric)
        for j, ood in enumerate(oods):
            values = [r.metrics[ood][metric].value for r in results]
            by_set[ood, metric] = named(values, drawn[:, :, j, m], metric)
    labels = evaluation.sets[evaluation.id_name].labels
    if labels is not None and bool((labels >= 0).any()):
        right = np.stack([(r.detections[evaluation.id_name].label == labels)[labels >= 0].numpy() for r in results])
        rng, n = np.random.default_rng(seed), right.shape[1]
        drawn_means = np.stack([right[:, rng.integers(n, size=n)].mean(axis=1) for _ in range(resamples)])
        overall["accuracy"] = named(list(right.mean(axis=1)), drawn_means, "accuracy")
    return Best(overall, by_set, enough, resamples)


def with_intervals(
    evaluation: Evaluation, metrics: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Evaluation:
    """The evaluation with intervals of some metrics, on each OOD set and of the means over its groups.

    All of them, and `best_beyond_noise` of the result, come from the same redrawn images.

    Args:
        evaluation: From `kedge.evaluate`.
        metrics: Of ID against OOD images; those that can have no interval are left as they are.
        resamples: Number of bootstrap resamples.
        seed: Random seed of the bootstrap.
    """
    names = [name for name in metrics if METRICS[name].interval]
    labels, oods = list(evaluation.results), evaluation.ood_names
    drawn = redrawn_results(evaluation, labels, names, resamples, seed)  # (R, detectors, OOD sets, metrics)
    sides = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    by_set = np.quantile(drawn, sides, axis=0)  # (2, detectors, OOD sets, metrics)
    places = {group: [oods.index(ood) for ood in members] for group, members in evaluation.groups.items()}
    by_group = {group: np.quantile(drawn[:, :, at].mean(axis=2), sides, axis=0) for group, at in places.items()}

    def again(place: int, result: EvaluationResult) -> EvaluationResult:
        def estimates(known: dict[str, Estimate], ends: NDArray[np.float64]) -> dict[str, Estimate]:
            pairs = zip(names, ends.T.tolist(), strict=True)
            return known | {name: Estimate(known[name].value, *pair) for name, pair in pairs}

        metrics = {ood: estimates(result.metrics[ood], by_set[:, place, j]) for j, ood in enumerate(oods)}
        groups = {group: estimates(result.groups[group], ends[:, place]) for group, ends in by_group.items()}
        return replace(result, metrics=metrics, groups=groups)

    results = {label: again(place, evaluation.results[label]) for place, label in enumerate(labels)}
    return replace(evaluation, results=results, resamples=resamples, drawn=Drawn(tuple(names), drawn))


def difference(
    evaluation: Evaluation, one: str, other: str, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Estimate]]:
    """How much larger each metric of one detector is, with the interval of the difference on the same redrawn images.

    Args:
        evaluation: Of both.
        one: A label.
        other: The label to compare with.
        resamples: Number of bootstrap resamples.
        seed: Random seed of the bootstrap.

    Returns:
        By metric, for ``"mean"``, the mean over the OOD sets, and for each of them.
    """
    labels = [one_of("label", label, tuple(evaluation.results)) for label in (one, other)]
    first, second = (evaluation.results[label] for label in labels)
    drawn = redrawn_results(evaluation, labels, first.measured, resamples, seed)
    gaps = drawn[:, 0] - drawn[:, 1]  # (resamples, OOD sets, metrics)
    differences = {}
    for ood, places in ((None, evaluation.averaged), *((s, (j,)) for j, s in enumerate(evaluation.ood_names))):
        lows, highs = np.quantile(gaps[:, places].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        differences[ood or "mean"] = {
            metric: Estimate(first.detection_value(metric, ood) - second.detection_value(metric, ood), low, high)
            for metric, low, high in zip(first.measured, lows.tolist(), highs.tolist(), strict=True)
        }
    return differences
