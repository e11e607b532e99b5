"""Tables and the picture of the study insight."""

import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suites import first, markdown, values_of, words

from kedge.studies.insight import BUDGETS

BASELINES = {  # unanchored networks whose names differ from their anchored counterparts
    "unanchored": "anchored",
    "unanchored, differences": "masked, uniform",
    "unanchored, T as noise": "anchored",
    "unanchored, T as noise, narrow, 32 epochs": "narrow, 32 epochs",
    "compact, unanchored": "compact, fresh stem",
    "compact, unanchored, 24 epochs": "compact, fresh stem, 24 epochs",
}
SHOWN = {  # scores in the picture, and their marks
    "AMP": "o",
    "no tau": "x",
    "tau alone": "^",
    "KL to uniform": "D",
}


def tables(known: Mapping[str, Any]) -> dict[str, str]:
    """All tables, by name."""
    return {
        "budgets": budgets(known),
        "near": by_network(known, 0),
        "phase-randomized": by_network(known, 1),
        "rare": rare_readings(known),
    }


def readings(known: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The rows of the study `insight`: by network, an unanchored one after its anchored counterpart, and score."""
    found: dict[str, dict[str, str]] = {}
    for label in first(known):
        network, _, reading = label.partition(": ")
        found.setdefault(network, {})[reading] = label
    order = list(found)

    def place(network: str) -> tuple[int, bool]:
        anchored = BASELINES.get(network, network.removeprefix("unanchored, "))
        return order.index(anchored if anchored in found else network), anchored != network

    return {network: found[network] for network in sorted(found, key=place)}


def common(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The scores of more than two networks."""
    times = Counter(reading for of in rows.values() for reading in of)
    return [reading for reading, count in times.items() if count > 2]


def by_network(known: Mapping[str, Any], number: int) -> str:
    """AUROC / FPR95 on one set, of every network by every score."""
    rows, ood = readings(known), list(next(iter(first(known).values()))["metrics"])[number]
    lines = []
    for network, of in rows.items():
        cells = [both(known, of[reading], ood) if reading in of else "" for reading in common(rows)]
        lines.append([network, words(known, next(iter(of.values())), lambda r: r["accuracy"]), *cells])
    return markdown(["network", "accuracy", *common(rows)], lines)


def budgets(known: Mapping[str, Any]) -> str:
    """The narrow networks by epochs, AUROC / FPR95 on either set: the same passes side by side."""
    sets = list(next(iter(first(known).values()))["metrics"])
    lines = []
    for epochs in BUDGETS:
        for network, *shown in (
            (f"narrow, {epochs} epochs", "AMP", "AMP, recommended"),
            (f"unanchored, narrow, {epochs} epochs", "KL to uniform", "KL to uniform, TTA, 5 views"),
        ):
            labels = [f"{network}: {reading}" for reading in shown]
            cells = [both(known, label, ood) for ood in sets for label in labels]
            accuracies = [words(known, label, lambda r: r["accuracy"]) for label in labels]
            lines.append([network, " / ".join(accuracies), *cells])
    heads = [f"{place}: {what}" for place in ("near", "phase-randomized") for what in ("one view", "TTA")]
    return markdown(["network", "accuracy, with TTA", *heads], lines)


def rare_readings(known: Mapping[str, Any]) -> str:
    """The scores of few networks, on both sets."""
    rows, sets = readings(known), list(next(iter(first(known).values()))["metrics"])
    lines = [
        [network, reading, *(both(known, label, ood) for ood in sets)]
        for network, of in rows.items()
        for reading, label in of.items()
        if reading not in common(rows)
    ]
    return markdown(["network", "score", *sets], lines)


def both(known: Mapping[str, Any], label: str, ood: str) -> str:
    """AUROC / FPR95."""
    return f"{percent(known, label, ood, 'auroc'):.1f} / {percent(known, label, ood, 'fpr95'):.1f}"


def percent(known: Mapping[str, Any], label: str, ood: str, metric: str) -> float:
    """The mean over seeds of a metric on one set."""
    return 100 * statistics.fmean(values_of(known, label, lambda r: r["metrics"][ood][metric]["value"]))


def draw(known: Mapping[str, Any], path: Path) -> None:
    """FPR95 of every network on either set, by the main scores."""
    import matplotlib.pyplot as plt

    rows, sets = readings(known), list(next(iter(first(known).values()))["metrics"])
    figure, axes = plt.subplots(1, len(sets), figsize=(11, 0.32 * len(rows) + 1.2), sharey=True, layout="constrained")
    for axis, ood in zip(axes, sets, strict=True):
        for number, (reading, marker) in enumerate(SHOWN.items()):
            at = {place: of[reading] for place, of in enumerate(rows.values()) if reading in of}
            rates = [percent(known, label, ood, "fpr95") for label in at.values()]
            axis.plot(rates, list(at), marker, color=f"C{number}", label=reading)
        axis.set(title=ood, xlabel="FPR95, percent", yticks=range(len(rows)), yticklabels=list(rows))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
