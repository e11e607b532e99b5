"""Checkpoints: everything that training needs to go on as if it had never stopped, in one file without pickle.

Every random draw of training depends on the seed and the step alone, so there is no state of a generator to keep.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import FileFormatError, InputError
from kedge.io import artifact


@dataclass
class Position:
    """How far training has come: whole steps done, and the running sums of the epoch under way."""

    step: int = 0
    loss_sum: float = 0.0
    right: int = 0
    seen: int = 0
    seconds: float = 0.0


def save(
    path: str | os.PathLike[str],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor] | None,
    loss: Mapping[str, Tensor],
    position: Position,
    run: Mapping[str, Any],
) -> None:
    """Write a checkpoint, whole or not at all. ``run`` identifies the run that it belongs to."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    state = optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value
            else:
                scalars.setdefault(str(number), {})[name] = value
    tensors |= {f"average.{name}": value for name, value in (average or {}).items()}
    tensors |= {f"loss.{name}": value for name, value in loss.items()}
    artifact.write(path, {"checkpoint": vars(position), "run": dict(run), "optimizer": scalars}, tensors)


def restore(
    path: str | os.PathLike[str],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: dict[str, Tensor] | None,
    run: Mapping[str, Any],
) -> tuple[Position, dict[str, Tensor]]:
    """Bring network, optimizer and average back to where a checkpoint left them; give the loss's state."""
    header, tensors = artifact.read(path)
    if "checkpoint" not in header:
        raise FileFormatError(f"{path} is a kedge file, but not a checkpoint")
    before, now = _flat(header["run"]), _flat(run)
    different = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in {**now, **before}  # what was a setting of its own may be none now
        if before.get(key) != now.get(key)
    ]
    if different:
        raise InputError(
            f"{Path(path).parent} holds a run with other settings ({'; '.join(different)}); pass another directory, or "
            "resume=False to start anew there"
        )
    net.load_state_dict(artifact.part(tensors, "net."))
    state = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loaded: dict[int, dict[str, Any]] = {}
    for name, value in artifact.part(tensors, "optimizer.").items():
        number, key = name.split(".", 1)
        like = parameters[int(number)]
        # In the parameter's own memory layout: another one may round differently in the last bit.
        kept = torch.empty_like(like).copy_(value) if value.shape == like.shape else value
        loaded.setdefault(int(number), {})[key] = kept
    for number, values in header["optimizer"].items():
        loaded.setdefault(int(number), {}).update(values)
    optimizer.load_state_dict({"state": loaded, "param_groups": state["param_groups"]})
    if average is not None:
        for name, value in artifact.part(tensors, "average.").items():
            average[name].copy_(value)
    return Position(**header["checkpoint"]), artifact.part(tensors, "loss.")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings by one name: recipe.epochs."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
