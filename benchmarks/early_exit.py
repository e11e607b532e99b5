"""The share of photographs that exit early, and what early exit costs in quality, on anchored fine-tuned networks.

    kedge reproduce photos --tasks "first layer" --seeds 3 --data-dir DATA --features runs/tasks --out runs/photos
    python benchmarks/early_exit.py --data-dir DATA --features runs/tasks [--subjects pets] [--seeds 3] [--json PATH]

EfficientNet-Lite0, anchored at its first layer and fine-tuned: AMP with K anchors, and with two anchors for images that
these clearly accept. Reads the per-anchor logits that the study has stored, so that the exact scores and those of early
exit are of the same passes. Both are calibrated on their own scores of held-out images; early exit learns its exit
threshold from the first half of them, as `kedge.experimental.EarlyExit` does from a random half.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import kedge
from kedge.calibration import is_ood
from kedge.data import Features
from kedge.detectors.base import Outputs
from kedge.experimental.early_exit import exit_threshold
from kedge.files import atomic
from kedge.metrics import auroc
from kedge.studies.photo_tasks import PHOTOS, finetuned_task
from kedge.studies.study import Setting
from kedge.studies.task import Task

ALPHA, MIN_ANCHORS = 0.05, 2


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--features", type=Path, required=True, help="folder of the study's networks and features")
    parser.add_argument("--subjects", nargs="+", default=list(PHOTOS), choices=list(PHOTOS))
    parser.add_argument("--layer", default="first layer", help="the layer that is anchored, as in the study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    setting = Setting("small", data_dir=options.data_dir)
    rows = []
    print(f"{'subject, seed':<16} {'images':<28} early, %  passes  same label, %  flagged, %     AUROC, %")
    for subject in options.subjects:
        for seed in range(options.seeds):
            task = finetuned_task(subject, setting, options.features, seed, layer=options.layer)
            for row in measured(task):
                rows.append({"subject": subject, "seed": seed} | row)
                print(line(rows[-1]), flush=True)
    if options.json:
        record = {"options": {key: str(value) for key, value in vars(options).items()}, "rows": rows}
        with atomic(options.json) as temporary:
            temporary.write_text(json.dumps(record, indent=1))


def measured(task: Task) -> list[dict[str, Any]]:
    """For each set of images of a task, early exit beside all anchors."""
    net = task.network
    assert isinstance(net, kedge.Anchored)
    detector = kedge.AMP(net)

    def outputs(images: Features) -> tuple[Outputs, Outputs]:
        assert images.per_anchor is not None
        per_anchor = images.per_anchor.transpose(0, 1).float()  # (K, N, C)
        few = detector.of_per_anchor_logits(per_anchor[:MIN_ANCHORS])
        return few, detector.of_per_anchor_logits(per_anchor)

    few, full = outputs(task.held_out)
    half = len(few.score) // 2
    threshold = exit_threshold(few.score[:half], full.score[:half], ALPHA)
    held_out = {
        "exact": full.score,
        "early": torch.where(few.score <= threshold, few.score, full.score)[half:],
    }
    rows, tested = [], {}
    for number, images in enumerate((task.test, *task.near, *task.far)):
        few, full = outputs(images)
        exits = few.score <= threshold
        score = torch.where(exits, few.score, full.score)
        label = torch.where(exits, few.logits.argmax(1), full.logits.argmax(1))
        scores = {"exact": full.score, "early": score}
        tested = tested or scores
        row = {
            "images": images.name,
            "group": "ID" if not number else "near" if number <= len(task.near) else "far",
            "count": len(score),
            "exits": float(exits.double().mean()),
            "passes": float(torch.where(exits, MIN_ANCHORS, net.k).double().mean()),
            "agreement": float((label == full.logits.argmax(1)).double().mean()),
        }
        for name, values in scores.items():
            row[f"flagged_{name}"] = float(is_ood(held_out[name], values, ALPHA).double().mean())
            row[f"auroc_{name}"] = auroc(tested[name].numpy(), values.numpy()) if number else None
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    flagged = f"{100 * row['flagged_early']:5.1f} ({100 * row['flagged_exact']:.1f})"
    area = "" if row["auroc_exact"] is None else f"{100 * row['auroc_early']:6.2f} ({100 * row['auroc_exact']:.2f})"
    head = f"{row['subject']}, {row['seed']}"
    return (
        f"{head:<16} {row['group'] + ', ' + row['images']:<28} {100 * row['exits']:8.1f} {row['passes']:7.2f} "
        f"{100 * row['agreement']:13.1f}  {flagged:<14} {area}"
    )


if __name__ == "__main__":
    main()
