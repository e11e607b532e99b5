"""Weights for the parts of the default detector, learned from synthetic outliers, beside its sum.

    python benchmarks/learned_weights.py --data-dir DATA [--seeds 5] [--features runs/features] [--json FILE]

On the photo tasks of `kedge reproduce default`: MDS++ and GEN fitted on frozen features of EfficientNet-Lite0, their
sum, and the rule "learned", whose weights separate held-out images from patch-shuffled, phase-randomized and hybrid
copies.
Prints AUROC near and far, means over seeds, and the share of the weight that the distance got.
"""

import argparse
import statistics
from pathlib import Path

import kedge
from common import save
from kedge.data import class_split
from kedge.metrics import auroc
from kedge.studies.photo_tasks import PHOTOS, photo_task, photos, split
from kedge.studies.study import Setting


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--features", type=Path, default=Path("runs/features"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    setting = Setting(data_dir=given.data_dir)
    rows = []
    print(f"{'task':12}{'seed':>5}{'rule':>9}{'near':>7}{'far':>7}{'weight of MDS++':>17}")
    for name in PHOTOS:
        for seed in range(given.seeds):
            task = photo_task(name, setting, given.features, seed)
            _, held_out, _ = split(class_split(photos(name, given.data_dir))[0], seed)
            for rule in ("sum", "learned"):
                detector = kedge.Combined(task.network, rule=rule).fit(task.train)
                detector.calibrate(task.held_out if rule == "sum" else held_out)
                known = detector.score(task.test)
                near, far = (
                    statistics.fmean(auroc(known, detector.score(each)) for each in group)
                    for group in (task.near, task.far)
                )
                weights = detector.standard.get("weights")
                share = None if weights is None else float(weights[0] / weights.sum())
                rows.append({"task": name, "seed": seed, "rule": rule, "near": near, "far": far, "weight": share})
                text = "" if share is None else f"{share:.2f}"
                print(f"{name:12}{seed:>5}{rule:>9}{100 * near:7.1f}{100 * far:7.1f}{text:>17}", flush=True)
    for name in PHOTOS:
        for rule in ("sum", "learned"):
            chosen = [row for row in rows if row["task"] == name and row["rule"] == rule]
            near, far = (statistics.fmean(row[group] for row in chosen) for group in ("near", "far"))
            print(f"{name:12}{'mean':>5}{rule:>9}{100 * near:7.1f}{100 * far:7.1f}")
    save(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
