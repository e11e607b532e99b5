"""Tables of the studies that are suites: cifar10-fast, cifar10-longer, and what insight shares with them."""

import statistics
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

CHOSEN = (  # rows of cifar10-fast that the page of insight shows
    "AMP",
    "AMP, tau mean, TTA, 6 views",
    "AMP (masked)",
    "AMP, class means, TTA, 6 views (masked)",
    "AMP (synthetic outliers)",
    "AMP, recommended",
    "AMP, recommended, tau permuted",
    "KL to uniform",
    "KL to uniform (synthetic outliers)",
    "KL to uniform, TTA, 5 views (synthetic outliers)",
)
DRAWS = "AMP, other anchors"  # rows that only serve to measure noise

Value = Callable[[Mapping[str, Any]], float]


def tables(known: Mapping[str, Any]) -> dict[str, str]:
    """All tables of cifar10-fast, by name."""
    return {
        "summary": summary(known),
        "sets": by_set(known, "fpr95"),
        "aurocs": by_set(known, "auroc"),
        "more": more(known),
        "chosen": summary(known, CHOSEN),
    }


def tables_of_longer(known: Mapping[str, Any]) -> dict[str, str]:
    """All tables of cifar10-longer, by name."""
    return {
        "longer": summary(known),
        "longer sets": by_set(known, "fpr95"),
        "longer aurocs": by_set(known, "auroc"),
    }


def summary(known: Mapping[str, Any], only: Collection[str] = ()) -> str:
    """All methods, or some: means over the far sets, the near set by itself, and the cost; the lowest FPR95 first."""
    (near,) = next(iter(known["seeds"].values()))["apart"]
    columns: dict[str, Value] = {
        "accuracy": lambda r: r["accuracy"],
        "far: AUROC ↑": lambda r: r["mean"]["auroc"],
        "far: FPR95 ↓": lambda r: r["mean"]["fpr95"],
        "near: AUROC ↑": lambda r: r["metrics"][near]["auroc"]["value"],
        "near: FPR95 ↓": lambda r: r["metrics"][near]["fpr95"]["value"],
    }
    rows = [
        [label, *(words(known, label, value) for value in columns.values()), passes(first(known)[label])]
        for label in ordered(known)
        if not only or label in only
    ]
    return markdown(["method", *columns, "passes"], rows)


def more(known: Mapping[str, Any]) -> str:
    """Other metrics: means over the far sets, calibration of the classifier, and the time."""
    of = next(iter(known["seeds"].values()))
    columns: dict[str, Value] = {
        "AUPR-in ↑": lambda r: r["mean"]["aupr_in"],
        "AUPR-out ↑": lambda r: r["mean"]["aupr_out"],
        "DTACC ↑": lambda r: r["mean"]["dtacc"],
        "ECE ↓": lambda r: r["ece"],
        "AURC ↓": lambda r: r["aurc"],
    }
    columns |= {f"flagged, {name}": partial(_flagged, name) for name in (of["id"], *of["shifted"])}
    rows = []
    for label in ordered(known):
        milliseconds = statistics.median(values_of(known, label, lambda r: r["milliseconds_per_image"]))
        cells = [words(known, label, value) for value in columns.values()]
        rows.append([label, *cells, f"{milliseconds:.1f}"])
    return markdown(["method", *columns, "ms per image"], rows)


def _flagged(name: str, result: Mapping[str, Any]) -> float:
    share: float = result["flagged"][name]
    return share


def by_set(known: Mapping[str, Any], metric: str) -> str:
    """One metric of all methods on every set."""
    sets = list(next(iter(first(known).values()))["metrics"])
    rows = []
    for label in ordered(known):
        values: list[Value] = [lambda r, ood=ood: r["metrics"][ood][metric]["value"] for ood in sets]  # type: ignore[misc]
        rows.append([label, *(words(known, label, value) for value in values)])
    return markdown(["method", *sets], rows)


def first(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """The results of the first seed."""
    results: Mapping[str, Any] = next(iter(known["seeds"].values()))["results"]
    return results


def ordered(known: Mapping[str, Any]) -> list[str]:
    """The methods, the lowest mean FPR95 first."""
    labels = [label for label in first(known) if not label.startswith(DRAWS)]
    return sorted(labels, key=lambda label: statistics.fmean(values_of(known, label, lambda r: r["mean"]["fpr95"])))


def values_of(known: Mapping[str, Any], label: str, value: Value) -> list[float]:
    """A value by seed."""
    return [value(seed["results"][label]) for seed in known["seeds"].values()]


def words(known: Mapping[str, Any], label: str, value: Value) -> str:
    """A value in percent: the mean over seeds, and its deviation where it differs between them."""
    values = values_of(known, label, value)
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(set(values)) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation}"


def passes(result: Mapping[str, Any]) -> str:
    """Passes through the network for one image, forward + backward."""
    cost = result["passes_per_image"]
    return f"{cost['forward']} + {cost['backward']}" if cost["backward"] else str(cost["forward"])


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    lines.insert(1, "|---" + "|---:" * (len(heads) - 1) + "|")
    return "\n".join(lines) + "\n"
