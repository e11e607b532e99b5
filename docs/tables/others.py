"""Tables beside other libraries and OpenOOD's leaderboard."""

import statistics
from collections.abc import Mapping
from typing import Any

from scipy.stats import spearmanr
from suites import markdown, passes

from kedge.studies.comparison import MethodTable
from kedge.studies.leaderboard import STANDARD_TRAINING, leaderboard, leaderboard_methods
from kedge.studies.task import GROUPS

TOLERANCE = 1e-5  # of the largest score, as in benchmarks/peers.py  # of the largest score, as in benchmarks/peers.py
CIFAR10 = {
    "cifar10-resnet20": "ResNet-20",
    "cifar10-resnet56": "ResNet-56",
}  # tasks with public networks  # tasks with public networks


def peers(known: Mapping[str, Any]) -> str:
    """Scores and times of kedge beside pytorch-ood's; methods whose definitions differ have a note."""
    rows = []
    for row in known["rows"]:
        passed = row["difference"] <= TOLERANCE * row["scale"]
        difference = f"{row['difference']:.1e}" if passed else "differ"
        ratios = [f"{ratio:.2f}" if ratio else "" for ratio in (row["fit_ratio"], row["score_ratio"])]
        rows.append([row["name"], f"{row['correlation']:.6f}", difference, *ratios])
    scores, fits = ([row[key] for row in known["rows"] if row[key]] for key in ("score_ratio", "fit_ratio"))
    for name, of in (("median", statistics.median), ("largest", max)):
        rows.append([name, "", "", f"{of(fits):.2f}", f"{of(scores):.2f}"])
    notes = "\n" + "".join(f"- {row['name']}: {row['note']}.\n" for row in known["rows"] if row["note"])
    return markdown(["method", "rank correlation", "largest difference", "fit, ratio", "score, ratio"], rows) + notes


def peers_in_passes(known: Mapping[str, Any]) -> str:
    """pytorch-ood's detectors on the network without anchoring, in unanchored passes."""
    batches = known["options"]["batches"]
    lines = []
    for record in known["networks"]:
        by: dict[str, dict[int, float]] = {}
        for row in record["peers"]:
            by.setdefault(row["method"], {})[row["batch"]] = row["ratio"]
        lines += [[record["name"], method, *(f"{of[b]:.2f}" for b in batches)] for method, of in by.items()]
    return markdown(["network", "pytorch-ood", *(f"batch {b}" for b in batches)], lines)


def beside_leaderboard(known: Mapping[str, Any]) -> str:
    """AUROC / FPR95 on the public CIFAR-10 networks, and AUROC on OpenOOD's leaderboard, whose order this is."""
    table, names = MethodTable.from_record(known).public().of_tasks(CIFAR10), leaderboard_methods()
    board = {
        names[entry.method]: {"near": entry.near[0], "far": entry.far[0]}
        for entry in leaderboard("cifar10")
        if entry.training == STANDARD_TRAINING and entry.method in names
    }
    labels = (*table.single, "mds++ + gen")
    found = {label: {column: table.value(label, column).mean for column in table.columns} for label in labels}
    shared = sorted((label for label in found if label in board), key=lambda label: -sum(board[label].values()))
    others = sorted((label for label in found if label not in board), key=lambda label: -sum(found[label].values()))
    rows = []
    for label in (*shared, *others):
        cells = [
            f"{100 * auroc:.1f} / {100 * table.value(label, column, 'fpr95').mean:.0f}"
            for column, auroc in found[label].items()
        ]
        rows.append([label, *cells, *(f"{board[label][group]:.1f}" if label in board else "" for group in GROUPS)])
    for name, left_out in (("rank correlation with the leaderboard", ""), ("the same without weiper", "weiper")):
        kept = [label for label in shared if label != left_out]
        ranks = [
            spearmanr([found[label][column] for label in kept], [board[label][column[1]] for label in kept]).statistic
            for column in table.columns
        ]
        rows.append([name, *(f"{rank:.2f}" for rank in ranks), "", ""])
    heads = [f"{CIFAR10[task]} {group}" for task, group in table.columns]
    return markdown(["method", *heads, "leaderboard near", "far"], rows)


def own_passes(known: Mapping[str, Any]) -> str:
    """AUROC with its interval / FPR95 of methods with passes of their own, on a sample."""
    rows = []
    for label, result in known["results"].items():
        cells = []
        for group in ("near", "far"):
            low, value, high = (100 * result[group]["auroc"][key] for key in ("low", "value", "high"))
            cells.append(f"{value:.1f} ({low:.1f} to {high:.1f}) / {100 * result[group]['fpr95']['value']:.0f}")
        rows.append([label, *cells, passes(result)])
    return markdown(["method", "near", "far", "passes"], rows)
