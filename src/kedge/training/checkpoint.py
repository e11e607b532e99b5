"""Checkpoints and the history of a run.

A checkpoint is one file, without pickle, with all that a run needs to resume exactly. All random draws of training
depend on the seed and the step alone, so no state of a generator is saved.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from kedge.checks import finite, needs, shape_of
from kedge.errors import FileFormatError, InputError
from kedge.files import write_text
from kedge.io import artifact
from kedge.io.schema import arguments, check, readable
from kedge.training.recipes import Recipe

# Words of checkpoints before version 3, as keys or values.
RENAMED = {
    "optimiser": "optimizer", "objective": "loss", "settle": "clean_final_fraction", "spread": "per_sample",
    "made": "synthetic_outliers", "made outliers": "synthetic outliers", "grey": "gray", "jigsaw": "patch_shuffle",
    "remix": "hybrid", "recolour": "recolor",
}  # fmt: skip


class CheckpointHeader(TypedDict):
    """The header of a checkpoint."""

    checkpoint: dict[str, Any]
    run: dict[str, Any]
    optimizer: dict[str, dict[str, float]]


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
    names = _names(net, optimizer)
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{names[number]}"] = value
            else:
                scalars.setdefault(names[number], {})[key] = value
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
    with readable(path, "a checkpoint", keep=(InputError,)):
        old, names = header["version"] < artifact.FORMAT_VERSION, _names(net, optimizer)
        if old:
            header, tensors = _upgraded(header, tensors, names)
        check(header, CheckpointHeader, "header")
        _check_run(path, header["run"], run, old)
        position = Position(**arguments(Position, header["checkpoint"], "checkpoint"))
        if min(vars(position).values()) < 0:
            raise FileFormatError(f"checkpoint must hold no negative numbers; got {position}")
        current = net.state_dict()
        weights = artifact.part(tensors, "net.")
        net.load_state_dict({name: _shaped(name, value, current.get(name)) for name, value in weights.items()})
        optimizer.load_state_dict(
            {
                "state": _optimizer_state(artifact.part(tensors, "optimizer."), header["optimizer"], net, names),
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )
        if average is not None:
            saved = artifact.part(tensors, "average.")
            for name, value in average.items():
                value.copy_(finite(name, _shaped(name, saved[name], value), "start anew by resume=False"))
    return position, artifact.part(tensors, "loss.")


def _check_run(path: str | os.PathLike[str], saved: Mapping[str, Any], run: Mapping[str, Any], old: bool) -> None:
    # A recipe of before has the defaults of the fields that were added later.
    defaults = {field.name: field.default for field in fields(Recipe) if field.default is not MISSING}
    before, now = _flat({**saved, "recipe": {**defaults, **saved["recipe"]}}), _flat(run)
    keys = before if old else {**now, **before}  # an older version does not have the settings that came later
    different = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
    ]
    if different:
        raise InputError(
            f"{Path(path).parent} holds a run with other settings ({'; '.join(different)}); pass another directory, or "
            "resume=False to start anew there"
        )


def _optimizer_state(
    tensors: Mapping[str, Tensor], scalars: Mapping[str, Mapping[str, float]], net: nn.Module, names: list[str]
) -> dict[int, dict[str, Any]]:
    numbers = {name: number for number, name in enumerate(names)}
    parameters = dict(net.named_parameters())
    state: dict[int, dict[str, Any]] = {}
    for full_name, value in tensors.items():
        key, name = full_name.split(".", 1)
        # In the parameter's memory layout: another one may round differently in the last bit.
        laid_out = (
            torch.empty_like(parameters[name]).copy_(_shaped(name, value, parameters[name])) if value.ndim else value
        )
        state.setdefault(numbers[name], {})[key] = laid_out
    for name, values in scalars.items():
        state.setdefault(numbers[name], {}).update(values)
    return state


def _shaped(name: str, value: Tensor, like: Tensor | None) -> Tensor:
    if like is None or value.shape != like.shape or value.is_floating_point() != like.is_floating_point():
        raise FileFormatError(f"{name} must have the shape of this network's; got {shape_of(value)} of {value.dtype}")
    return value


class RunHistory:
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
            try:
                written = [json.loads(line) for line in self.path.read_text().splitlines() if line.strip()]
                self.lines = [line for line in written if line["epoch"] <= epochs]
            except (ValueError, KeyError, TypeError) as error:
                raise FileFormatError(f"{self.path} is damaged: {error}; delete it to resume without it") from error

    def add(self, line: dict[str, Any]) -> None:
        """Add the line of an epoch; the file is replaced atomically, so it never ends in half a line."""
        self.lines.append(line)
        if self.path is not None:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.lines))
        if self._writer is not None:
            for name, value in line.items():
                if name != "epoch" and value is not None:
                    self._writer.add_scalar(name, value, line["epoch"])
            self._writer.flush()


def _names(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters in the optimizer's order."""
    named = {id(parameter): name for name, parameter in net.named_parameters()}
    return [named[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _upgraded(
    header: dict[str, Any], tensors: dict[str, Tensor], names: list[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of version 2 in the words and layout of version 3.

    Version 2 numbered the optimizer's values by parameter, and had one layer for [c, x - c], which is now a pair:
    ``layer_c`` for the first half of its inputs and ``layer_x``, with the bias, for the second. ``names`` are those
    of the parameters now, in the optimizer's order.
    """
    run = _renamed(header["run"])
    anchored = run["network"]["anchored"]
    layer = "" if anchored is None else f"network.{anchored['layer']}."
    pairs = f"{layer}layer_c.weight" in names
    before = [name.replace(f"{layer}layer_x.", layer) for name in names if name != f"{layer}layer_c.weight"]
    upgraded: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, number, key = name.split(".")
            name = f"optimizer.{key}.{before[int(number)]}"
        start = name.removesuffix("weight")
        if pairs and name.endswith(f".{layer}weight"):
            of_c, of_x = value.chunk(2, dim=1) if value.ndim > 1 else (value, value)  # Adam's step count is a scalar
            upgraded |= {f"{start}layer_x.weight": of_x.contiguous(), f"{start}layer_c.weight": of_c.contiguous()}
        else:
            upgraded[name.replace(f".{layer}bias", f".{layer}layer_x.bias") if pairs else name] = value
    scalars = {before[int(number)]: values for number, values in header["optimiser"].items()}
    if pairs and f"{layer}weight" in scalars:
        scalars[f"{layer}layer_x.weight"] = scalars[f"{layer}layer_c.weight"] = scalars.pop(f"{layer}weight")
    return {**header, "run": run, "optimizer": scalars}, upgraded


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
