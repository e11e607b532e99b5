"""Wide residual networks for small images (Zagoruyko & Komodakis, 2016)."""

from typing import ClassVar

from torch import Tensor, nn

from kedge.checks import at_least
from kedge.errors import InputError
from kedge.models.base import Network, conv3x3, dropout_layer, kaiming


class _Block(nn.Module):
    """Two pre-activated 3x3 convolutions and a shortcut, with dropout between the convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.dropout = dropout_layer(dropout)
        self.conv2 = conv3x3(outputs, outputs)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = None if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active: Tensor = self.relu1(self.bn1(x))
        out: Tensor = self.relu2(self.bn2(self.conv1(active)))
        out = self.conv2(self.dropout(out))
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(Network):
    """WRN-``depth``-``width``: a pre-activation residual network of three groups, for images of about 32x32.

    Args:
        depth: Number of layers, 6n + 4: n blocks in each of three groups.
        width: Factor on the 16, 32 and 64 channels of the groups.
        classes: Number of classes.
        channels: Number of image channels.
        dropout: Probability of dropping a value between a block's two convolutions, in training.

    Example:
        >>> sum(p.numel() for p in WideResNet(40, 2).parameters())
        2243546
    """

    feature_layers: ClassVar[tuple[str, ...]] = ("group1", "group2", "group3", "flatten")

    def __init__(self, depth: int, width: int, *, classes: int = 10, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__("wrn", depth=depth, width=width, classes=classes, channels=channels, dropout=dropout)
        blocks, rest = divmod(at_least("depth", depth, 10) - 4, 6)
        if rest:
            near = f"{depth - rest} or {depth - rest + 6}"
            raise InputError(f"depth must be 6n + 4 (10, 16, 22, 28, 40, ...); got {depth}, try {near}")

        def group(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            first = _Block(inputs, outputs, stride, dropout)
            return nn.Sequential(first, *(_Block(outputs, outputs, 1, dropout) for _ in range(blocks - 1)))

        self.conv1 = conv3x3(channels, 16)
        self.group1 = group(16, 16 * width, stride=1)
        self.group2 = group(16 * width, 32 * width, stride=2)
        self.group3 = group(32 * width, 64 * width, stride=2)
        self.bn = nn.BatchNorm2d(64 * width)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64 * width, classes)
        kaiming(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images, (B, D, H, W) -> (B, C)."""
        x = self.group3(self.group2(self.group1(self.conv1(x))))  # (B, 64 width, H/4, W/4)
        x = self.flatten(self.pool(self.relu(self.bn(x))))  # (B, 64 width)
        logits: Tensor = self.fc(x)
        return logits
