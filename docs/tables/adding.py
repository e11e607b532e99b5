"""What `python docs/tables --add` writes to docs/results."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.studies import STUDIES
from kedge.studies.default import DEFAULT_LABEL
from kedge.studies.sets import PRIVATE
from kedge.studies.study import Setting

LEVELS = "accuracy by level of blur"  # by network
BY_PART = ("photos", "cifar10-trained")  # studies with results by part, of which a run may have some, by --tasks


def to_add(study: str, path: Path, known: Mapping[str, Any]) -> str:
    """The text of a file of docs/results with the rows of a run."""
    found = json.loads(path.read_text())
    if study in STUDIES:
        (suite,) = STUDIES[study](Setting("small")).suites
        return json.dumps(added(known, found, list(suite.methods)), indent=1)
    shortened = rounded({"photos": of_rows, "default": by_group}.get(study, dict)(found))
    if study in BY_PART:
        shortened = with_parts(known, shortened)
    elif study == "default":
        shortened = with_tasks(known, shortened)
    elif study == "imagenet":
        shortened = with_rows(known, shortened)
    return json.dumps(shortened, separators=(",", ":"))


def added(known: Mapping[str, Any], found: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Results with the rows of another run on the same images, in the order of the study; the run's rows count."""

    def rows(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        both = {**ours, **theirs}
        return {label: both[label] for label in sorted(both, key=list(order).index)}

    seeds = {}
    for seed, ours in known["seeds"].items():
        theirs = found["seeds"].get(seed)
        if theirs is None or theirs["sets"] != ours["sets"]:
            raise SystemExit(f"the run must have all seeds of the results, and the same images; seed {seed} differs")
        seeds[seed] = {**ours, "results": rows(ours["results"], theirs["results"])}
    trainings = {**known["record"]["trainings"], **found["record"]["trainings"]}
    hours = sum(each["seconds"] or 0.0 for each in trainings.values()) / 3600
    # The command stays that of the whole; each training says where and with what it was made.
    record = {**known["record"], "training hours": round(hours, 2), "trainings": trainings}
    return {"record": record, "seeds": seeds, "summary": rows(known["summary"], found["summary"])}


def with_parts(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the parts of another run in place of their own; other seeds of the same rows stay."""
    record = added_to(known["record"], found["record"], found.keys() - {"record"})
    parts = {name: with_seeds(known.get(name, {}), part) for name, part in found.items() if name != "record"}
    return {**known, **parts, "record": record}


def with_seeds(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a run, with the other seeds of the same rows on the same tasks."""
    rows, others = found["results"], known.get("results", {})
    if {label: set(tasks) for label, tasks in rows.items()} != {label: set(tasks) for label, tasks in others.items()}:
        return dict(found)
    results = {
        label: {task: dict(sorted({**others[label][task], **seeds}.items())) for task, seeds in tasks.items()}
        for label, tasks in rows.items()
    }
    return {**found, "results": results}


def with_tasks(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the tasks of another run of all rows in place of their own; those of a whole run as they are."""
    tasks, every = (set(next(iter(each["results"].values()))) for each in (found, known))
    if tasks >= every:
        return dict(found)
    results = {label: {**by_task, **found["results"][label]} for label, by_task in known["results"].items()}
    return {**known, "results": results, "record": added_to(known["record"], found["record"], tasks)}


def with_rows(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Results of ImageNet's classes with the networks of another run."""
    tables = {key: {**known[key], **found[key]} for key in ("results", "bootstrap", LEVELS)}
    record = added_to(known["record"], found["record"], found[LEVELS])
    return {"record": record, "single": list(dict.fromkeys([*known["single"], *found["single"]])), **tables}


def added_to(known: Mapping[str, Any], run: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """A record that says how the parts of another run were made."""
    made = {part: {key: run[key] for key in ("command", "seeds", "made with")} for part in sorted(parts)}
    return {**known, "added": {**known.get("added", {}), **made}}


def rounded(value: Any) -> Any:
    """Plain data with numbers to four decimals, without the summaries that follow from the rest."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items() if key != "summary"}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def of_rows(known: Mapping[str, Any]) -> dict[str, Any]:
    """The results of photographs without combinations other than the default, which has a page of its own."""

    def kept(part: Mapping[str, Any]) -> dict[str, Any]:
        return {**part, "results": {label: each for label, each in part["results"].items() if shown(label)}}

    def shown(label: str) -> bool:
        return " + " not in label or label in (DEFAULT_LABEL, f"{DEFAULT_LABEL} + AMP")

    return {what: part if what == "record" else kept(part) for what, part in known.items()}


def by_group(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results of a study on many tasks with the mean over a group in place of its sets, but where some are private."""

    def short(result: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in result.items() if key not in ("shifted", "images") and value}
        if any(name in PRIVATE for name in result["sets"]):
            return kept
        sets = {
            group: {
                metric: statistics.fmean(result["sets"][name][metric] for name in names)
                for metric in result["sets"][names[0]]
            }
            for group, names in result["groups"].items()
        }
        return {**kept, "sets": sets, "groups": {group: [group] for group in sets}}

    results = {
        label: {task: {seed: short(result) for seed, result in by_seed.items()} for task, by_seed in by_task.items()}
        for label, by_task in found["results"].items()
    }
    return {**found, "results": results}
