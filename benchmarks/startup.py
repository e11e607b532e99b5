"""Time imports, help and shell completion against ``import torch``.

Run from the root of the repository, with kedge installed:

    python benchmarks/startup.py [--repeats R] [--json PATH]

Each line is a fresh process, and the repetitions alternate, so that all meet the same load of the machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from common import save

COMPLETION = {"_KEDGE_COMPLETE": "complete_bash", "COMP_WORDS": "kedge tr", "COMP_CWORD": "1"}
KEDGE = str(Path(sys.executable).with_name("kedge"))
COMMANDS = {
    "import torch": ([sys.executable, "-c", "import torch"], {}),
    "import kedge": ([sys.executable, "-c", "import kedge"], {}),
    "from kedge import protect": ([sys.executable, "-c", "from kedge import protect"], {}),
    "kedge --help": ([KEDGE, "--help"], {}),
    "kedge tr<TAB>": ([KEDGE], COMPLETION),
    "kedge score --help": ([KEDGE, "score", "--help"], {}),
}


def seconds(command: list[str], variables: Mapping[str, str]) -> float:
    """The wall time of a process."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, **variables}, check=True)
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, list[float]]:
    """The wall times of each command, the first round left out: it fills the caches of the disk."""
    rounds = [{name: seconds(*command) for name, command in COMMANDS.items()} for _ in range(repeats + 1)]
    return {name: [times[name] for times in rounds[1:]] for name in COMMANDS}


def main() -> None:
    """Print the medians, and the ratios to ``import torch`` in the same round."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = measure(options.repeats)
    rows = {
        name: {
            "seconds": statistics.median(values),
            "fastest": min(values),
            "of torch": statistics.median(a / b for a, b in zip(values, times["import torch"], strict=True)),
        }
        for name, values in times.items()
    }
    print(f"{'':28}{'median':>9}{'fastest':>9}{'/ import torch':>16}")
    for name, row in rows.items():
        print(f"{name:28}{row['seconds']:8.2f}s{row['fastest']:8.2f}s{row['of torch']:16.2f}")
    save(options.json, {"repeats": options.repeats, "rows": rows})


if __name__ == "__main__":
    main()
