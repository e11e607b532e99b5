"""Gray images of 16 bits, as microscopes, satellites and scanners make them: cells, and what goes wrong with a camera.

Needs ``pip install 'kedge[report]'``; run it with ``python examples/gray_images.py``. The cells are drawn.
"""

import numpy as np

import kedge

SIDE = 40  # pixels
KINDS = ("round", "long", "dividing")


def cells(n: int, kind: int, seed: int) -> np.ndarray:
    """Images (n, SIDE, SIDE) of one cell each, 16 bits, with the noise of a camera."""
    random = np.random.default_rng([seed, kind])
    y, x = np.mgrid[:SIDE, :SIDE] - SIDE / 2
    images = np.empty((n, SIDE, SIDE), np.uint16)
    for number in range(n):
        angle, radius = random.uniform(0, np.pi), random.uniform(5, 7)
        dx, dy = x - random.uniform(-5, 5), y - random.uniform(-5, 5)
        u, v = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
        if kind == 2:
            u = np.abs(u) - radius  # two cells that touch
        distance = np.hypot(u / (2 if kind == 1 else 1), v)
        light = 4000 + 9000 / (1 + np.exp(2 * (distance - radius)))
        images[number] = random.poisson(light / 20) * 20
    return images


def to_bytes(raw: np.ndarray, low: int = 2000, high: int = 16000) -> np.ndarray:
    """One window of brightness for all images, as 8 bits; a window for each image would hide a wrong exposure."""
    return ((raw.clip(low, high) - low) / (high - low) * 255).astype(np.uint8)


def image_set(n: int, seed: int) -> kedge.ImageSet:
    """As many cells of each kind, with labels."""
    raw = np.concatenate([cells(n, kind, seed) for kind in range(len(KINDS))])
    return kedge.ImageSet.from_arrays(to_bytes(raw), np.repeat(range(len(KINDS)), n), name="cells", classes=KINDS)


def main(epochs: int = 6) -> dict[str, float]:
    """Train a small network, protect it, and return the share that is flagged of cells and of five mishaps."""
    train_set, held_out = image_set(150, seed=0), image_set(60, seed=1)
    net = kedge.models.build("compact", width=8, classes=len(KINDS), channels=1)
    net = kedge.train(net, train_set, kedge.training.recipe("demo", epochs=epochs, batch=32))
    detector = kedge.protect(net, train_set, held_out)
    print(detector.summary)

    raw = np.concatenate([cells(20, kind, seed=2) for kind in range(len(KINDS))])
    blurred = sum(np.roll(raw.astype(float), (i, j), (1, 2)) for i in range(-3, 4) for j in range(-3, 4)) / 49
    shown = {
        "cells": raw,
        "out of focus": blurred,
        "overexposed": raw * 2.0,
        "lamp off": raw * 0.3,
        "negative": 16000.0 - raw,
        "dust": np.where((raw % 977) < 60, 16000, raw),
    }
    sets = {name: kedge.ImageSet.from_arrays(to_bytes(images), name=name) for name, images in shown.items()}
    flagged = {name: float(detector(images).is_ood.double().mean()) for name, images in sets.items()}
    for name, share in flagged.items():
        print(f"{name:14}{share:4.0%} flagged")
    detector.plot([images.images[7] for images in sets.values()], most=6).savefig("cells.png", dpi=80)
    return flagged


if __name__ == "__main__":
    main()
