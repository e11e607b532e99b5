"""Scoring any number of images into files of rows: each image exactly once, also if the job is killed and resumed."""

from kedge.scoring.inputs import Shard, plan
from kedge.scoring.job import Job, score_files
from kedge.scoring.ray_engine import RayEngine
from kedge.scoring.rows import FORMATS, read_rows
from kedge.scoring.summary import RowSummary, summarize_rows

__all__ = ["FORMATS", "Job", "RayEngine", "RowSummary", "Shard", "plan", "read_rows", "score_files", "summarize_rows"]
