"""Which detector to take by default: every method that reads features, and combinations of them, on all tasks."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from kedge.detectors.rules import RULES
from kedge.errors import NotReadyError
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.comparison import MethodTable, Row, draw_worst_against_mean, matching, run_rows, single_methods
from kedge.studies.study import Setting
from kedge.studies.tasks import VARIED, tasks

DISTANCES, LOGITS = ("mds++", "rmds++", "knn", "cop"), ("gen", "msp", "energy", "kl_uniform", "fdbd")
DEFAULT = ("mds++", "gen")
TRIPLES = (("mds++", "gen", "fdbd"), ("mds++", "gen", "msp"), ("mds++", "knn", "gen"), ("mds++", "energy", "msp"))


def combined() -> dict[str, Row]:
    """The combinations: pairs of a distance and a score of the logits, triples, and other rules for the default."""
    rows = {}
    for parts in (*product(DISTANCES, LOGITS), *TRIPLES):
        rows[" + ".join(parts)] = Row("combined", parts=parts)
    for rule in sorted(set(RULES) - {"sum", "learned"}):
        rows[f"{' + '.join(DEFAULT)}, {rule}"] = Row("combined", {"rule": rule}, DEFAULT)
    rows[f"{' + '.join(DEFAULT)}, quantiles"] = Row("combined", {"standardise": "quantiles"}, DEFAULT)
    return rows


def run_default(
    setting: Setting,
    out: Path,
    features: Path,
    *,
    patterns: tuple[str, ...] = (),
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> MethodTable:
    """Run what is missing, and write metrics.json, tables.md and worst-against-mean.svg.

    Args:
        setting: Scale, seeds, data and weights.
        out: Folder for the cells and the tables.
        features: Folder of extracted features, which studies on the same tasks share.
        patterns: Only rows whose label matches one of these, in which ``*`` is any text.
        command: The command to run it again, for the record.
        progress: Called with what is running, the number of cells done and the number in all.
    """
    rows = matching(single_methods() | combined(), patterns)
    every = tasks(setting) if setting.scale == "smoke" else tasks(setting) | VARIED
    loaders = {name: partial(load, setting, features) for name, load in every.items()}
    comparison = run_rows(rows, loaders, setting.seeds, out / "cells", progress)
    if not comparison.columns:
        raise NotReadyError(f"default needs the data of a task: {'; '.join(comparison.missing.values())}")
    record = {
        "command": command, "scale": setting.scale, "seeds": list(setting.seeds), "missing": dict(comparison.missing),
        "made with": provenance(),
    }  # fmt: skip
    files = {
        "metrics.json": json.dumps({"record": record, **comparison.as_dict()}, indent=1),
        "tables.md": "\n\n".join(table.markdown() for table in (comparison.summary(), comparison.by_column())) + "\n",
    }
    for name, text in files.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    draw_worst_against_mean(comparison, out / "worst-against-mean.svg", " + ".join(DEFAULT))
    return comparison
