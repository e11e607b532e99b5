"""Processes for tests to start and to kill: forked where torch and kedge are imported already, which takes seconds."""

import multiprocessing
import signal

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["kedge.cli", "kornia.augmentation", "pytest", "torch._dynamo"])  # the last by torch.optim


def die_in(seconds: float) -> None:
    """End this process as a kill would, a moment after the first call; no busy machine makes the moment longer."""
    if not signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
