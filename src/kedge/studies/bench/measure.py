"""Measured: images per second of every engine, and its time beside one plain forward pass, as plain data."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kedge.anchoring import Anchored
from kedge.data import ImageSet
from kedge.detectors import Detector
from kedge.errors import FileFormatError
from kedge.io.rebuild import describe
from kedge.provenance import provenance
from kedge.studies.bench.engines import OPEN, PLAIN, TITLES, Adaptive, Prepared, Run, check_engines, prepare
from kedge.studies.bench.memory import check_memory, peak_memory
from kedge.studies.bench.quality import open_share as share_of
from kedge.studies.bench.steps import training_steps
from kedge.studies.bench.subjects import SIDE, batches_of, noise
from kedge.studies.bench.turns import LEAST, Spread, in_turns, ratios

FORMAT = 1
Report = Callable[[str], None]


def inference(
    prepared: Prepared,
    batch: int,
    *,
    repeats: int,
    threads: int | None = None,
    open_share: float = OPEN,
    engines: Sequence[str] | None = None,
    least: float = LEAST,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Time engines on the same random images in turns, a batch at a time.

    Args:
        prepared: What `prepare` wrote.
        batch: Images at a time.
        repeats: Turns of each engine.
        threads: Of engines that are not torch; by default as many as torch takes.
        open_share: The share of images that two hypotheses leave to all anchors, for the adaptive engine; as near to
            it as the number of images allows.
        engines: Of those that can run; all by default. The plain forward pass always runs.
        least: Seconds of a turn at least.
        report: Called with the title of an engine after each of its turns.

    Returns:
        For each engine ``engine``, ``batch``, ``images_per_second`` and, beside one plain forward pass, ``ratio`` with
        its quartiles ``low`` and ``high`` over the turns; for the adaptive one ``open_share``, as it was.
    """
    check_engines(engines)
    wanted = [name for name in prepared.engines if name == PLAIN or engines is None or name in engines]
    parts = batches_of(batch, prepared.shape)
    runs = {name: prepared.start(name, threads=threads) for name in wanted}
    for run in runs.values():
        if isinstance(run, Adaptive):
            run.leave_open(torch.cat(parts), open_share)
    calls = {name: partial(_through, run, parts) for name, run in runs.items()}
    said = None if report is None else (lambda name: report(TITLES[name]))
    times = in_turns(calls, repeats=repeats, least=least, report=said)
    return [
        {
            "engine": name,
            "batch": batch,
            "images_per_second": batch * len(parts) / Spread.of(times[name]).median,
            **_named(ratios(times[name], times[PLAIN])),
            **_left_open(run, torch.cat(parts), prepared.passes),
        }
        for name, run in runs.items()
    ]


def measure(
    detector: Detector,
    *,
    name: str,
    batches: Sequence[int] = (1, 32),
    repeats: int = 5,
    engines: Sequence[str] | None = None,
    open_share: float = OPEN,
    memory: bool = False,
    training: int = 0,
    training_batch: int | None = None,
    least: float = LEAST,
    report: Report | None = None,
    prepared: Prepared | None = None,
) -> dict[str, Any]:
    """Measure a detector's inference and the training of its network; the result is plain data, for JSON.

    Args:
        detector: Calibrated, on a network of kedge's own.
        name: What to call it.
        batches: Images at a time, one measurement each.
        repeats: Turns of each engine.
        engines: To measure; all that can run by default.
        open_share: See `inference`.
        memory: Whether to measure the peak memory of each engine too, in a process of its own.
        training: Cycles of five training steps; 0 for none. For anchored networks.
        training_batch: Images of a training step; see `step_images`.
        least: Seconds of a turn at least.
        report: Called with what was done after each step of the work.
        prepared: What `prepare` wrote, where it has been called already.
    """
    if memory:
        check_memory()
    said, threads = report or (lambda what: None), torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
        files = prepared or prepare(detector, Path(folder), engines=engines, report=said)
        options: dict[str, Any] = {"threads": threads, "open_share": open_share, "engines": engines, "least": least}
        rows = [row for batch in batches for row in inference(files, batch, repeats=repeats, report=said, **options)]
        for row in rows if memory else ():
            row["memory"] = peak_memory(files, row["engine"], row["batch"], threads=threads, open_share=open_share)
            said(f"memory of {TITLES[row['engine']]}")
    steps = None
    if training and isinstance(detector.net, Anchored):
        batch = training_batch or step_images(files.shape)
        images = noise(max(512, batch), files.shape, seed=5)
        classes = int(detector.net(images[:1]).shape[1])
        data = ImageSet(images, torch.arange(len(images)) % classes, "random images")
        steps = training_steps(
            detector.net, data, batch=batch, repeats=training, report=lambda twin: said(f"training, {twin}")
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
        "open_share": open_share,
        "inference": rows,
        "left_out": dict(files.left_out),
        "training": steps,
        "made with": provenance(),
    }


def step_images(shape: tuple[int, ...]) -> int:
    """The images of a training step: 128 of 32 x 32 pixels, fewer of more, and at least 8.

    Example:
        >>> step_images((3, 32, 32)), step_images((3, 64, 64)), step_images((3, 224, 224))
        (128, 32, 8)
    """
    return max(8, min(128, 128 * SIDE**2 // math.prod(shape[1:])))


def subject_of(record: Mapping[str, Any]) -> str:
    """What a record is of, with the size of its images.

    Example:
        >>> subject_of({"name": "resnet50", "input": [3, 224, 224]})
        'resnet50 at 224 x 224'
    """
    return f"{record['name']} at {' x '.join(map(str, record['input'][1:]))}"


def title_of(row: Mapping[str, Any]) -> str:
    """What a row is of; for the adaptive engine with the share of images that it left open.

    Example:
        >>> title_of({"engine": "auto", "open_share": 0.25})
        'kedge, norms folded, early exit, 25.0% open'
    """
    return TITLES[row["engine"]] + (f", {row['open_share']:.1%} open" if "open_share" in row else "")


def steps_of(batches: Sequence[int], repeats: int, *, memory: bool = False, training: int = 0) -> int:
    """How often `measure` reports, at most: every engine may run.

    Example:
        >>> steps_of([1, 32], 3, training=2)
        93
    """
    turns = len(TITLES) * len(batches)
    return 11 + turns * (repeats + memory) + 2 * training


def check(record: Any, where: str) -> dict[str, Any]:
    """A record that `measure` made, read from a file; anything else is an error that says so.

    Example:
        >>> check({}, "old.json")
        Traceback (most recent call last):
        kedge.errors.FileFormatError: old.json must be what kedge bench wrote; it is not
    """
    rows = record.get("inference") if isinstance(record, dict) and record.get("kedge bench") == FORMAT else None
    wanted = {"engine", "batch", "images_per_second", "ratio"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and wanted <= set(row) for row in rows):
        raise FileFormatError(f"{where} must be what kedge bench wrote; it is not")
    return dict(record)


def against(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[tuple[str, int], tuple[float, float]]:
    """By engine and batch: images per second over those of an earlier record, and the same for the ratio.

    The first compares two runs as they were; the second their times in plain forward passes, which depends less on the
    machine and on what else it did.

    Example:
        >>> row = {"engine": "kedge", "batch": 1, "images_per_second": 20.0, "ratio": 4.0}
        >>> against({"inference": [row]}, {"inference": [row | {"images_per_second": 10.0, "ratio": 5.0}]})
        {('kedge', 1): (2.0, 0.8)}
    """
    old = {(row["engine"], row["batch"]): row for row in then["inference"]}
    return {
        key: (row["images_per_second"] / old[key]["images_per_second"], row["ratio"] / old[key]["ratio"])
        for row in now["inference"]
        if (key := (row["engine"], row["batch"])) in old
    }


def _through(run: Run, parts: Sequence[torch.Tensor]) -> None:
    for images in parts:
        run(images)


def _left_open(run: Run, images: torch.Tensor, passes: int) -> dict[str, float]:
    return {"open_share": share_of(run.mean_passes(images), passes)} if isinstance(run, Adaptive) else {}


def _named(spread: Spread) -> dict[str, float]:
    values = asdict(spread)
    return {"ratio": values["median"], "low": values["low"], "high": values["high"]}
