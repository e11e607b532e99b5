"""What a verdict costs: every engine beside one plain forward pass of the same network, in one run."""

from kedge.bench.engines import OPEN, PLAIN, TITLES, Prepared, check_engines, prepare
from kedge.bench.measure import against, check, inference, measure, steps_of, subject_of, title_of
from kedge.bench.memory import peak_memory
from kedge.bench.quality import open_share, quality
from kedge.bench.steps import training_steps
from kedge.bench.subjects import detector_of

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
