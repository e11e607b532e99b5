"""Photographs: methods on a pretrained network, frozen, fine-tuned or anchored; other conditions, and few images."""

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kedge.checks import one_of
from kedge.detectors.amp import PER_ANCHOR_SCORES
from kedge.evaluation.summary import SeedValues, TextTable
from kedge.studies.comparison import MethodTable, Row, interval, matching, single_methods
from kedge.studies.default import COLUMNS, DEFAULT_LABEL, combined
from kedge.studies.feature_run import FeatureRun, Written
from kedge.studies.judged import LEVEL, corrected
from kedge.studies.photo_tasks import LAYERS, PHOTOS, Variant, finetuned_task, photo_task
from kedge.studies.study import Setting
from kedge.studies.task import GROUPS, Task
from kedge.studies.tasks import TOYS, toy_task

ANCHORED = {  # rows of networks that are anchored before they are fine-tuned
    **{name: Row(name) for name in ("msp", "max_logit", "energy", "kl_uniform", "gen", "knn", "mds++")},
    "mds++ + gen": Row("combined", parts=("mds++", "gen")),
    "mds++ + gen + AMP": Row("combined", parts=("mds++", "gen", "amp")),
    "AMP": Row("amp"),
    "AMP, tau relative": Row("amp", {"tau": "relative"}),
    **{reading.replace("_", " "): Row("amp", {"score": reading}) for reading in PER_ANCHOR_SCORES},
}
FROZEN, FINETUNED = "frozen", "fine-tuned"
# Rows that are run with few images; ViM needs more of them than the features have dimensions.
FEW = ("msp", "energy", "gen", "fdbd", "knn", "mds++", "rmds++", "mds++ + gen")
# Tables of the project's pages, and the rows that they show; none for all.
SHOWN: dict[str, Collection[str]] = {
    FROZEN: (),
    f"{FROZEN}, by column": COLUMNS,
    f"{FROZEN}, conditions": ("accuracy", *COLUMNS),
    FINETUNED: (),
    f"{FINETUNED}, conditions": ("accuracy", *COLUMNS),
    "anchored": (),
    "few images": (),
}
PER_CLASS, HELD_OUT = (5, 10, 20), (50, 100, 200)
Loaders = Mapping[str, Callable[[int], Task]]


def run_photos(run: FeatureRun) -> Written:
    """Run what is missing, and write metrics.json and tables.md.

    `FeatureRun.only` names parts of the study, such as ``frozen`` or ``first layer``.
    """
    setting, features = run.setting, run.features
    kept = matching(single_methods() | combined(), run.patterns)
    few = {label: row for label, row in kept.items() if label in FEW}
    anchored = {label: row for label, row in ANCHORED.items() if label in kept or "AMP" in label or row.method == "amp"}
    parts: dict[str, tuple[Mapping[str, Row], Loaders]] = {FROZEN: (kept, _loaders(setting, features, shifted=True))}
    if few:
        parts |= {f"{n} a class": (few, _fewer(setting, features, per_class=n)) for n in PER_CLASS}
        parts |= {f"{n} held out": (few, _fewer(setting, features, held_out=n)) for n in HELD_OUT}
    parts[FINETUNED] = kept, _loaders(setting, features, layer="", shifted=True)  # these train for hours, so come last
    parts |= {layer: (anchored, _loaders(setting, features, layer=layer)) for layer in LAYERS}
    if run.only:
        parts = {one_of("--tasks", what, tuple(parts)): parts[what] for what in run.only}
    results: dict[str, MethodTable] = {}
    missing: dict[str, str] = {}
    for what, (some, loaders) in parts.items():
        results[what] = run.rows(some, loaders)
        missing |= results[what].missing
        records = {name: each.as_dict() for name, each in results.items() if each.columns}
        shown = tuple(tables(results).values()) if records else ()
        written = run.write(records, shown, missing)  # what is done, while more is run
    return written


def tables(results: Mapping[str, MethodTable]) -> dict[str, TextTable]:
    """The tables of the study, by what they show; of the parts that are there."""
    shown = {}
    for network in (FROZEN, FINETUNED):
        if network in results:
            shown[network] = results[network].summary()
            shown[f"{network}, by column"] = results[network].by_column()
            shown[f"{network}, conditions"] = conditions(results[network])
    if not results.keys().isdisjoint(LAYERS):
        shown["anchored"] = by_layer(results)
    few = {what: each for what, each in results.items() if what not in (FINETUNED, *LAYERS)}
    if len(few) > 1:
        shown["few images"] = fewer_images(few)
    return shown


def tables_of_photos(record: Mapping[str, Any]) -> dict[str, TextTable]:
    """The tables of the project's pages, from what metrics.json holds."""
    results = {name: MethodTable.from_record(each) for name, each in record.items() if name != "record"}
    found = tables(results)
    shown = {
        f"photos, {what}": replace(
            found[what], rows=tuple(row for row in found[what].rows if not only or row[0] in only)
        )
        for what, only in SHOWN.items()
    }
    return shown | {"photos, judged": comparisons(results)}


def comparisons(results: Mapping[str, MethodTable]) -> TextTable:
    """The default against all single methods, of which some are shown, and anchored networks against others."""
    pairs: dict[tuple[str, str], tuple[SeedValues, SeedValues]] = {}
    for what in (each for each in (FROZEN, FINETUNED) if each in results):
        ours = results[what].mean(DEFAULT_LABEL)
        pairs |= {(f"{what}: {DEFAULT_LABEL}", each): (ours, results[what].mean(each)) for each in results[what].single}
    for layer in (each for each in LAYERS if each in results):
        for label, other in (
            ("AMP", "kl_uniform"),
            (DEFAULT_LABEL, DEFAULT_LABEL),
            (f"{DEFAULT_LABEL} + AMP", DEFAULT_LABEL),
        ):
            ours, theirs = results[layer].mean(label), results[FINETUNED].mean(other)
            pairs[f"{layer}: {label}", f"{FINETUNED}: {other}"] = ours, theirs
    table = corrected(pairs, "AUROC, mean over columns")
    rows = tuple(row for row in table.rows if row[-1] == "no" or ": " in row[1] or row[1] in COLUMNS)
    caption = f"{table.caption} All comparisons with p above {LEVEL} are shown, and some of the others."
    return TextTable(caption, table.heads, rows)


def by_layer(results: Mapping[str, MethodTable]) -> TextTable:
    """AUROC / FPR95, means over near and over far columns, and AURC, of fine-tuned networks by the layer anchored."""
    rows = []
    for layer in (each for each in (FINETUNED, *LAYERS) if each in results):
        table = results[layer]
        accuracy = interval(_on_known(table, next(iter(table.results)), "accuracy"))
        for label in (label for label in table.results if label in ANCHORED):
            cells = [table.words(label, columns) for columns in table.by_group.values()]
            rows.append((layer, accuracy, label, *cells, interval(_on_known(table, label, "aurc"), 2)))
    caption = (
        "AUROC / FPR95 in %, means over tasks; accuracy and AURC on ID test images, in %; with half the width of 95 % "
        "intervals over seeds."
    )
    return TextTable(caption, ("anchored", "accuracy", "method", *GROUPS, "AURC"), tuple(rows))


def _on_known(table: MethodTable, label: str, key: str) -> SeedValues:
    """A metric on the ID test images by seed, means over tasks."""
    by_task = table.results[label].values()
    return SeedValues.averaged([each["id"][key] for each in by_seed.values()] for by_seed in by_task)


def conditions(table: MethodTable) -> TextTable:
    """The share of ID test images that each row flags, as they are and in other conditions; means over the tasks."""

    def shares(label: str, key: str) -> list[list[dict[str, float]]]:
        """By task and seed, the results of the test images as they are and in each condition."""
        by_task = table.results[label].values()
        return [[{"as they are": r["id"][key]} | _conditions(r, key) for r in by_seed.values()] for by_seed in by_task]

    def cells(label: str, key: str) -> list[str]:
        by_task = shares(label, key)
        means = (SeedValues.averaged([seed[each] for seed in seeds] for seeds in by_task) for each in by_task[0][0])
        return [interval(values) for values in means]

    first = next(iter(table.results))
    rows = [("accuracy", *cells(first, "accuracy")), *((label, *cells(label, "flagged")) for label in table.ordered)]
    caption = (
        "Share of ID test images that are flagged at alpha 0.05, and the classifier's accuracy, in %; means over tasks."
    )
    return TextTable(caption, ("method", *shares(first, "flagged")[0][0]), tuple(rows))


def _conditions(result: Mapping[str, Any], key: str) -> dict[str, float]:
    return {name.rpartition(", ")[2]: values[key] for name, values in result.get("shifted", {}).items()}


def fewer_images(results: Mapping[str, MethodTable]) -> TextTable:
    """Mean AUROC over the columns, and the share of ID images flagged, with few images to fit or calibrate on."""
    rows = []
    for label in next(each for what, each in results.items() if what != FROZEN).results:
        cells = []
        for each in results.values():
            flagged = [r["id"]["flagged"] for by_seed in each.results[label].values() for r in by_seed.values()]
            deviation = f" ± {100 * statistics.stdev(flagged):.1f}" if len(flagged) > 1 else ""
            cells.append(f"{100 * each.mean(label).mean:.1f} / {100 * statistics.fmean(flagged):.1f}{deviation}")
        rows.append((label, *cells))
    caption = "AUROC, mean over columns / share of ID test images flagged at alpha 0.05 and its deviation, in %."
    return TextTable(caption, ("method", *results), tuple(rows))


def _loaders(setting: Setting, features: Path, *, layer: str | None = None, shifted: bool = False) -> Loaders:
    """The photo tasks, on frozen features or fine-tuned; toy tasks at the smoke scale."""
    if setting.scale == "smoke":
        what = FROZEN if layer is None else layer or FINETUNED
        return {name: partial(toy_task, f"{name}, {what}", setting, features, anchored=bool(layer)) for name in TOYS}
    load: Any = photo_task if layer is None else partial(finetuned_task, layer=layer)
    return {name: partial(load, name, setting, features, shifted=shifted) for name in PHOTOS}


def _fewer(setting: Setting, features: Path, *, per_class: int | None = None, held_out: int | None = None) -> Loaders:
    """The tasks with few images of a class to train the head and fit on, or few to calibrate on."""
    what = f"{per_class} a class" if held_out is None else f"{held_out} held out"

    def load(name: str, seed: int) -> Task:
        title = f"{name}, {what}"
        if setting.scale == "smoke":
            task = replace(TOYS[name](setting, features, seed), name=title)
        else:
            task = photo_task(name, setting, features, seed, variant=Variant(per_class=per_class), title=title)
        if held_out is not None:
            task = replace(task, held_out=task.held_out.subset(range(min(held_out, len(task.held_out)))))
        return task

    return {name: partial(load, name) for name in (TOYS if setting.scale == "smoke" else PHOTOS)}
