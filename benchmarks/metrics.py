"""Time kedge's detection metrics against scikit-learn's, and the bootstrap intervals.

Run from the root of the repository, with the test extra installed:

    python benchmarks/metrics.py [--scores N] [--repeats R] [--large N] [--json PATH]

The repetitions alternate, so that both sides meet the same load of the machine. scikit-learn computes two values
(`roc_auc_score` and `average_precision_score`), kedge all detection metrics. Then, on ten million scores, metrics by
themselves against what scikit-learn has for them (`roc_curve`, for those that it has not), all at once, with those that
need labels, and with intervals. The command fails if their values differ by 1e-9.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from kedge import metrics
from kedge.files import write_json
from kedge.metrics import detection_metrics
from kedge.provenance import provenance

TOLERANCE = 1e-9


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that one call took, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median and the range of some times."""
    return {"median": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw n ID and n OOD scores from two overlapping normal distributions."""
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, n), rng.normal(1, 1, n)


def compare(n: int, repeats: int) -> dict[str, Any]:
    """Time both libraries on n + n scores in alternation, and compare their values."""
    inside, outside = draw(n)
    truth, both = np.repeat([0, 1], n), np.concatenate([inside, outside])
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        seconds, result = timed(lambda: detection_metrics(inside, outside))
        ours.append(seconds)
        seconds, expected = timed(lambda: (roc_auc_score(truth, both), average_precision_score(truth, both)))
        theirs.append(seconds)
    expected = dict(zip(("auroc", "aupr_out"), expected, strict=True))
    expected["aupr_in"] = average_precision_score(1 - truth, -both)  # not timed: only for the comparison
    return {
        "scores": n,
        "kedge": summary(ours),
        "sklearn": summary(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "difference": max(abs(result[name].value - value) for name, value in expected.items()),
    }


def intervals(n: int, resamples: int, repeats: int) -> dict[str, Any]:
    """Time all metrics with bootstrap intervals on n + n scores."""
    inside, outside = draw(n)
    seconds = [timed(lambda: detection_metrics(inside, outside, resamples=resamples))[0] for _ in range(repeats)]
    return {"scores": n, "resamples": resamples, "kedge": summary(seconds)}


def fpr95_by_curve(truth: np.ndarray, both: np.ndarray) -> float:
    """FPR95 by scikit-learn's ROC curve: the share of OOD accepted where 95 % of ID are."""
    accepted_ood, accepted_id, _ = roc_curve(1 - truth, -both, drop_intermediate=False)
    enough = -(-95 * np.count_nonzero(truth == 0) // 100) / np.count_nonzero(truth == 0)
    return float(accepted_ood[np.searchsorted(accepted_id, enough - 1e-12)])


def dtacc_by_curve(truth: np.ndarray, both: np.ndarray) -> float:
    """The best balanced accuracy by scikit-learn's ROC curve."""
    flagged_id, flagged_ood, _ = roc_curve(truth, both, drop_intermediate=False)
    return float((1 + (flagged_ood - flagged_id).max()) / 2)


THEIRS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "auroc": roc_auc_score,
    "aupr_in": lambda truth, both: average_precision_score(1 - truth, -both),
    "aupr_out": average_precision_score,
    "fpr95": fpr95_by_curve,
    "fpr95_ood": lambda truth, both: fpr95_by_curve(1 - truth, -both),
    "dtacc": dtacc_by_curve,
}


def large(n: int, resamples: int = 1_000) -> dict[str, Any]:
    """Time metrics once on n scores, half of them ID, against scikit-learn."""
    inside, outside = draw(n // 2)
    truth, both = np.repeat([0, 1], n // 2), np.concatenate([inside, outside])
    right = inside < np.quantile(inside, 0.9)
    by_metric, difference = {}, 0.0
    for name, theirs in THEIRS.items():
        ours, result = timed(lambda name=name: getattr(metrics, name)(inside, outside))
        seconds, expected = timed(lambda theirs=theirs: theirs(truth, both))
        by_metric[name] = {"kedge": ours, "sklearn": seconds}
        difference = max(difference, abs(result - expected))
    return {
        "scores": n,
        "by_metric": by_metric,
        "all": timed(lambda: detection_metrics(inside, outside))[0],
        "labelled": timed(lambda: detection_metrics(inside, outside, right))[0],
        "resamples": resamples,
        "with_intervals": timed(lambda: detection_metrics(inside, outside, resamples=resamples))[0],
        "difference": difference,
    }


def line(name: str, seconds: dict[str, float]) -> str:
    """Format one row of the printed table."""
    return f"{name:18} {seconds['median']:6.3f} s  ({seconds['fastest']:.3f} to {seconds['slowest']:.3f})"


def main() -> int:
    """Run the comparison, print it, and return 1 if the values differ."""
    parser = argparse.ArgumentParser(description="Time kedge's detection metrics against scikit-learn's.")
    parser.add_argument("--scores", type=int, default=1_000_000, help="ID scores, and as many OOD scores")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of each side")
    parser.add_argument(
        "--large", type=int, default=10_000_000, help="scores in all of the second part; 0 leaves it out"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()

    detection_metrics(*draw(1000))  # the first call of a process pays for loading code
    point = compare(options.scores, options.repeats)
    boot = intervals(10_000, 1_000, min(options.repeats, 3))

    print(f"{options.scores:,} + {options.scores:,} scores, median of {options.repeats} (fastest to slowest)")
    values = f"kedge, {len(metrics.DETECTION_METRICS)} values"
    print(line(values, point["kedge"]))
    print(line("sklearn, two", point["sklearn"]))
    print(f"ratio (sklearn / kedge): {point['ratio']:.2f}; largest difference of a value: {point['difference']:.1e}")
    print(f"intervals, {boot['resamples']:,} resamples of {boot['scores']:,} + {boot['scores']:,} scores")
    print(line(values, boot["kedge"]))

    result = large(options.large) if options.large else None
    if result:
        print(f"{result['scores']:,} scores in all, once each; seconds")
        for name, seconds in result["by_metric"].items():
            print(f"{name:18} kedge {seconds['kedge']:7.2f}   sklearn {seconds['sklearn']:7.2f}")
        print(f"{'all at once':18} kedge {result['all']:7.2f}")
        print(f"{'and with labels':18} kedge {result['labelled']:7.2f}")
        print(f"{'with intervals':18} kedge {result['with_intervals']:7.2f}   of {result['resamples']:,} resamples")
        point["difference"] = max(point["difference"], result["difference"])

    if options.json:
        record = {"made with": provenance(), "sklearn": sklearn.__version__}
        write_json(options.json, record | {"values": point, "intervals": boot, "large": result})
    if point["difference"] > TOLERANCE:
        print(f"the values differ by more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
