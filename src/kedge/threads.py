"""Cores, threads, memory and the processor that this process may use, and hooks of one thread."""

import contextlib
import ctypes
import math
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedge.checks import at_least

CGROUP = Path("/sys/fs/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPU = Path("/proc/cpuinfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def cores(cgroup: Path = CGROUP) -> int:
    """Number of cores that this process may use: those it is bound to, or fewer by its container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def use_threads(count: int | None = None) -> int:
    """Set the number of threads of torch, and return it.

    Args:
        count: By default as many as torch would use, but no more than `cores`: torch ignores a container's quota. The
            variable OMP_NUM_THREADS overrides the default.
    """
    import torch  # here, since the command line imports this module for its help

    if count is not None:
        torch.set_num_threads(at_least("threads", count, 1))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores()))
    return torch.get_num_threads()


def memory(cgroup: Path = CGROUP) -> int:
    """Bytes of main memory that this process may use: those of the machine, or fewer by its container's limit."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [8 << 30]
    for path in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            sizes.append(int(path.read_text()))
    return min(sizes)


def last_cache(caches: Path = CACHES) -> int | None:
    """Size of the last-level cache in bytes; None if unknown."""
    try:
        sizes = [(path / "size").read_text().strip() for path in caches.glob("index*")]
        return max(int(size.removesuffix("K")) << 10 for size in sizes)
    except (OSError, ValueError):
        return None


def sums_products_exactly(cpu: Path = CPU) -> bool:
    """Whether the processor sums products of 8-bit integers in 32 bits (VNNI, or ARM's); False if unknown.

    AVX2 adds pairs of such products in 16 bits first, which overflow unless weights have 7 bits.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    try:
        flags = cpu.read_text()
    except OSError:
        return False
    return "avx512_vnni" in flags or "avx_vnni" in flags


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory, up to 2 GiB, for the next layers; return whether it does.

    By default it returns each freed activation to the kernel, which must then clear the pages of the next one. Nothing
    is done off glibc, or if the environment sets a threshold of its allocator.
    """
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    chosen = any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if chosen or not hasattr(libc, "gnu_get_libc_version"):
        return False
    mallopt = libc.mallopt  # type: ignore[union-attr]
    # Before version 2.35, glibc accepts at most 32 MiB.
    accepted = any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 32 << 20))
    return bool(mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)) and accepted


def own_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that acts on passes of the thread that made it, and leaves those of other threads as they are."""
    owner = threading.get_ident()
    return lambda *args, **options: hook(*args, **options) if threading.get_ident() == owner else None


def _quota(cgroup: Path) -> float | None:
    """Cores allowed by version 2 or 1 of Linux's control groups; None if unlimited."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        share = float(quota) / float(period)  # "max" and -1 mean no limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None
