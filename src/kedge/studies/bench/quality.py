"""What an engine that gives other scores costs in quality, on real images, beside the exact one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.data import ImageSet
from kedge.errors import InputError
from kedge.metrics import auroc, fpr95
from kedge.studies.bench.engines import EXACT, MIN_ANCHORS, PLAIN, TITLES, Adaptive, Prepared, arrays, check_engines

BATCH = 256
COMPARED = tuple(name for name in TITLES if name not in (PLAIN, "naive"))

Arrays = dict[str, NDArray[Any]]


def quality(
    prepared: Prepared,
    test: ImageSet,
    ood: Sequence[ImageSet],
    *,
    engines: Sequence[str] | None = None,
    threads: int | None = None,
    report: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Score the same images by every engine, and compare with the exact one.

    Args:
        prepared: What `prepare` wrote, with real images to calibrate on.
        test: In-distribution images that the detector has not seen.
        ood: Sets of images out of distribution.
        engines: Of those that can run; all by default.
        threads: Of engines that are not torch; by default as many as torch takes.
        report: Called with the title of an engine and the name of a set, once it is scored.

    Returns:
        By engine: ``agreement``, the share of test images with the label of the exact engine; by set ``auroc`` and
        ``fpr95``, ``auroc_points`` and ``fpr95_points`` (percentage points more than the exact engine), ``flagged``
        (the share that the engine's own threshold flags); and the mean ``passes`` by set of an adaptive engine.
    """
    if not ood:
        raise InputError("ood must be at least one set of images; got none")
    check_engines(engines)
    found: dict[str, dict[str, Any]] = {}
    exact: Mapping[str, Arrays] = {}
    for engine in (EXACT, *(name for name in COMPARED if name != EXACT)):
        if engine not in prepared.engines or (engines is not None and engine not in (EXACT, *engines)):
            continue
        run = prepared.start(engine, threads=threads)
        said, passes = {}, {}
        for images in (test, *ood):
            parts = [arrays(run(part)) for part in images.images.split(BATCH)]
            said[images.name] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            if isinstance(run, Adaptive):
                passes[images.name] = run.mean_passes(images.images)
            if report is not None:
                report(f"{TITLES[engine]}: {images.name}")
        exact = exact or said
        found[engine] = _compared(said, exact, test.name)
        found[engine]["passes"] = passes or None
    return found


def open_share(passes: float, all_passes: int) -> float:
    """The share of images that are left to all anchors, out of the mean number of passes.

    Example:
        >>> open_share(2.6, 5)
        0.2
    """
    return round((passes - MIN_ANCHORS) / (all_passes - MIN_ANCHORS), 6) if all_passes > MIN_ANCHORS else 0.0


def _compared(said: Mapping[str, Arrays], exact: Mapping[str, Arrays], test: str) -> dict[str, Any]:
    outside = [name for name in said if name != test]
    values: dict[str, Any] = {
        "agreement": float((said[test]["label"] == exact[test]["label"]).mean()),
        "flagged": {name: float(arrays["is_ood"].mean()) for name, arrays in said.items()},
    }
    for name, metric in (("auroc", auroc), ("fpr95", fpr95)):
        mine, its = (
            {ood: metric(source[test]["score"], source[ood]["score"]) for ood in outside} for source in (said, exact)
        )
        values[name] = mine
        values[f"{name}_points"] = {ood: 100 * (mine[ood] - its[ood]) for ood in outside}
    return values
