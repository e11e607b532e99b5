"""What the guarantee costs with few images to calibrate on: the share of known images that is flagged, and its spread.

Split conformal prediction promises a share of at most alpha on average over calibration sets. That of one set follows a
beta distribution which depends on the number of its images alone.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kedge.evaluation.summary import TextTable
from kedge.studies.comparison import Fitted, Row
from kedge.studies.task import Task

SIZES = (50, 100, 200, 500, 1000)  # images to calibrate on
DRAWS = 20  # of so many held-out images, for each seed
ALPHA = 0.05


def flagged_shares(
    rows: Mapping[str, Row],
    load: Callable[[int], Task],
    seeds: Sequence[int],
    draws: int = DRAWS,
) -> dict[str, Any]:
    """By row and number of images, the shares of test images flagged, and how many images the threshold was set on."""
    shares: dict[str, dict[str, Any]] = {label: {} for label in rows}
    for seed in seeds:
        task = load(seed)
        fitted = Fitted(task)
        sizes = [n for n in SIZES if n <= len(task.held_out)]
        for label, row in rows.items():
            detector, generator = fitted.detector(row), torch.Generator().manual_seed(seed)
            for n in sizes:
                of = shares[label].setdefault(str(n), {"flagged": []})
                for _ in range(draws):
                    drawn = torch.randperm(len(task.held_out), generator=generator)[:n]
                    detector.calibrate(task.held_out.subset(drawn), alpha=ALPHA)
                    assert detector.calibration is not None
                    of["threshold on"] = len(detector.calibration.scores)
                    of["flagged"].append(float(detector(task.test).is_ood.double().mean()))
    return shares


def share_law(n: int, alpha: float = ALPHA) -> tuple[float, float]:
    """Mean and deviation of the share of known images that a threshold set on n of them flags, without ties.

    The k-th largest of n scores is the threshold, k the whole part of alpha (n + 1), and the share of a continuous
    distribution above it follows Beta(k, n + 1 - k).

    Example:
        >>> tuple(round(value, 4) for value in share_law(99))
        (0.05, 0.0217)
    """
    k = math.floor(alpha * (n + 1) + 1e-9)
    mean = k / (n + 1)
    return mean, math.sqrt(mean * (1 - mean) / (n + 2))


def cost_table(shares: Mapping[str, Any]) -> TextTable:
    """Mean and deviation of the share flagged, by number of images to calibrate on, beside the law."""
    rows = []
    for n in next(iter(shares.values())):
        cells = []
        for by_size in shares.values():
            found = by_size[n]
            measured = statistics.fmean(found["flagged"]), statistics.stdev(found["flagged"])
            cells += [_percent(measured), _percent(share_law(found["threshold on"]))]
        rows.append((n, *cells))
    caption = (
        f"Share of ID test images flagged at alpha {ALPHA}, mean ± deviation over calibration sets in %; beside it the "
        "beta law for as many images as the threshold is set on."
    )
    return TextTable(
        caption, ("held-out images", *(f"{label}{what}" for label in shares for what in ("", ", law"))), tuple(rows)
    )


def _percent(values: tuple[float, float]) -> str:
    mean, deviation = values
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"
