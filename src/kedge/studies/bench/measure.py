"""Images per second of every engine, and its time relative to one unanchored forward pass, as plain data."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kedge.anchoring import Anchored
from kedge.data import ImageSet
from kedge.detectors import Detector
from kedge.errors import FileFormatError
from kedge.io.rebuild import describe
from kedge.provenance import provenance
from kedge.studies.bench.early_exit import EarlyExitEngine, full_share
from kedge.studies.bench.engines import FULL_SHARE, TITLES, UNANCHORED, Prepared, check_engines, prepare_engines
from kedge.studies.bench.memory import check_memory, peak_memory
from kedge.studies.bench.steps import training_steps
from kedge.studies.bench.subjects import SIDE, batches_of, noise_images
from kedge.studies.bench.turns import LEAST, Quartiles, in_turns, ratios

FORMAT = 2
Report = Callable[[str], None]


def time_inference(
    prepared: Prepared,
    batch: int,
    *,
    repeats: int,
    threads: int | None = None,
    share: float = FULL_SHARE,
    engines: Sequence[str] | None = None,
    least: float = LEAST,
    report: Report | None = None,
    clock: Callable[[], float] | None = None,
) -> list[dict[str, Any]]:
    """Time engines on the same random images in turns, a batch at a time; see `in_turns` for ``clock``.

    Returns:
        For each engine ``engine``, ``batch``, ``images_per_second`` and, relative to one unanchored forward pass,
        ``ratio`` with its quartiles ``low`` and ``high`` over the turns; with early exit the actual ``full_share``.
    """
    check_engines(engines)
    wanted = [name for name in prepared.engines if name == UNANCHORED or engines is None or name in engines]
    parts = batches_of(batch, prepared.shape)
    runs = {name: prepared.start(name, threads=threads) for name in wanted}
    shares: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        if isinstance(run, EarlyExitEngine):
            run.set_full_share(torch.cat(parts), share)
            shares[name] = {"full_share": full_share(run.mean_passes(torch.cat(parts)), prepared.passes)}
    calls = {name: (lambda run=run: [run(images) for images in parts]) for name, run in runs.items()}
    note = None if report is None else (lambda name: report(TITLES[name]))
    times = in_turns(calls, repeats=repeats, least=least, report=note, clock=clock)
    rows = []
    for name in runs:
        ratio = ratios(times[name], times[UNANCHORED])
        row = {"engine": name, "batch": batch, "ratio": ratio.median, "low": ratio.low, "high": ratio.high}
        row["images_per_second"] = batch * len(parts) / Quartiles.of(times[name]).median
        rows.append(row | shares.get(name, {}))
    return rows


def measure(
    detector: Detector,
    *,
    name: str,
    batches: Sequence[int] = (1, 32),
    repeats: int = 5,
    engines: Sequence[str] | None = None,
    share: float = FULL_SHARE,
    memory: bool = False,
    training: int = 0,
    least: float = LEAST,
    report: Report | None = None,
    prepared: Prepared | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """Measure a detector's inference and the training of its network; the result is plain data, for JSON.

    Args:
        detector: Calibrated, on a network of kedge's own.
        name: Name of the subject in the record.
        batches: Batch sizes, one measurement each.
        repeats: Turns of each engine.
        engines: Engines to measure; all that can run by default.
        share: See `time_inference`.
        memory: Whether to measure the peak memory of each engine too, in a process of its own.
        training: Cycles of five training steps, of 128 images of 32 x 32 pixels, fewer of more, and at least 8; 0 for
            none. For anchored networks.
        least: Minimum seconds of a turn.
        report: Called with the title of each step of the work after it.
        prepared: The result of `prepare_engines`, if it has been called already.
        clock: See `in_turns`.
    """
    if memory:
        check_memory()
    note, threads = report or (lambda step: None), torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
        files = prepared or prepare_engines(detector, Path(folder), engines=engines, report=note)
        options: dict[str, Any] = {
            "threads": threads,
            "share": share,
            "engines": engines,
            "least": least,
            "clock": clock,
        }
        rows = [
            row for batch in batches for row in time_inference(files, batch, repeats=repeats, report=note, **options)
        ]
        for row in rows if memory else ():
            row["memory"] = peak_memory(files, row["engine"], row["batch"], threads=threads, share=share)
            note(f"memory of {TITLES[row['engine']]}")
    steps = None
    if training and isinstance(detector.net, Anchored):
        batch = max(8, min(128, 128 * SIDE**2 // math.prod(files.shape[1:])))
        images = noise_images(max(512, batch), files.shape, seed=5)
        classes = int(detector.net(images[:1]).shape[1])
        data = ImageSet(images, torch.arange(len(images)) % classes, "random images")
        steps = training_steps(
            detector.net, data, batch=batch, repeats=training, report=lambda kind: note(f"training, {kind}")
        )
    return {
        "kedge bench": FORMAT,
        "name": name,
        "network": {key: describe(detector.net)[key] for key in ("type", "spec")},
        "method": detector.name,
        "passes": files.passes,
        "input": list(files.shape),
        "threads": threads,
        "repeats": repeats,
        "full_share": share,
        "inference": rows,
        "left_out": dict(files.left_out),
        "training": steps,
        "made with": provenance(),
    }


def subject_title(record: Mapping[str, Any]) -> str:
    """The subject of a record, with the size of its images: ``resnet50 at 224 x 224``."""
    return f"{record['name']} at {' x '.join(map(str, record['input'][1:]))}"


def row_title(row: Mapping[str, Any]) -> str:
    """The title of a row; with early exit, with the share of images that took all anchors."""
    return TITLES[row["engine"]] + (f", {row['full_share']:.1%} full" if "full_share" in row else "")


def progress_steps(batches: Sequence[int], repeats: int, *, memory: bool = False, training: int = 0) -> int:
    """The most reports that `measure` makes, if every engine can run."""
    return 11 + len(TITLES) * len(batches) * (repeats + memory) + 2 * training


def check_record(record: Any, where: str) -> dict[str, Any]:
    """A record of `measure`, read from a file; anything else is an error."""
    rows = record.get("inference") if isinstance(record, dict) and record.get("kedge bench") == FORMAT else None
    wanted = {"engine", "batch", "images_per_second", "ratio"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and wanted <= set(row) for row in rows):
        raise FileFormatError(f"{where} must be a bench.json that this version of kedge bench wrote; it is not")
    return dict(record)


def compare_records(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[tuple[str, int], tuple[float, float]]:
    """By engine and batch: images per second over those of an earlier record, and the same for the ratio.

    The first compares two runs as they were; the second, in unanchored forward passes, depends less on the machine.
    """
    old = {(row["engine"], row["batch"]): row for row in then["inference"]}
    return {
        key: (row["images_per_second"] / old[key]["images_per_second"], row["ratio"] / old[key]["ratio"])
        for row in now["inference"]
        if (key := (row["engine"], row["batch"])) in old
    }


def table_of(now: Mapping[str, Any], then: Mapping[str, Any] | None = None) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table of a record, compared with an earlier one if given."""
    heads = ["engine", "batch", "images/s", "unanchored passes", "quartiles"]
    memory = any("memory" in row for row in now["inference"])
    heads += ["peak memory, MB"] if memory else []
    heads += ["images/s, now / then", "passes, now / then"] if then is not None else []
    changes = {} if then is None else compare_records(now, then)
    rows = []
    for row in now["inference"]:
        cells = [row_title(row), str(row["batch"]), f"{row['images_per_second']:,.1f}", f"{row['ratio']:.2f}"]
        cells.append(f"{row['low']:.2f} to {row['high']:.2f}")
        cells += [f"{row['memory'] / 1e6:,.0f}" if "memory" in row else ""] if memory else []
        if then is not None:
            change = changes.get((row["engine"], row["batch"]))
            cells += ["", ""] if change is None else [f"{value:.2f}" for value in change]
        rows.append(cells)
    return heads, rows


def training_words(steps: Mapping[str, Any]) -> str:
    """The result of `training_steps` in a sentence."""
    ratio = steps["ratio"]
    return (
        f"An anchored training step takes {ratio['median']:.2f} times an unanchored one (quartiles {ratio['low']:.2f} "
        f"to {ratio['high']:.2f}), at a batch of {steps['batch']}."
    )
