"""Which detector is best beyond noise: a bootstrap that redraws the same images for every detector.

Two detectors err on the same hard images, so their values rise and fall together from sample to sample. The interval
of their difference is therefore much narrower than their two intervals suggest, and it is what a comparison needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.checks import one_of
from kedge.evaluation.result import METRICS, Evaluation
from kedge.metrics import Estimate, Repeated

RESAMPLES = 500
LEVEL = 0.95
FEWEST = 20  # images of a set: with fewer, a resample is too much like the sample and noise looks smaller than it is
BETTER = {"accuracy": 1, "auroc": 1, "fpr95": -1, "aupr_in": 1, "aupr_out": 1, "dtacc": 1, "fpr95_ood": -1, "ece": -1}


@dataclass(frozen=True)
class Best:
    """The detectors that are best beyond noise; None where there is no such detector.

    Attributes:
        overall: By metric: of the mean over the OOD sets, and of the accuracy.
        by_set: By OOD set and metric.
        enough: Whether every set has the images that such a statement needs.
        resamples: Of the bootstrap behind it.
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
) -> NDArray[np.float64]:
    """The detection metrics of every detector on the same redrawn images, again and again.

    Args:
        scores: By detector, then by set, one score per image (N,).
        resamples: How often every set's images are redrawn with replacement.
        seed: The same seed draws the same images.
        pairs: For each OOD set the places of the sets that are in distribution beside it, and its own; by default the
            first set is in distribution and all others are not.

    Returns:
        (resamples, detectors, OOD sets, metrics), the metrics in the order of `kedge.evaluation.METRICS`.

    Example:
        >>> redraw([[np.arange(9), np.arange(5)]], resamples=3).shape
        (3, 1, 1, 6)
    """
    rng = np.random.default_rng(seed)
    pairs = pairs or [((0,), place) for place in range(1, len(scores[0]))]
    measures = [
        [Repeated(np.concatenate([sets[place] for place in inside]), sets[outside]) for inside, outside in pairs]
        for sets in scores
    ]
    drawn = np.empty((resamples, len(scores), len(pairs), len(METRICS)))
    for values in drawn:
        sizes = [len(images) for images in scores[0]]
        times = [np.bincount(rng.integers(size, size=size), minlength=size) for size in sizes]  # how often each image
        for place, (inside, outside) in enumerate(pairs):
            repeats = np.concatenate([times[each] for each in inside]), times[outside]
            for detector, by_pair in enumerate(measures):
                measured = by_pair[place](*repeats)
                values[detector, place] = [measured[metric] for metric in METRICS]
    return drawn


def winner(values: Sequence[float], drawn: NDArray[np.float64], better: int) -> int | None:
    """The place of the best value, if the interval of its lead over each other value excludes zero.

    Args:
        values: One per detector.
        drawn: The same values on redrawn images, (resamples, detectors).
        better: 1 where larger is better, -1 where smaller is.

    Example:
        >>> drawn = np.array([[0.9, 0.7], [0.8, 0.6], [0.9, 0.8]])
        >>> winner([0.9, 0.7], drawn, 1), winner([0.9, 0.9], drawn[:, [0, 0]], 1)
        (0, None)
    """
    if len(values) < 2:
        return None
    best = int(np.argmax(better * np.asarray(values)))
    leads = better * (drawn[:, [best]] - np.delete(drawn, best, axis=1))  # (resamples, the others)
    lowest = np.quantile(leads, (1 - LEVEL) / 2, axis=0)
    return best if bool((lowest > 0).all()) else None


def best_beyond_noise(evaluation: Evaluation, *, resamples: int = RESAMPLES, seed: int = 0) -> Best:
    """Find the detectors that lead in the mean over the OOD sets, on single sets, and in accuracy.

    The images are the only noise considered: another training run may change the order of the detectors too.

    Args:
        evaluation: Of two detectors or more; with one, or with sets too small to tell, none is best.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    names, results, oods = list(evaluation.results), list(evaluation.results.values()), evaluation.ood_names
    enough = min(len(evaluation.sets[name]) for name in (evaluation.id_name, *oods)) >= FEWEST
    if len(names) < 2 or not enough:
        return Best({}, {}, enough, resamples)

    def named(values: Sequence[float], drawn: NDArray[np.float64], metric: str) -> str | None:
        place = winner(values, drawn, BETTER[metric])
        return None if place is None else names[place]

    drawn = _redrawn(evaluation, names, resamples, seed)
    overall: dict[str, str | None] = {}
    by_set: dict[tuple[str, str], str | None] = {}
    for m, metric in enumerate(METRICS):
        overall[metric] = named(
            [r.mean(metric) for r in results], drawn[:, :, evaluation.averaged, m].mean(axis=2), metric
        )
        for j, ood in enumerate(oods):
            values = [r.metrics[ood][metric].value for r in results]
            by_set[ood, metric] = named(values, drawn[:, :, j, m], metric)
    labels = evaluation.sets[evaluation.id_name].labels
    if labels is not None:
        right = np.stack([(r.detections[evaluation.id_name].label == labels).numpy() for r in results])
        overall["accuracy"] = named(list(right.mean(axis=1)), _redraw_means(right, resamples, seed), "accuracy")
    return Best(overall, by_set, enough, resamples)


def difference(
    evaluation: Evaluation, one: str, other: str, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Estimate]]:
    """How much more one detector has than another, with the interval of the difference on the same redrawn images.

    Args:
        evaluation: Of both.
        one: A label.
        other: The label to compare with.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Returns:
        By metric, for ``"mean"``, the mean over the OOD sets, and for each of them.
    """
    both = [one_of("label", label, tuple(evaluation.results)) for label in (one, other)]
    mine, its = (evaluation.results[label] for label in both)
    drawn = _redrawn(evaluation, both, resamples, seed)
    apart = drawn[:, 0] - drawn[:, 1]  # (resamples, OOD sets, metrics)

    def estimate(gap: float, gaps: NDArray[np.float64]) -> Estimate:
        low, high = np.quantile(gaps, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(gap, float(low), float(high))

    found = {
        "mean": {
            metric: estimate(mine.mean(metric) - its.mean(metric), apart[:, evaluation.averaged, m].mean(axis=1))
            for m, metric in enumerate(METRICS)
        }
    }
    for j, ood in enumerate(evaluation.ood_names):
        found[ood] = {
            metric: estimate(mine.metrics[ood][metric].value - its.metrics[ood][metric].value, apart[:, j, m])
            for m, metric in enumerate(METRICS)
        }
    return found


def _redrawn(evaluation: Evaluation, labels: Sequence[str], resamples: int, seed: int) -> NDArray[np.float64]:
    """`redraw` for detectors of a table, (resamples, detectors, OOD sets, metrics)."""
    results = [evaluation.results[label] for label in labels]
    scores = [[result.detections[name].score.double().numpy() for name in evaluation.sets] for result in results]
    return redraw(scores, resamples=resamples, seed=seed, pairs=evaluation.pairs())


def _redraw_means(values: NDArray[Any], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means of (detectors, N) over redrawn images, (resamples, detectors)."""
    rng, n = np.random.default_rng(seed), values.shape[1]
    return np.stack([values[:, rng.integers(n, size=n)].mean(axis=1) for _ in range(resamples)])
