"""Scoring of images in any number: rows in files, each image exactly once, whatever happens on the way."""

from kedge.scoring.inputs import Shard, plan
from kedge.scoring.job import Job, score_files
from kedge.scoring.ray_engine import RayEngine
from kedge.scoring.rows import FORMATS, read_rows
from kedge.scoring.summary import Summary, summarise

__all__ = ["FORMATS", "Job", "RayEngine", "Shard", "Summary", "plan", "read_rows", "score_files", "summarise"]
