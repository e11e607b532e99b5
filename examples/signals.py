"""Signals instead of images: a network on one-dimensional waves, and waves of other shapes.

Needs ``pip install kedge``; run it with ``python examples/signals.py``.
"""

import math

import torch
from torch import Tensor, nn

import kedge

LENGTH = 128  # samples


def waves(n: int, shape: str, seed: int) -> tuple[Tensor, Tensor]:
    """Signals (n, 1, LENGTH) of 2, 3 or 4 periods with noise, and which of the three."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (n,), generator=generator)
    phase = torch.rand(n, 1, generator=generator)
    x = torch.sin(2 * math.pi * ((label[:, None] + 2) * torch.linspace(0, 1, LENGTH) + phase))
    if shape == "square":
        x = x.sign()
    if shape == "burst":
        x = x * (torch.arange(LENGTH) < LENGTH // 2)
    return (x + 0.2 * torch.randn(n, LENGTH, generator=generator))[:, None], label


def main(epochs: int = 15) -> dict[str, float]:
    """Train a network, protect it, and return the share of signals of each shape that it flags."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 32, 9, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 3),
    )  # fmt: skip
    x, y = waves(1500, "sine", seed=0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    train_set = torch.utils.data.TensorDataset(x, y)
    detector = kedge.KNN(kedge.Classifier(net.eval())).fit(train_set).calibrate(waves(400, "sine", seed=1)[0])
    print(detector)
    shapes = ("sine", "square", "burst")
    flagged = {shape: float(detector(waves(200, shape, seed=2)[0]).is_ood.double().mean()) for shape in shapes}
    for shape, share in flagged.items():
        print(f"{shape:7} {share:6.1%} flagged")
    return flagged


if __name__ == "__main__":
    main()
