"""What anchoring adds to a training step, and how much of a step is not the network's.

    python benchmarks/training.py [--network compact] [--width 32] [--batch 128] [--repeats 9] [--json PATH]

Both twins train through kedge's own loop, a cycle of five steps (one of them with corrupted anchors) at a time and in
turns, so that whatever else the machine does falls on both alike. Printed are the median over repetitions of the mean
step of a cycle, the anchored step over the plain one, and the share of a step outside forward, backward and optimiser.
On CIFAR-10 where it is at hand (`kedge data get cifar10`), on random images of the same size otherwise.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import kedge
from kedge.data import sources
from kedge.errors import KedgeError
from kedge.files import atomic
from kedge.models import build
from kedge.provenance import provenance
from kedge.training import Recipe
from kedge.training import loop as training_loop
from kedge.training.engine import Engine

CYCLE = 5


class TimedEngine(Engine):
    """Adds up the time spent in the network and the optimiser."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def setup(self, net: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Time every forward pass and every step."""
        net.forward = self._timed(net.forward)  # type: ignore[method-assign]
        optimiser.step = self._timed(optimiser.step)  # type: ignore[method-assign]
        return net, optimiser

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
    """A training that goes on by a cycle of steps whenever it is asked to."""

    def __init__(self, net: nn.Module, data: kedge.ImageSet, recipe: Recipe) -> None:
        self.engine = TimedEngine()
        self._cycles = self._run(net, data, recipe)

    def cycle(self) -> tuple[float, float]:
        """Seconds of a step, and of its part in the network and the optimiser."""
        inside, started = self.engine.seconds, time.perf_counter()
        next(self._cycles)
        return (time.perf_counter() - started) / CYCLE, (self.engine.seconds - inside) / CYCLE

    def _run(self, net: nn.Module, data: kedge.ImageSet, recipe: Recipe) -> Iterator[None]:
        classifier = net if isinstance(net, kedge.Classifier) else kedge.Classifier(net)
        feed = training_loop.make_feed(data, recipe, 0, rank=0, world=1, workers=0, preprocess=None)
        training_loop._prepare(classifier, data, feed, None, 0)
        run = training_loop.Run(
            classifier, data, feed, None, training_loop.CrossEntropy(), recipe, 0, self.engine, None, False
        )
        classifier.train()
        steps = 0
        while True:
            for batch in feed.epoch(0, 0):
                run._step(batch, None, 0)
                steps += 1
                if steps % CYCLE == 0:
                    yield


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="compact")
    parser.add_argument("--width", type=int, default=32, help="of the compact network")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    data = load_images()
    recipe = Recipe(epochs=1, batch=options.batch)
    arguments = {"width": options.width} if options.network == "compact" else {}
    plain = build(options.network, **arguments)
    steppers = {
        "plain": Stepper(plain, data, recipe),
        "anchored": Stepper(kedge.anchor(plain), data, recipe),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steppers}
    for stepper in steppers.values():
        stepper.cycle()  # the first cycle warms up
    for _ in range(options.repeats):
        for name, stepper in steppers.items():
            times[name].append(stepper.cycle())
    results = summarise(times)
    title = f"{options.network} {arguments}, batch {options.batch}, on {data.name}"
    print(f"{title}; {options.repeats} cycles of {CYCLE} steps each")
    for name in steppers:
        r = results[name]
        spread = f"{1000 * r['fastest']:.1f} to {1000 * r['slowest']:.1f}"
        rate = f"{options.batch / r['step']:.0f} images/s, {r['outside']:.1%} of it outside the network"
        print(f"  {name:<9} {1000 * r['step']:7.1f} ms a step ({spread}), {rate}")
    print(f"  anchored / plain: {results['ratio']:.3f}")
    if options.json:
        with atomic(options.json) as temporary:
            temporary.write_text(json.dumps({"made with": provenance(), **vars(options), **results}, indent=1))


def summarise(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians and spreads."""
    results: dict[str, Any] = {}
    for name, pairs in times.items():
        steps = [step for step, _ in pairs]
        results[name] = {
            "step": statistics.median(steps),
            "fastest": min(steps),
            "slowest": max(steps),
            "outside": statistics.median((step - inside) / step for step, inside in pairs),
        }
    pairs = zip(times["anchored"], times["plain"], strict=True)
    results["ratio"] = statistics.median(anchored / plain for (anchored, _), (plain, _) in pairs)
    return results


def load_images() -> kedge.ImageSet:
    """CIFAR-10, or random images of its size."""
    try:
        images = sources.load("cifar10", "train")
        assert isinstance(images, kedge.ImageSet)
        return images
    except KedgeError:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return kedge.ImageSet(pixels, torch.arange(10_000) % 10, "random images")


if __name__ == "__main__":
    main()
