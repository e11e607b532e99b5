"""Processes for tests to start and to kill: forked where torch and kedge are imported already, which takes seconds."""

import multiprocessing

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["kedge.cli", "kornia.augmentation", "pytest", "torch._dynamo"])  # the last by torch.optim
