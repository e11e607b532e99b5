"""The residual networks of He et al. (2015), section 4.2, for 32 x 32 images: ResNet-20, -32, -44, -56 and smaller."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kedge.checks import one_of
from kedge.models.base import Network, conv3x3, dropout_layer, kaiming

DEPTHS = (8, 20, 32, 44, 56, 110)


class _Block(nn.Module):
    """Two convolutions and a shortcut without parameters: every other pixel, and zeros for the new channels."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, width, stride), nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2, self.bn2 = conv3x3(width, width), nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.stride, self.more = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        change = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        out: Tensor = self.relu2(x + change)
        return out


class SmallResNet(Network):
    """A residual network of three stages of 16, 32 and 64 channels, with (depth - 2) / 6 blocks each.

    Parameters carry the names of the public CIFAR-10 weights by Y. Idelbayev, whose last layer ``linear`` is ``fc``
    here; `kedge.models.named.load_weights` takes either.

    Args:
        depth: One of `DEPTHS`.
        classes: Number of classes.
        channels: Number of image channels.
        dropout: Probability of dropping a value before the last layer, in training.

    Example:
        >>> sum(p.numel() for p in SmallResNet(20).parameters())
        269722
    """

    feature_layers: ClassVar[tuple[str, ...]] = ("layer1", "layer2", "layer3", "flatten")

    def __init__(self, depth: int, *, classes: int = 10, channels: int = 3, dropout: float = 0.0) -> None:
        blocks = (one_of("depth", depth, DEPTHS) - 2) // 6
        super().__init__(f"resnet{depth}", classes=classes, channels=channels, dropout=dropout)

        def stage(inputs: int, width: int) -> nn.Sequential:
            first = _Block(inputs, width, 1 if inputs == width else 2)
            return nn.Sequential(first, *(_Block(width, width, 1) for _ in range(blocks - 1)))

        self.conv1, self.bn1, self.relu = conv3x3(channels, 16), nn.BatchNorm2d(16), nn.ReLU()
        self.layer1, self.layer2, self.layer3 = stage(16, 16), stage(16, 32), stage(32, 64)
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.dropout = dropout_layer(dropout)
        self.fc = nn.Linear(64, classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images, (B, D, H, W) -> (B, C)."""
        x = self.relu(self.bn1(self.conv1(x)))  # (B, 16, H, W)
        x = self.layer3(self.layer2(self.layer1(x)))  # (B, 64, H/4, W/4)
        logits: Tensor = self.fc(self.dropout(self.flatten(self.avgpool(x))))
        return logits
