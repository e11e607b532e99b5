"""Where a training step runs: in one process, or on several devices and machines through Lightning Fabric."""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from kedge.checks import needs
from kedge.errors import InputError


class Engine:
    """One process, on one device; with a Fabric, its devices and precision."""

    device: str | None = None  # None leaves the network where it is
    rank = 0
    world = 1
    fabric: Any = None

    def place(self, net: nn.Module) -> None:
        """Move a network to the device; the best one, if it is to be chosen, takes networks from the CPU alone."""
        values = (*net.parameters(), *net.buffers())
        if self.fabric is not None:
            net.to(self.fabric.device)
        elif self.device == "cpu" or (self.device and all(value.device.type == "cpu" for value in values)):
            net.to(self.device)

    def setup(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the module to call and the optimizer to step."""
        module, stepper = (net, optimizer) if self.fabric is None else self.fabric.setup(net, optimizer)
        return module, stepper

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, averaged over processes."""
        loss.backward() if self.fabric is None else self.fabric.backward(loss)

    def total(self, values: Tensor) -> Tensor:
        """Sum of a vector over all processes."""
        return values if self.fabric is None else cast(Tensor, self.fabric.all_reduce(values, reduce_op="sum"))

    def wait(self) -> None:
        """Wait for all processes."""
        if self.fabric is not None:
            self.fabric.barrier()


def make_engine(devices: int, nodes: int, accelerator: str, precision: str | None) -> Engine:
    """The engine for these options, without Fabric if possible; torchrun's variables set the number of processes."""
    if "LOCAL_WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = max(1, int(os.environ["WORLD_SIZE"]) // devices)
    if devices < 1 or nodes < 1:
        raise InputError(f"devices and nodes must be at least 1, got {devices} and {nodes}")
    engine = Engine()
    if devices == nodes == 1 and precision is None and accelerator in ("auto", "cpu"):
        best = "cuda" if torch.cuda.is_available() else None
        engine.device = best if accelerator == "auto" else "cpu"
        return engine
    package = needs("lightning_fabric", "fabric", "training on several devices or in another precision")
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    strategy = "ddp" if devices * nodes > 1 else "auto"
    try:
        engine.fabric = package.Fabric(
            accelerator=accelerator, devices=devices, num_nodes=nodes, strategy=strategy, precision=precision
        )
    except (ImportError, RuntimeError, TypeError, ValueError, MisconfigurationException) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            "accelerator, devices and precision must be available to Fabric on this machine; got "
            f"{accelerator!r}, {devices} and {precision!r}: {reason}"
        ) from error
    engine.fabric.launch()
    engine.rank, engine.world = engine.fabric.global_rank, engine.fabric.world_size
    return engine


@contextlib.contextmanager
def locked(directory: Path | None, engine: Engine) -> Iterator[None]:
    """Keep other runs out of a directory, however this one ends; the processes of one run share it."""
    refusal = None
    with contextlib.ExitStack() as stack:
        if directory is not None and engine.rank == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(directory / ".lock", timeout=0))
                owner = directory / ".lock.owner"
                owner.write_text(f"pid {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%F %T} UTC")
                stack.callback(owner.unlink, missing_ok=True)
            except Timeout:
                holder = "which has just begun"
                with contextlib.suppress(OSError):
                    holder = (directory / ".lock.owner").read_text()
                refusal = f"another run ({holder}) trains in {directory}; wait for it, or choose another directory"
            except OSError as error:
                refusal = f"directory must be writable; {directory} is not: {error.strerror or error}"
        if float(engine.total(torch.tensor([float(refusal is not None)]))):  # all processes of this run stop
            raise InputError(refusal or f"the first process could not lock {directory}")
        yield


def in_parallel() -> bool:
    """Whether this process is one of several that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_first_process() -> bool:
    """Whether this process writes the files: True except in all but one process of a parallel training."""
    return not in_parallel() or torch.distributed.get_rank() == 0
