"""Checkpoints and the history of a run.

A checkpoint is one file, without pickle, with all that a run needs to resume exactly. All random draws of training
depend on the seed and the step alone, so no state of a generator is saved.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import needs
from kedge.errors import FileFormatError, InputError
from kedge.files import atomic
from kedge.io import artifact

# Words of checkpoints before version 3, as keys or values.
RENAMED = {
    "optimiser": "optimizer",
    "objective": "loss",
    "settle": "clean_final_fraction",
    "spread": "per_sample",
    "made": "synthetic_outliers",
    "made outliers": "synthetic outliers",
    "grey": "gray",
    "jigsaw": "patch_shuffle",
    "remix": "hybrid",
    "recolour": "recolor",
}


@dataclass
class Position:
    """Progress of a run: steps done, and running sums over the current epoch."""

    step: int = 0
    loss_sum: float = 0.0
    right: int = 0
    seen: int = 0
    seconds: float = 0.0


def save(
    path: str | os.PathLike[str],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Mapping[str, Tensor]],
    position: Position,
    run: Mapping[str, Any],
) -> None:
    """Write a checkpoint atomically. ``state`` holds the tensors of average and loss; ``run`` identifies the run."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    scalars: dict[str, dict[str, Any]] = {}
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value
            else:
                scalars.setdefault(str(number), {})[name] = value
    tensors |= {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}
    artifact.write(path, {"checkpoint": vars(position), "run": dict(run), "optimizer": scalars}, tensors)


def restore(
    path: str | os.PathLike[str],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: dict[str, Tensor] | None,
    run: Mapping[str, Any],
) -> tuple[Position, dict[str, Tensor]]:
    """Load a checkpoint into network, optimizer and average; return the position and the state of the loss."""
    header, tensors = artifact.read(path)
    if "checkpoint" not in header:
        raise FileFormatError(f"{path} is a kedge file, but not a checkpoint")
    old = header["version"] < artifact.FORMAT_VERSION
    if old:
        header, tensors = _upgraded(header, tensors, net, optimizer)
    before, now = _flat(header["run"]), _flat(run)
    keys = before if old else {**now, **before}  # an older version does not know the settings that came later
    different = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
    ]
    if different:
        raise InputError(
            f"{Path(path).parent} holds a run with other settings ({'; '.join(different)}); pass another directory, or "
            "resume=False to start anew there"
        )
    net.load_state_dict(artifact.part(tensors, "net."))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in artifact.part(tensors, "optimizer.").items():
        number, key = name.split(".", 1)
        like = parameters[int(number)]
        # In the parameter's memory layout: another one may round differently in the last bit.
        value = torch.empty_like(like).copy_(value) if value.shape == like.shape else value
        state.setdefault(int(number), {})[key] = value
    for number, values in header["optimizer"].items():
        state.setdefault(int(number), {}).update(values)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if average is not None:
        for name, value in artifact.part(tensors, "average.").items():
            average[name].copy_(value)
    return Position(**header["checkpoint"]), artifact.part(tensors, "loss.")


class History:
    """One line of plain data per epoch, in memory and, with a directory, in ``history.jsonl`` and for TensorBoard."""

    def __init__(self, directory: Path | None, tensorboard: bool = False) -> None:
        self.path = None if directory is None else directory / "history.jsonl"
        self.lines: list[dict[str, Any]] = []
        self._writer: Any = None
        if tensorboard and directory is not None:
            package = needs("torch.utils.tensorboard", "tensorboard", "tensorboard=True")
            self._writer = package.SummaryWriter(str(directory))

    def resume(self, epochs: int) -> None:
        """Read the lines of the epochs that an earlier part of the run finished."""
        if self.path is not None and self.path.exists():
            written = [json.loads(line) for line in self.path.read_text().splitlines() if line.strip()]
            self.lines = [line for line in written if line["epoch"] <= epochs]

    def add(self, line: dict[str, Any]) -> None:
        """Add the line of an epoch; the file is replaced atomically, so it never ends in half a line."""
        self.lines.append(line)
        if self.path is not None:
            with atomic(self.path) as temporary:
                temporary.write_text("".join(json.dumps(entry) + "\n" for entry in self.lines))
        if self._writer is not None:
            for name, value in line.items():
                if name != "epoch" and value is not None:
                    self._writer.add_scalar(name, value, line["epoch"])
            self._writer.flush()


def _upgraded(
    header: dict[str, Any], tensors: dict[str, Tensor], net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of an older version in the words and layout of this one."""
    tensors = {name.replace("optimiser.", "optimizer.", 1): value for name, value in tensors.items()}
    header = {**header, "optimizer": header["optimiser"], "run": _renamed(header["run"])}
    anchored = header["run"]["network"]["anchored"]
    named = {id(p): name for name, p in net.named_parameters()}
    names = [named[id(p)] for group in optimizer.param_groups for p in group["params"]]
    layer = None if anchored is None else f"network.{anchored['layer']}."
    return (header, tensors) if f"{layer}layer_c.weight" not in names else _split(header, tensors, names, str(layer))


def _split(
    header: dict[str, Any], tensors: dict[str, Tensor], names: list[str], layer: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the one layer for [c, x - c] of version 2 into the pair of version 3, in weights, average and optimizer.

    Args:
        header: Its optimizer values are numbered by parameter.
        tensors: Those of the optimizer likewise.
        names: Parameter names in the optimizer's order, now.
        layer: Prefix of the anchored layer's names.
    """
    numbers = {name: number for number, name in enumerate(names)}
    before = [name.replace(f"{layer}layer_x.", layer) for name in names if not name.startswith(f"{layer}layer_c.")]

    def halves(name: str, value: Tensor) -> dict[str, Tensor]:
        if name == f"{layer}bias":
            return {f"{layer}layer_x.bias": value}
        if name != f"{layer}weight":
            return {name: value}
        of_c, of_x = value.chunk(2, dim=1) if value.ndim > 1 else (value, value)  # Adam's step count is a scalar
        return {f"{layer}layer_x.weight": of_x.contiguous(), f"{layer}layer_c.weight": of_c.contiguous()}

    result: dict[str, Tensor] = {}
    for key, value in tensors.items():
        part, name = key.split(".", 1)
        if part == "optimizer":
            number, name = name.split(".", 1)
            parts = halves(before[int(number)], value).items()
            result |= {f"optimizer.{numbers[new]}.{name}": half for new, half in parts}
        else:
            result |= {f"{part}.{new}": half for new, half in halves(name, value).items()}
    scalars = {
        str(numbers[new]): values
        for number, values in header["optimizer"].items()
        for new in halves(before[int(number)], torch.zeros(()))
    }
    return {**header, "optimizer": scalars}, result


def _renamed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {RENAMED.get(key, key): _renamed(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(entry) for entry in value]
    return RENAMED.get(value, value) if isinstance(value, str) else value


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by one name: recipe.epochs."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
