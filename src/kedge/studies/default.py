"""Which detector to take by default: every method that reads features, and combinations of them, on all tasks."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from kedge.detectors.rules import RULES
from kedge.errors import NotReadyError
from kedge.evaluation.summary import TextTable
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.comparison import (
    MethodTable,
    Row,
    draw_worst_against_mean,
    interval,
    matching,
    run_rows,
    single_methods,
)
from kedge.studies.photo_tasks import PHOTOS, TOGETHER, VARIANTS
from kedge.studies.photographs import used_photographs
from kedge.studies.study import Setting
from kedge.studies.tasks import VARIED, tasks
from kedge.studies.written import in_files

DISTANCES, LOGITS = ("mds++", "rmds++", "knn", "cop"), ("gen", "msp", "energy", "kl_uniform", "fdbd")
DEFAULT = ("mds++", "gen")
SHRINKAGES, NEIGHBOURS = (0.01, 0.1, 0.3), (1, 5, 50)  # beside the methods' own choices
TRIPLES = (("mds++", "gen", "fdbd"), ("mds++", "gen", "msp"), ("mds++", "knn", "gen"), ("mds++", "energy", "msp"))


def combined() -> dict[str, Row]:
    """The combinations: pairs of a distance and a score of the logits, triples, and other rules for the default."""
    rows = {}
    for parts in (*product(DISTANCES, LOGITS), *TRIPLES):
        rows[" + ".join(parts)] = Row("combined", parts=parts)
    for rule in sorted(set(RULES) - {"sum", "learned"}):
        rows[f"{' + '.join(DEFAULT)}, {rule}"] = Row("combined", {"rule": rule}, DEFAULT)
    rows[f"{' + '.join(DEFAULT)}, quantiles"] = Row("combined", {"standardise": "quantiles"}, DEFAULT)
    for share in SHRINKAGES:
        part = Row("mds++", {"shrinkage": share})
        rows[f"mds++ (shrinkage {share}) + gen"] = Row("combined", parts=(part, "gen"))
    for k in NEIGHBOURS:
        rows[f"knn (k = {k}) + gen"] = Row("combined", parts=(Row("knn", {"k": k}), "gen"))
    return rows


def sources_of(task: str) -> tuple[str, ...]:
    """The sets whose images a task is made of, by its name."""
    if task in VARIANTS and VARIANTS[task][0] == TOGETHER:
        return PHOTOS
    return (task.partition(",")[0].partition("-")[0],)


def leave_one_out(table: MethodTable) -> TextTable:
    """For each set, the row that all tasks without its images would choose, and what that row gives on the set's tasks.

    The row with the smallest worst shortfall is chosen, so a rule is judged on tasks that it was not chosen on.
    """
    tasks = {task: sources_of(task) for task, _ in table.columns}
    rows = []
    for source in dict.fromkeys(sources[0] for sources in tasks.values() if len(sources) == 1):
        others = table.of_tasks([task for task, sources in tasks.items() if source not in sources])
        own = table.of_tasks([task for task, sources in tasks.items() if sources == (source,)])
        if not others.columns:
            continue
        cells = []
        for label in (others.ordered[0], " + ".join(DEFAULT)):
            if label in own.results:
                cells += [label, interval(own.mean(label)), f"{100 * own.worst(label)[1]:.1f}"]
        rows.append((source, *cells))
    caption = (
        "The row with the smallest worst shortfall on the tasks of all other sets, and the default; AUROC in %, means "
        "over the columns of the set's tasks, and the worst shortfall there in points."
    )
    heads = ("left out", "chosen on the others", "mean AUROC", "worst", "default", "mean AUROC", "worst")
    return TextTable(caption, heads[: len(rows[0])] if rows else heads, tuple(rows))


def tables_of(table: MethodTable) -> dict[str, TextTable]:
    """The tables of the study, by what they show."""
    shown = {"summary": table.summary(), "by column": table.by_column(), "left out": leave_one_out(table)}
    if " + ".join(DEFAULT) in table.results:
        shown["against the default"] = table.less(" + ".join(DEFAULT))
    return shown


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
        "made with": provenance(), "photographs": used_photographs(setting.data_dir),
    }  # fmt: skip
    files = {
        "metrics.json": json.dumps({"record": record, **comparison.as_dict()}, indent=1),
        "tables.md": in_files(tables_of(comparison).values(), setting),
    }
    for name, text in files.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    main = comparison.of_tasks(tasks(setting))
    draw_worst_against_mean(main, out / "worst-against-mean.svg", " + ".join(DEFAULT))
    return comparison
