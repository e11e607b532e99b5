"""What a verdict costs: every engine beside one plain forward pass of the same network, in one run."""

from kedge.studies.bench.engines import OPEN, PLAIN, TITLES, Prepared, check_engines, prepare
from kedge.studies.bench.measure import against, check, inference, measure, steps_of, subject_of, title_of
from kedge.studies.bench.memory import peak_memory
from kedge.studies.bench.quality import open_share, quality
from kedge.studies.bench.steps import training_steps
from kedge.studies.bench.subjects import detector_of

__all__ = [
    "OPEN",
    "PLAIN",
    "TITLES",
    "Prepared",
    "against",
    "check",
    "check_engines",
    "detector_of",
    "inference",
    "measure",
    "open_share",
    "peak_memory",
    "prepare",
    "quality",
    "steps_of",
    "subject_of",
    "title_of",
    "training_steps",
]
