"""Timings: every engine relative to one forward pass of the same network without anchoring.

`engines` writes and starts the engines, `measure` times them, `memory`, `steps` and `quality` measure memory, training
steps and detection quality, `page` draws the result.
"""

from kedge.studies.bench.early_exit import full_share
from kedge.studies.bench.engines import FULL_SHARE, TITLES, UNANCHORED, Prepared, check_engines, prepare_engines
from kedge.studies.bench.measure import (
    check_record,
    compare_records,
    measure,
    progress_steps,
    row_title,
    subject_title,
    time_inference,
)
from kedge.studies.bench.memory import peak_memory
from kedge.studies.bench.quality import quality
from kedge.studies.bench.steps import training_steps
from kedge.studies.bench.subjects import detector_of

__all__ = [
    "FULL_SHARE", "TITLES", "UNANCHORED", "Prepared", "check_engines", "check_record", "compare_records", "detector_of",
    "full_share", "measure", "peak_memory", "prepare_engines", "progress_steps", "quality", "row_title",
    "subject_title", "time_inference", "training_steps",
]  # fmt: skip
