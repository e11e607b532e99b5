"""What a result was made with: versions, machine and commit, as plain data."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Versions of what the numbers depend on, the machine, and kedge's own commit where it runs from a checkout.

    Example:
        >>> provenance()["torch"] == torch.__version__
        True
    """
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return {
        "kedge": _version("kedge"),
        "commit": _commit(),
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores, {threads} threads",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that kedge runs from; None for an installed package."""
    here = Path(__file__).resolve()
    root = here.parents[2]
    if not (root / ".git").exists() or here.parent.parent.name != "src":
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
