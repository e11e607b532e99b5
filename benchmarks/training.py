"""What anchoring adds to a training step, and how much of a step is not the network's.

    python benchmarks/training.py [--network compact] [--width 32] [--batch 128] [--repeats 9] [--json PATH]

Both twins train through kedge's own loop, a cycle of five steps (one of them with corrupted anchors) at a time and in
turns, so that whatever else the machine does falls on both alike. Printed are the median over repetitions of the mean
step of a cycle with its quartiles, the anchored step over the plain one, and the share of a step outside forward,
backward and optimizer. On CIFAR-10 where it is at hand (`kedge data get cifar10`), on random images of the same size
otherwise.
"""

import argparse
import json
from typing import Any

import torch

import kedge
from kedge.data import sources
from kedge.errors import KedgeError
from kedge.files import atomic
from kedge.models import build
from kedge.provenance import provenance
from kedge.studies.bench.steps import CYCLE, training_steps


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="compact")
    parser.add_argument("--width", type=int, default=32, help="of a network that has one")
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
    for name in ("unanchored", "anchored"):
        print(line(name, results[name], options.batch))
    ratio = results["ratio"]
    print(f"  anchored / unanchored: {ratio['median']:.3f} (quartiles {ratio['low']:.3f} to {ratio['high']:.3f})")
    if options.json:
        with atomic(options.json) as temporary:
            temporary.write_text(json.dumps({"made with": provenance(), **vars(options), **results}, indent=1))


def line(name: str, found: dict[str, Any], batch: int) -> str:
    """One twin as text."""
    step = found["step"]
    spread = f"{1000 * step['low']:.1f} to {1000 * step['high']:.1f}"
    rate = f"{batch / step['median']:.0f} images/s, {found['outside']:.1%} of it outside the network"
    return f"  {name:<9} {1000 * step['median']:7.1f} ms a step ({spread}), {rate}"


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
