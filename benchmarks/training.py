"""Time of an anchored training step relative to an unanchored one, and the overhead of the training loop.

    python benchmarks/training.py [--network compact] [--width 32] [--batch 128] [--repeats 9] [--json PATH]

Both networks train through kedge's own loop, alternating after every cycle of five steps (one of them with corrupted
anchors), so that other load on the machine affects both alike. Prints the median and quartiles over cycles of the mean
step, the ratio of the anchored step to the unanchored one, and the share of a step outside forward, backward and
optimizer. Uses CIFAR-10 if it is available (`kedge data get cifar10`), random images of the same size otherwise.
"""

import argparse
from typing import Any

import torch

import kedge
from common import save
from kedge.data import sources
from kedge.errors import KedgeError
from kedge.models import build
from kedge.studies.bench.steps import CYCLE, training_steps


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="compact")
    parser.add_argument("--width", type=int, default=32, help="width of the network, if it has that option")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    data = load_images()
    arguments = {"width": options.width} if options.network in ("compact", "airbench") else {}
    net = kedge.anchor(build(options.network, **arguments))
    results = training_steps(net, data, batch=options.batch, repeats=options.repeats)
    title = f"{options.network} {arguments}, batch {options.batch}, on {data.name}"
    print(f"{title}; {options.repeats} cycles of {CYCLE} steps each")
    for name, times in results.items():
        if isinstance(times, dict) and "step" in times:
            print(line(name, times, options.batch))
    ratio = results["ratio"]
    print(f"  anchored / unanchored: {ratio['median']:.3f} (quartiles {ratio['low']:.3f} to {ratio['high']:.3f})")
    save(options.json, {**vars(options), **results})


def line(name: str, times: dict[str, Any], batch: int) -> str:
    """The times of one network as text."""
    step = times["step"]
    quartiles = f"{1000 * step['low']:.1f} to {1000 * step['high']:.1f}"
    rate = f"{batch / step['median']:.0f} images/s, {times['outside']:.1%} of it outside the network"
    return f"  {name:<10} {1000 * step['median']:7.1f} ms per step ({quartiles}), {rate}"


def load_images() -> kedge.ImageSet:
    """CIFAR-10, or random images of its size."""
    try:
        images = sources.load_dataset("cifar10", "train")
        assert isinstance(images, kedge.ImageSet)
        return images
    except KedgeError:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return kedge.ImageSet(pixels, torch.arange(10_000) % 10, "random images")


if __name__ == "__main__":
    main()
