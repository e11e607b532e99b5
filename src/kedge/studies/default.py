"""Which detector to take by default: every method that reads features, and combinations of them, on all tasks."""

import statistics
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from kedge.checks import one_of
from kedge.detectors.rules import RULES
from kedge.evaluation.summary import TextTable
from kedge.studies.calibration_cost import cost_table, flagged_shares
from kedge.studies.comparison import (
    MethodTable,
    Row,
    by_set,
    draw_worst_against_mean,
    interval,
    matching,
    single_methods,
)
from kedge.studies.feature_run import FeatureRun, Written
from kedge.studies.photo_tasks import PHOTOS, TOGETHER, VARIANTS
from kedge.studies.task import GROUPS
from kedge.studies.tasks import DEPTHS, TASKS, VARIED, tasks

DISTANCES, LOGITS = ("mds++", "rmds++", "knn", "cop"), ("gen", "msp", "energy", "kl_uniform", "fdbd")
DEFAULT = ("mds++", "gen")
DEFAULT_LABEL = " + ".join(DEFAULT)
SHRINKAGES, NEIGHBOURS = (0.01, 0.1, 0.3), (1, 5, 50)  # beside the methods' own choices
TRIPLES = (("mds++", "gen", "fdbd"), ("mds++", "gen", "msp"), ("mds++", "knn", "gen"), ("mds++", "energy", "msp"))
FRONT = ("knn", "mds++", "rmds++", "energy", "msp", "gen")  # rows of the front table beside the default and AMP
# And those whose columns the pages of the studies show.
COLUMNS = (DEFAULT_LABEL, *FRONT, "nnguide", "vim", "fdbd", "react", "kl_uniform")
SHOWN_RULES = (  # rows that the page of the default shows: the best methods, and combinations for each question
    DEFAULT_LABEL,
    *(f"{DEFAULT_LABEL}, {rule}" for rule in ("fisher", "stouffer", "quantiles", "max", "copula", "mahalanobis")),
    *(f"mds++ + {part}" for part in ("msp", "energy", "kl_uniform", "fdbd")),
    *(f"{part} + gen" for part in ("knn", "rmds++", "cop")),
    *(f"mds++ (shrinkage {share}) + gen" for share in SHRINKAGES),
    *(f"knn (k = {k}) + gen" for k in NEIGHBOURS),
    *(" + ".join(parts) for parts in TRIPLES),
    *("knn", "rmds++", "nnguide", "mds++", "energy", "gen"),
)
FAMILIES = {f"cifar10-resnet{depth}": "CIFAR-10" for depth in DEPTHS}
COSTED = "cifar10-resnet20"  # the task with the most images to calibrate on, for `calibration_cost`
COST_ROWS = ("msp", "gen", "mds++", DEFAULT_LABEL)
AMP = "anchored: AMP"  # of the study of heads


def combined() -> dict[str, Row]:
    """The combinations: pairs of a distance and a score of the logits, triples, and other rules for the default."""
    rows = {}
    for parts in (*product(DISTANCES, LOGITS), *TRIPLES):
        rows[" + ".join(parts)] = Row("combined", parts=parts)
    for rule in sorted(set(RULES) - {"sum", "learned"}):
        rows[f"{DEFAULT_LABEL}, {rule}"] = Row("combined", {"rule": rule}, DEFAULT)
    rows[f"{DEFAULT_LABEL}, quantiles"] = Row("combined", {"standardise": "quantiles"}, DEFAULT)
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
        for label in (others.ordered[0], DEFAULT_LABEL):
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
    """The tables of the study, by what they show; private sets have one of their own."""
    public, private = table.public(), by_set(table)
    shown = {"summary": public.summary(), "by column": public.by_column(), "left out": leave_one_out(public)}
    if DEFAULT_LABEL in public.results:
        shown["against the default"] = public.less(DEFAULT_LABEL)
    return shown | ({"by set": private} if private else {})


def tables_of_default(record: Mapping[str, Any]) -> dict[str, TextTable]:
    """The tables of the project's pages, from what metrics.json holds."""
    everything = MethodTable.from_record(record)
    public = everything.public()
    main, varied = public.of_tasks(TASKS), public.of_tasks(VARIED)
    private = by_set(everything.of_tasks(TASKS), COLUMNS)
    return {
        "default": main.summary(SHOWN_RULES),
        "default, all": main.summary(),
        "default by column": main.by_column(COLUMNS),
        "default, variants": varied.summary(SHOWN_RULES),
        "default, variants by column": varied.by_column(COLUMNS),
        "default, left out": leave_one_out(public),
        "default, differences": main.less(DEFAULT_LABEL, COLUMNS + SHOWN_RULES),
        "default, calibration": cost_table(record["calibration"]),
    } | ({"default, private sets": private} if private else {})


def front_table(default: Mapping[str, Any], heads: Mapping[str, Any]) -> TextTable:
    """AUROC by task, near and far, of methods of this study, and of AMP of the study of heads."""
    table = MethodTable.from_record(default).public().of_tasks(TASKS)
    anchored = MethodTable.from_record(heads).public()
    of_row = {
        f"**{DEFAULT_LABEL}** (the default)": (table, DEFAULT_LABEL),
        "**AMP** of an anchored head": (anchored, AMP),
    }
    of_row |= {label: (table, label) for label in FRONT}
    kinds: dict[str, list[str]] = {}
    for task in TASKS:
        kinds.setdefault(FAMILIES.get(task, task), []).append(task)
    best = {column: max(table.value(each, column).mean for each in table.single) for column in table.columns}
    rows = []
    for name, (source, label) in of_row.items():
        found = {column: source.value(label, column).mean for column in table.columns}
        cells = [
            " / ".join(f"{100 * statistics.fmean(found[task, group] for task in tasks):.1f}" for group in GROUPS)
            for tasks in kinds.values()
        ]
        means = [f"{100 * source.mean(label, metric).mean:.1f}" for metric in ("auroc", "fpr95")]
        worst = max(best[column] - value for column, value in found.items())
        rows.append((name, *cells, *means, f"{100 * worst:.1f}"))
    caption = (
        "AUROC in %, near / far, means over seeds (and over both networks of CIFAR-10); means over all columns; the "
        "largest shortfall in AUROC to the best single method of a column, in points."
    )
    return TextTable(caption, ("method", *kinds, "mean AUROC", "FPR95", "worst shortfall"), tuple(rows))


def run_default(run: FeatureRun) -> Written:
    """Run what is missing, and write metrics.json, tables.md and worst-against-mean.svg."""
    smoke = run.setting.scale == "smoke"
    every = tasks(run.setting) if smoke else tasks(run.setting) | VARIED
    if run.only:
        every = {one_of("--tasks", name, tuple(every)): every[name] for name in run.only}
    loaders = {name: partial(load, run.setting, run.features) for name, load in every.items()}
    rows = matching(single_methods() | combined(), run.patterns)
    table = run.rows(rows, loaders)
    if not table.columns:
        return run.write({}, (), table.missing)
    results, shown = table.as_dict(), tables_of(table)
    if (costed := next(iter(every)) if smoke else COSTED) in loaders and costed not in table.missing:
        kept = {label: row for label, row in rows.items() if label in COST_ROWS}
        shares = run.once("calibration", lambda: flagged_shares(kept, loaders[costed], run.setting.seeds))
        results["calibration"], shown["calibration"] = shares, cost_table(shares)
    written = run.write(results, shown.values(), table.missing)
    main = table.public().of_tasks(tasks(run.setting))
    draw_worst_against_mean(main if main.columns else table.public(), run.out / "worst-against-mean.svg", DEFAULT_LABEL)
    return written
