"""Cores that a process may use, threads for them, and the cache that they share."""

import math
import os
from pathlib import Path

import torch

from kedge.checks import at_least

CGROUP = Path("/sys/fs/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cores(cgroup: Path = CGROUP) -> int:
    """The cores that this process may use: those that it is bound to, or fewer where its container has a quota.

    Args:
        cgroup: Where Linux tells of the quota, in either of its versions.

    Example:
        >>> cores() >= 1
        True
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def use_threads(asked: int | None = None) -> int:
    """Set the threads that torch computes with, and return their number.

    More threads than cores wait for each other. torch knows the cores that it is bound to, but no quota.

    Args:
        asked: How many; by default as many as torch would take, but no more than `cores`. The variable OMP_NUM_THREADS
            goes before the default.

    Example:
        >>> use_threads(torch.get_num_threads()) == torch.get_num_threads()
        True
    """
    if asked is not None:
        torch.set_num_threads(at_least("threads", asked, 1))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores()))
    return torch.get_num_threads()


def last_cache(caches: Path = CACHES) -> int | None:
    """Bytes of the last cache before memory, which the cores of a chip share; None where nobody tells.

    Args:
        caches: Where Linux tells of them.

    Example:
        >>> last_cache(Path("/nowhere")) is None
        True
    """
    try:
        sizes = [(path / "size").read_text().strip() for path in caches.glob("index*")]
        return max(int(size.removesuffix("K")) << 10 for size in sizes)
    except (OSError, ValueError):
        return None


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time, of version 2 or 1 of Linux's control groups; None where there is no limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        share = float(quota) / float(period)  # "max" and -1 stand for none
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None
