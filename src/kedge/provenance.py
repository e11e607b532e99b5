"""Versions, machine and commit that a result was made with."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")


def provenance() -> dict[str, Any]:
    """Versions of relevant packages, the machine, and kedge's commit if it runs from a checkout, as plain data.

    Example:
        >>> provenance()["torch"] == torch.__version__
        True
    """
    system = f"{platform.system()} {platform.machine()}"
    machine = (system, processor(), f"{os.cpu_count()} cores", f"{torch.get_num_threads()} threads")
    return {
        "kedge": _version("kedge"),
        "commit": _commit(),
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "machine": ", ".join(part for part in machine if part),
    }


def processor(cpuinfo: Path = CPUINFO) -> str:
    """Name of the processor; empty if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that kedge runs from; None for an installed package."""
    here = Path(__file__).resolve()
    root = here.parents[2]
    if not (root / ".git").exists() or here.parent.parent.name != "src":
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
