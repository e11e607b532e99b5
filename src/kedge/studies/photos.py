"""Photographs: methods on a pretrained network's features, in other conditions, and with few images."""

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from kedge.errors import InputError, NotReadyError
from kedge.evaluation.summary import SeedValues, TextTable
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.comparison import MethodTable, Row, interval, run_rows, single_methods
from kedge.studies.default import combined
from kedge.studies.study import Setting
from kedge.studies.tasks import PHOTOS, Loader, Task, photo_task, tasks

FEW = ("msp", "gen", "fdbd", "knn", "mds++", "rmds++", "vim", "mds++ + gen")  # rows that are run with few images
PER_CLASS, HELD_OUT = (5, 10, 20), (50, 100, 200)
Progress = Callable[[str, int, int], None]


def run_photos(
    setting: Setting,
    out: Path,
    features: Path,
    *,
    patterns: tuple[str, ...] = (),
    command: str = "",
    progress: Progress | None = None,
) -> MethodTable:
    """Run what is missing, and write metrics.json and tables.md; arguments as of `run_default`."""
    rows = single_methods() | combined()
    kept = {label: row for label, row in rows.items() if not patterns or any(fnmatchcase(label, p) for p in patterns)}
    if not any(not row.parts for row in kept.values()):
        raise InputError(f"rows must match some single method; got {', '.join(patterns)}; there are {', '.join(rows)}")
    few = {label: row for label, row in kept.items() if label in FEW}
    parts: dict[str, tuple[Mapping[str, Row], Mapping[str, Callable[[int], Task]]]] = {
        "all images": (kept, {name: partial(load, setting, features) for name, load in _tasks(setting).items()})
    }
    if few:
        parts |= {f"{n} a class": (few, _fewer(setting, features, per_class=n)) for n in PER_CLASS}
        parts |= {f"{n} held out": (few, _fewer(setting, features, held_out=n)) for n in HELD_OUT}
    results = {
        what: run_rows(some, loaders, setting.seeds, out / "cells", progress) for what, (some, loaders) in parts.items()
    }
    whole = results["all images"]
    if not whole.columns:
        raise NotReadyError(f"photos needs the data of a task: {'; '.join(whole.missing.values())}")
    tables = (whole.summary(), whole.by_column(), conditions(whole), *([fewer_images(results)] if few else ()))
    record = {"command": command, "scale": setting.scale, "seeds": list(setting.seeds), "made with": provenance()}
    files = {
        "metrics.json": json.dumps(
            {"record": record} | {what: each.as_dict() for what, each in results.items()}, indent=1
        ),
        "tables.md": "\n\n".join(table.markdown() for table in tables) + "\n",
    }
    for name, text in files.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return whole


def conditions(table: MethodTable) -> TextTable:
    """The share of ID test images that each row flags, as they are and in other conditions; means over the tasks."""

    def shares(label: str, key: str) -> list[list[dict[str, float]]]:
        """By task and seed, the results of the test images as they are and in each condition."""
        by_task = table.results[label].values()
        return [[{"as they are": r["id"][key]} | _conditions(r, key) for r in by_seed.values()] for by_seed in by_task]

    def cells(label: str, key: str) -> list[str]:
        by_task = shares(label, key)
        means = [
            SeedValues(tuple(statistics.fmean(seed[each] for seed in seeds) for seeds in zip(*by_task, strict=True)))
            for each in by_task[0][0]
        ]
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
    for label in next(each for what, each in results.items() if what != "all images").results:
        cells = []
        for each in results.values():
            flagged = [r["id"]["flagged"] for by_seed in each.results[label].values() for r in by_seed.values()]
            deviation = f" ± {100 * statistics.stdev(flagged):.1f}" if len(flagged) > 1 else ""
            cells.append(f"{100 * each.mean(label).mean:.1f} / {100 * statistics.fmean(flagged):.1f}{deviation}")
        rows.append((label, *cells))
    caption = "AUROC, mean over columns / share of ID test images flagged at alpha 0.05 and its deviation, in %."
    return TextTable(caption, ("method", *results), tuple(rows))


def _tasks(setting: Setting) -> dict[str, Loader]:
    """The photo tasks with other conditions; toy tasks at the smoke scale."""
    if setting.scale == "smoke":
        return tasks(setting)
    return {name: partial(photo_task, name, shifted=True) for name in PHOTOS}


def _fewer(
    setting: Setting, features: Path, *, per_class: int | None = None, held_out: int | None = None
) -> dict[str, Callable[[int], Task]]:
    """The tasks with few images of a class to train the head and fit on, or few to calibrate on."""

    def load(name: str, seed: int) -> Task:
        if setting.scale == "smoke":
            task = tasks(setting)[name](setting, features, seed)
        else:
            task = photo_task(name, setting, features, seed, per_class=per_class)
        if held_out is not None:
            task = replace(task, held_out=task.held_out.subset(range(min(held_out, len(task.held_out)))))
        what = f"{per_class} a class" if held_out is None else f"{held_out} held out"
        return replace(task, name=f"{name}, {what}")

    return {name: partial(load, name) for name in _tasks(setting)}
