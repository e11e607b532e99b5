"""Fuzzing of every parser: a seeded corpus, structured damage, and what must hold of each case.

Each case must give a correct result or one of kedge's own errors, within limits of time and memory, and must neither
write outside its folder nor start a program, open a connection or unpickle anything.
"""

from fuzzing import data_files, images, own_files, requests, rows  # noqa: F401 -- they register their targets
from fuzzing.engine import TARGETS, Result, fuzz, fuzz_apart

__all__ = ["TARGETS", "Result", "fuzz", "fuzz_apart"]
