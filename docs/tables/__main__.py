"""Write the tables of docs/results into the pages that show them, and a picture.

    python docs/tables
    python docs/tables --add insight runs/insight-small/cifar10/metrics.json
    python docs/tables --add photos runs/photos-small/metrics.json

With --add, a run is first put into docs/results: the rows of a training study, the parts of photos and of
cifar10-trained, the tasks of default, the networks of imagenet; the run of another study on features replaces what is
there. Numbers are rounded. Studies on features give their tables themselves; those of the others are made here.
"""

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import of_insight
import others
import speed
import suites
from adding import added, by_group, to_add, with_seeds, with_tasks

from kedge.files import atomic
from kedge.studies import cifar10_trained, default, head_tables, imagenet_tables, photos

__all__ = ["PAGES", "added", "by_group", "filled", "with_seeds", "with_tasks"]
DOCS = Path(__file__).parent.parent
PAGES = tuple(
    page for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))) if "<!-- table" in page.read_text()
)
Tables = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # by name, of what a file of docs/results holds
SOURCES: dict[str, Tables] = {
    "cifar10-fast": suites.tables,
    "cifar10-longer": suites.tables_of_longer,
    "insight": of_insight.tables,
    "default": lambda known: {
        **default.tables_of_default(known),
        "front": default.front_table(known, results("heads")),
        "leaderboard": others.beside_leaderboard(known),
    },
    "heads": head_tables.tables_of_heads,
    "photos": photos.tables_of_photos,
    "cifar10-trained": cifar10_trained.tables_of_cifar10_trained,
    "imagenet": imagenet_tables.tables_of_imagenet,
    "inference": lambda known: {"times": speed.times(known)},
    "inference-peers": lambda known: {"peers, inference": others.peers_in_passes(known)},
    "shipped": lambda known: {"shipped": speed.times(known), "quality": speed.cost_in_quality(known)},
    "shipped-one-view": lambda known: {"quality of one view": speed.cost_in_quality(known)},
    "peers": lambda known: {"peers": others.peers(known)},
    "field": lambda known: {"own passes": others.own_passes(known)},
    "default-cost": lambda known: {"verdicts": speed.verdicts(known), "eight bits": speed.eight_bits(known)},
    "amp-batches": lambda known: {"batches of AMP": speed.times(known)},
    "amp-resnet50": lambda known: {"AMP on ResNet-50": speed.times(known)},
    "heads-cost": lambda known: {"heads, cost": speed.heads_cost(known)},
    "scoring-photos": lambda known: {"waiting": speed.waiting(known)},
    "serving-photos": lambda known: {"requests": speed.requests(known)},
    "early-exit-photos": lambda known: {"photographs that exit early": speed.exits_early(known)},
    "neighbours": lambda known: {
        "neighbours": speed.neighbours(known),
        "neighbours found": speed.neighbours_found(known),
    },
    "dry-runs": lambda known: {"dry runs": speed.dry_runs(known)},
    "startup": lambda known: {"start": speed.start(known)},
}


def main() -> None:
    """Add what is to be added, and write all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("STUDY", "METRICS"), help="a study, and the metrics.json of a run")
    options = parser.parse_args()
    if options.add:
        study, path = options.add
        text = to_add(study, Path(path), results(study))
        with atomic(DOCS / "results" / f"{study}.json") as temporary:
            temporary.write_text(text + "\n")
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    of_insight.draw(results("insight"), DOCS / "insight.png")


def results(name: str) -> dict[str, Any]:
    """The results of a study or a benchmark."""
    found: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text())
    return found


def filled(text: str) -> str:
    """A page with its tables as the results have them; a table without a source is an error."""
    before, mark, rest = text.partition("<!-- table ")
    if not mark:
        return text
    name, _, rest = rest.partition(" -->\n")
    return f"{before}{mark}{name} -->\n{every()[name]}<!-- end -->" + filled(rest.partition("<!-- end -->")[2])


@functools.cache
def every() -> dict[str, str]:
    """All tables, by name."""
    found = {}
    for source, tables in SOURCES.items():
        if not (DOCS / "results" / f"{source}.json").exists():  # nobody has run it yet
            continue
        for name, table in tables(results(source)).items():
            found[name] = table if isinstance(table, str) else table.markdown() + "\n"
    return found


if __name__ == "__main__":
    main()
