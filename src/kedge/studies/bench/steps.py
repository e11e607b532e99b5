"""The time of an anchored training step relative to an unanchored one, and its share outside the network."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.data import ImageSet
from kedge.models.classifier import Classifier
from kedge.studies.bench.plain import without_anchors
from kedge.studies.bench.turns import Quartiles, ratios
from kedge.training import Recipe
from kedge.training.api import prepare
from kedge.training.engine import Engine
from kedge.training.loader import make_loader
from kedge.training.losses import CrossEntropy
from kedge.training.trainer import Trainer

CYCLE = 5  # steps: by default one of them has corrupted anchors; with per_sample=True each has some


class TimedEngine(Engine):
    """Adds up the time spent in the network and the optimizer."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def setup(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Time every forward pass and every step."""
        for owner, name in ((net, "forward"), (optimizer, "step")):
            setattr(owner, name, self._timed(getattr(owner, name)))
        return net, optimizer

    def backward(self, loss: Tensor) -> None:
        """Time the backward pass."""
        self._timed(loss.backward)()

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **options)
            self.seconds += time.perf_counter() - started
            return result

        return timed


class Stepper:
    """A training that runs one cycle of steps at a time, in place."""

    def __init__(self, net: Classifier, data: ImageSet, recipe: Recipe) -> None:
        self.engine = TimedEngine()
        self._cycles = self._run(net, data, recipe)

    def cycle(self) -> tuple[float, float]:
        """Seconds of a step, and of its part in the network and the optimizer."""
        inside, started = self.engine.seconds, time.perf_counter()
        next(self._cycles)
        return (time.perf_counter() - started) / CYCLE, (self.engine.seconds - inside) / CYCLE

    def _run(self, net: Classifier, data: ImageSet, recipe: Recipe) -> Iterator[None]:
        feed = make_loader(data, recipe, 0, rank=0, world=1, workers=0, preprocess=None)
        prepare(net, data, feed, None, 0)
        run = Trainer(net, data, feed, None, CrossEntropy(), recipe, 0, self.engine, None, False)
        net.train()
        steps = 0
        while True:
            for batch in feed.epoch(0, 0):
                run.step(batch, None, 0)
                steps += 1
                if steps % CYCLE == 0:
                    yield


def training_steps(
    net: Anchored, data: ImageSet, *, batch: int = 128, repeats: int = 9, report: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Time the steps of an anchored network and of its unanchored baseline in turns, through kedge's own loop.

    Returns:
        For ``"unanchored"`` and ``"anchored"`` the seconds of a ``"step"`` with quartiles and the share of it that is
        ``"outside"`` forward, backward and optimizer; and the ``"ratio"`` of the two steps, with quartiles.
    """
    recipe = Recipe(epochs=CYCLE * (repeats + 1), batch=batch)  # long enough for anchors to be corrupted to the end
    steppers = {
        "unanchored": Stepper(without_anchors(net), data, recipe),
        "anchored": Stepper(copy.deepcopy(net), data, recipe),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steppers}
    with torch.random.fork_rng():  # as in training
        for stepper in steppers.values():
            stepper.cycle()  # the first cycle warms up
        for turn in range(repeats):
            for name in list(steppers)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(steppers[name].cycle())
                if report is not None:
                    report(name)
    steps = {name: [step for step, _ in cycles] for name, cycles in times.items()}
    result: dict[str, Any] = {"batch": batch, "ratio": asdict(ratios(steps["anchored"], steps["unanchored"]))}
    for name, cycles in times.items():
        outside = Quartiles.of([(step - inside) / step for step, inside in cycles]).median
        result[name] = {"step": asdict(Quartiles.of(steps[name])), "outside": outside}
    return result
