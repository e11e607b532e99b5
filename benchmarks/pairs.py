"""Whether a row of a study leads another beyond the noise of the images: differences with paired intervals.

    kedge reproduce cifar10-fast --seeds 3
    python benchmarks/pairs.py cifar10-fast "AMP, recommended" "ODIN" [--seeds 3] [--run runs/cifar10-fast-small]
                               [--networks runs/networks] [--resamples 500] [--data-dir DIR]

Printed are, for each training, the differences of AUROC and FPR95 in percentage points, as a mean over the OOD sets and
set by set, each with its 95 % interval: the same images are redrawn for both rows. Cells that are finished in the run's
folder are read; what is missing is trained and scored first.
"""

import argparse
from pathlib import Path

from kedge.evaluation import difference
from kedge.evaluation.paired import RESAMPLES
from kedge.studies import STUDIES
from kedge.studies.run import SuiteRun
from kedge.studies.study import Setting

METRICS = ("auroc", "fpr95")


def main() -> None:
    """Compare two rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("one", help="a row")
    parser.add_argument("other", help="the row to compare it with")
    parser.add_argument("--seeds", type=int, default=1, help="trainings, from seed 0 on")
    parser.add_argument("--run", type=Path, default=None, help="folder of the study; runs/STUDY-small by default")
    parser.add_argument("--networks", type=Path, default=Path("runs/networks"), help="folder of trained networks")
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--data-dir", type=Path, default=None, help="where data sets are; KEDGE_DATA by default")
    options = parser.parse_args()
    study = STUDIES[options.study](Setting("small", tuple(range(options.seeds)), options.data_dir))
    suite, labels = study.suites[0], (options.one, options.other)
    missing = [label for label in labels if label not in suite.methods]
    if missing:
        parser.error(f"{options.study} has no row {missing[0]!r}; it has {', '.join(suite.methods)}")
    both = suite.only(*labels)
    folder = options.run or Path("runs") / f"{options.study}-small"
    how = {"accelerator": "auto", "precision": None, "workers": 2}
    for seed, table in SuiteRun(both, folder / suite.name, networks=options.networks, training=how).run().items():
        print(f"seed {seed}: {options.one} less {options.other}, percentage points")
        for name, values in difference(table, *labels, resamples=options.resamples).items():
            shown = []
            for metric in METRICS:
                estimate = values[metric]
                assert estimate.low is not None
                assert estimate.high is not None
                interval = f"({100 * estimate.low:+.2f} to {100 * estimate.high:+.2f})"
                shown.append(f"{metric.upper()} {100 * estimate.value:+6.2f} {interval}")
            print(f"  {name:<28} {'   '.join(shown)}")


if __name__ == "__main__":
    main()
