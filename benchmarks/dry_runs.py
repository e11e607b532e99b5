"""What every study with trainings would take on this machine at its full scale: `--dry-run` of all of them.

    python benchmarks/dry_runs.py --data-dir DATA --json docs/results/dry-runs.json
    python benchmarks/dry_runs.py --data-dir DATA --json docs/results/dry-runs.json --studies near-ood --studies scood

A few real steps of each training and one batch of each row, with the study's own networks and images of the true size
(`kedge reproduce NAME --scale full --dry-run` prints one study in detail). Suites in the file are not run again.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from kedge.errors import KedgeError
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies import STUDIES
from kedge.studies.dry_run import DryRun, dry_run
from kedge.studies.study import SCALES, Setting
from kedge.threads import use_threads


def main() -> None:
    """Run what is not in the file, suite by suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of all data sets; by default KEDGE_DATA")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--studies", action="append", choices=tuple(STUDIES), help="by default all")
    parser.add_argument("--scale", default="full", choices=SCALES)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    use_threads(options.threads)
    record: dict[str, Any] = {"suites": {}}
    if options.json.exists():
        record = json.loads(options.json.read_text())
    record["made with"] = provenance()
    for study in options.studies or STUDIES:
        for suite in STUDIES[study](Setting(options.scale, (0,), options.data_dir)).suites:
            key = f"{study}: {suite.name}"
            if key in record["suites"]:
                continue
            begun = time.process_time()
            try:
                facts = measured(dry_run(suite, {}, lambda what, key=key: print(f"{key}: {what}", flush=True)))
            except KedgeError as error:
                facts = {"error": str(error)}
            record["suites"][key] = {**facts, "seconds": time.process_time() - begun}
            with atomic(options.json) as temporary:
                temporary.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{key}: {record['suites'][key]}", flush=True)


def measured(outcome: DryRun) -> dict[str, Any]:
    """The sums of a dry run."""
    training, scoring = outcome.hours
    return {
        "trainings": len(outcome.trainings),
        "training hours": training,
        "scoring hours": scoring,
        "memory": sum(outcome.memory.values()) / 1e9,
        "disk": sum(outcome.disk.values()) / 1e9,
        "missing": list(outcome.sets.missing),
        "not measured": {line.name: line.note for line in (*outcome.trainings, *outcome.scorings) if line.note},
    }


if __name__ == "__main__":
    main()
