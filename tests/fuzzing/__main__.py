"""Fuzz for as long as one likes; ``make fuzz SECONDS=600`` runs it.

    cd tests; python -m fuzzing [--target NAME ...] [--seconds 60] [--seed N] [--case N]

The targets run one after the other, in processes of their own, so that a crash and a hang are failures too.
"""

import argparse
import secrets
import sys

from fuzzing import TARGETS, fuzz, fuzz_apart


def main() -> None:
    """Run the targets and print a table for docs/reliability.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, shared by the targets")
    parser.add_argument("--seed", type=int, default=None, help="by default a fresh one")
    parser.add_argument("--case", type=int, default=None, help="run this case alone")
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    if options.case is not None:
        for name in options.target:
            fuzz(name, cases=1, seed=seed, first=options.case)
        print("it holds")
        return
    share, rows, failures = options.seconds / len(options.target), [], 0
    for name in options.target:
        result = fuzz_apart(name, share, seed)
        failures += len(result.failures)
        refused = result.cases - result.accepted - len(result.failures)
        rows.append(
            f"| {name} | {result.cases:,} | {result.accepted:,} | {refused:,} | {result.slowest:.2f} | "
            f"{result.largest:.0f} | {len(result.failures)} |"
        )
        print(rows[-1], flush=True)
    print(f"\nseed {seed}, {options.seconds:g} seconds\n")
    print("| target | cases | accepted | refused | slowest, s | largest, MB | failures |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
