"""Tables of benchmarks: times of engines and services, and what faster engines cost in quality."""

import statistics
from collections.abc import Mapping
from typing import Any

from suites import markdown

from kedge.studies.bench import TITLES


def times(known: Mapping[str, Any]) -> str:
    """Time in unanchored passes, with quartiles, by network, engine and batch; and the memory at the largest batch."""
    batches, memory = known["options"]["batches"], known["options"]["memory"]
    lines = []
    for record in known["networks"]:
        by: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in record["inference"]:
            by.setdefault(row["engine"], {})[row["batch"]] = row
        for engine, of in by.items():
            cells = [f"{of[b]['ratio']:.2f} ({of[b]['low']:.2f} to {of[b]['high']:.2f})" for b in batches]
            cells += [f"{of[batches[-1]]['memory'] / 1e6:.0f}"] if memory else []
            lines.append([record["name"], TITLES[engine], *cells])
    heads = [*(f"batch {b}" for b in batches), *([f"MB at {batches[-1]}"] if memory else [])]
    return markdown(["network", "engine", *heads], lines)


def verdicts(known: Mapping[str, Any]) -> str:
    """Time of the default detector's engines in plain passes, with quartiles, by network and batch."""
    columns = list(dict.fromkeys((row["subject"], row["batch"]) for row in known["verdicts"]))
    by: dict[str, dict[tuple[str, int], str]] = {}
    for row in known["verdicts"]:
        cell = f"{row['median']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        by.setdefault(row["engine"], {})[row["subject"], row["batch"]] = cell
    heads = ["engine", *(f"{subject}, batch {batch}" for subject, batch in columns)]
    return markdown(heads, [[engine, *(of.get(each, "") for each in columns)] for engine, of in by.items()])


def eight_bits(known: Mapping[str, Any]) -> str:
    """What 8 bits keep of the default detector's labels and of its AUROC on each set."""
    quality = known["quality"]
    sets = list(quality["exact"])
    rows = []
    for engine, of in quality.items():
        if engine.endswith("int8"):
            points = [f"{of['points'][name]:+.2f}" for name in sets]
            rows.append([engine, f"{100 * of['labels']:.1f}", *points])
    exact = [f"{quality['exact'][name]:.2f}" for name in sets]
    heads = ["engine", "labels kept, %", *(f"AUROC, {name}" for name in sets)]
    return markdown(heads, [["exact", "100.0", *exact], *rows])


def waiting(known: Mapping[str, Any]) -> str:
    """The share of time in which the network waits for photographs, by how they are read."""
    rows = [
        [name, f"{100 * statistics.median(of):.1f} ({100 * min(of):.1f} to {100 * max(of):.1f})"]
        for name, of in known["waiting"].items()
    ]
    return markdown(["read by", "time in which the network waits, %"], rows)


def requests(known: Mapping[str, Any]) -> str:
    """The service with photographs uploaded, beside the bare detector and scripts."""
    names = ("engine", "in pairs", "decoding in pairs")
    rows = []
    for level in known["levels"]:
        cells = [f"{level[f'service / {name}']:.2f}" for name in names]
        memory = " to ".join(f"{each / 1e6:.0f}" for each in level["memory"])
        times = [f"{1000 * level['p50']:.0f}", f"{1000 * level['p99']:.0f}"]
        rows.append([str(level["clients"]), f"{level['service']:.0f}", *cells, *times, memory, str(level["errors"])])
    heads = [f"service / {name}" for name in names]
    return markdown(["clients", "images/s", *heads, "p50, ms", "p99, ms", "MB", "errors"], rows)


def neighbours(known: Mapping[str, Any]) -> str:
    """What a query of a large bank costs by exact scan and by index."""
    rows = []
    for of in known["banks"]:
        spans = [of["ratios"][way] for way in ("exact scan", "index")]
        cells = [f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for each in spans]
        cells += [f"{of['index']['probes']:,} of {of['index']['cells']:,}", f"{of['index']['count']:,}"]
        cells += [f"{of['seconds']['build']:.0f}", f"{of['MB']['bank']:,.0f} + {of['MB']['index']:,.0f}"]
        rows.append([of["method"], f"{of['rows']:,}", *cells])
    heads = ["method", "rows", "exact scan / pass", "index / pass", "cells", "candidates", "built in, s"]
    return markdown([*heads, "MB of bank + index"], rows)


def neighbours_found(known: Mapping[str, Any]) -> str:
    """The recall of the index by kind of image, and AUROC with the exact scan and with the index."""
    rows = []
    for of in known["banks"]:
        for kind, recall in of["recall"].items():
            areas = [
                f"{of[f'auroc {way}'][kind]:.2f}" if kind in of["auroc exact"] else "" for way in ("exact", "index")
            ]
            rows.append([of["method"], f"{of['rows']:,}", kind, f"{100 * recall:.1f}", *areas])
    return markdown(["method", "rows", "images", "recall, %", "AUROC, exact", "AUROC, index"], rows)


def start(known: Mapping[str, Any]) -> str:
    """Times of fresh processes over that of ``import torch`` in the same round."""
    return markdown(
        ["process", "/ import torch"], [[name, f"{row['of torch']:.2f}"] for name, row in known["rows"].items()]
    )


def exits_early(known: Mapping[str, Any]) -> str:
    """The share of photographs that exit early, and early exit beside all anchors: means over seeds and sets."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in known["rows"]:
        groups.setdefault((row["subject"], row["group"]), []).append(row)
    lines = []
    for (subject, group), rows in groups.items():
        exits = [100 * row["exits"] for row in rows]
        mean = {key: statistics.fmean(row[key] for row in rows) for key in ("passes", "agreement")}
        cells = [subject, group, f"{statistics.fmean(exits):.1f} ({min(exits):.1f} to {max(exits):.1f})"]
        cells += [f"{mean['passes']:.2f}", f"{100 * mean['agreement']:.1f}"]
        for key, digits in (("flagged", 1), ("auroc", 2)):
            both = [[row[f"{key}_{how}"] for row in rows] for how in ("early", "exact")]
            cells.append(" / ".join(f"{100 * statistics.fmean(each):.{digits}f}" for each in both if None not in each))
        lines.append(cells)
    heads = ["task", "images", "exit early, %", "passes", "same labels, %", "flagged, %, early / exact"]
    return markdown([*heads, "AUROC, %, early / exact"], lines)


def cost_in_quality(known: Mapping[str, Any]) -> str:
    """Labels, AUROC and FPR95 of every engine beside the exact one: means over all sets, and the set that lost most."""
    lines = []
    for engine, of in known["quality"].items():
        test = next(name for name in of["flagged"] if name not in of["auroc"])
        area, rate = of["auroc_points"].values(), of["fpr95_points"].values()
        cells = [f"{100 * of['agreement']:.1f}", f"{100 * of['flagged'][test]:.1f}"]
        cells.append(f"{of['passes'][test]:.2f}" if of["passes"] else "")
        cells += [
            f"{statistics.fmean(area):+.2f} ({min(area):+.2f})",
            f"{statistics.fmean(rate):+.2f} ({max(rate):+.2f})",
        ]
        lines.append([TITLES[engine], *cells])
    heads = [
        "engine",
        "same labels, %",
        "flagged, %",
        "passes",
        "AUROC, points (worst set)",
        "FPR95, points (worst set)",
    ]
    return markdown(heads, lines)


def heads_cost(known: Mapping[str, Any]) -> str:
    """Time of an anchored head and its network in plain passes, by batch and number of anchors."""
    rows = []
    for row in known["rows"]:
        ratios = f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"
        rows.append([str(row["batch"]), str(row["anchors"]), f"{row['by operations']:.3f}", *ratios])
    return markdown(["images at a time", "anchors", "passes by operations", "in time", "quartiles"], rows)


def dry_runs(known: Mapping[str, Any]) -> str:
    """Hours, memory and disk of every study at the full scale, by known set, for one seed."""
    rows = []
    for name, of in known["suites"].items():
        if "error" in of:
            rows.append([name, of["error"], "", "", "", ""])
            continue
        hours = [f"{of[each]:,.1f}" for each in ("training hours", "scoring hours")]
        rows.append([name, str(of["trainings"]), *hours, f"{of['memory']:,.1f}", f"{of['disk']:,.1f}"])
    heads = ["study", "trainings", "hours of training", "of scoring", "GB of memory", "GB of disk"]
    return markdown(heads, rows)
