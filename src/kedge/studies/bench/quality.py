"""Detection quality of engines with other scores, on real images, relative to the exact engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.data import ImageSet
from kedge.errors import InputError
from kedge.metrics import auroc, fpr95
from kedge.studies.bench.early_exit import EarlyExitEngine
from kedge.studies.bench.engines import EXACT, TITLES, UNANCHORED, Prepared, check_engines

BATCH = 256
FIELDS = ("label", "score", "is_ood")
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

    Returns:
        By engine: ``agreement``, the share of test images with the label of the exact engine; by set ``auroc`` and
        ``fpr95``, ``auroc_points`` and ``fpr95_points`` (percentage points more than the exact engine), ``flagged``
        (the share above the engine's own threshold); and with early exit the mean ``passes`` by set.
    """
    if not ood:
        raise InputError("ood must be at least one set of images; got none")
    check_engines(engines)
    wanted = [name for name in prepared.engines if engines is None or name in (EXACT, *engines)]
    compared: dict[str, dict[str, Any]] = {}
    exact: Mapping[str, Arrays] = {}
    for engine in sorted(set(wanted) - {UNANCHORED, "naive"}, key=list(TITLES).index):  # the exact one first
        run = prepared.start(engine, threads=threads)
        outputs, passes = {}, {}
        for images in (test, *ood):
            parts = [_arrays(run(part)) for part in images.images.split(BATCH)]
            outputs[images.name] = {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}
            if isinstance(run, EarlyExitEngine):
                passes[images.name] = run.mean_passes(images.images)
            if report is not None:
                report(f"{TITLES[engine]}: {images.name}")
        exact = exact or outputs
        compared[engine] = _compared(outputs, exact, test.name) | {"passes": passes or None}
    return compared


def _arrays(detection: Any) -> Arrays:
    """Fields of a detection by kedge or by an exported file."""
    if isinstance(detection, Mapping):
        return {name: detection[name] for name in FIELDS}
    return {name: getattr(detection, name).numpy() for name in FIELDS}


def _compared(outputs: Mapping[str, Arrays], exact: Mapping[str, Arrays], test: str) -> dict[str, Any]:
    outside = [name for name in outputs if name != test]
    values: dict[str, Any] = {
        "agreement": float((outputs[test]["label"] == exact[test]["label"]).mean()),
        "flagged": {name: float(arrays["is_ood"].mean()) for name, arrays in outputs.items()},
    }
    for name, metric in (("auroc", auroc), ("fpr95", fpr95)):
        ours, reference = (
            {ood: metric(source[test]["score"], source[ood]["score"]) for ood in outside} for source in (outputs, exact)
        )
        values[name] = ours
        values[f"{name}_points"] = {ood: 100 * (ours[ood] - reference[ood]) for ood in outside}
    return values
