"""Residual networks (He et al., 2015), with a stem for small images or for ImageNet's."""

from typing import ClassVar

from torch import Tensor, nn

from kedge.checks import one_of
from kedge.models.base import Network, conv3x3, dropout_layer, kaiming


class _Block(nn.Module):
    """Convolutions and a shortcut: two of 3x3, or 1x1, 3x3 and 1x1 with the stride in the 3x3 one ("v1.5")."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.count = len(shapes)
        for i, (before, after, kernel, step) in enumerate(shapes, start=1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, kernel, step, padding=kernel // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
            self.add_module(f"relu{i}", nn.ReLU())
        self.downsample: nn.Module | None = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i in range(1, self.count + 1):
            conv, norm, relu = (self.get_submodule(f"{kind}{i}") for kind in ("conv", "bn", "relu"))
            out = norm(conv(out))
            if i == self.count:  # the last activation comes after the shortcut
                out = out + (x if self.downsample is None else self.downsample(x))
            out = relu(out)
        return out


_DEPTHS = {18: (False, (2, 2, 2, 2)), 34: (False, (3, 4, 6, 3)), 50: (True, (3, 4, 6, 3))}  # bottlenecks, blocks
_CLASSES = {"cifar": 10, "imagenet": 1000}


class ResNet(Network):
    """ResNet-18, -34 or -50, of four stages.

    Parameters and buffers carry torchvision's names, so its state dicts load into the ImageNet form and back.

    Args:
        depth: 18 or 34 (basic blocks), or 50 (bottlenecks with the stride in the 3x3 convolution).
        stem: ``"cifar"``: a 3x3 convolution that keeps the size, for images of about 32x32; ``"imagenet"``: a 7x7
            convolution and a max pooling that divide the size by four, for images of about 224x224.
        classes: Number of classes; by default 10 with the stem ``"cifar"`` and 1000 with ``"imagenet"``.
        channels: Number of image channels.
        dropout: Probability of dropping a value before the last layer, in training.

    Example:
        >>> sum(p.numel() for p in ResNet(18, "cifar").parameters())
        11173962
    """

    feature_layers: ClassVar[tuple[str, ...]] = ("layer1", "layer2", "layer3", "layer4", "flatten")

    def __init__(
        self, depth: int, stem: str = "imagenet", *, classes: int | None = None, channels: int = 3, dropout: float = 0.0
    ) -> None:
        bottleneck, counts = _DEPTHS[one_of("depth", depth, tuple(_DEPTHS))]
        small = one_of("stem", stem, tuple(_CLASSES)) == "cifar"
        classes = _CLASSES[stem] if classes is None else classes
        super().__init__(f"resnet{depth}" + "-cifar" * small, classes=classes, channels=channels, dropout=dropout)
        wide = 4 if bottleneck else 1

        def stage(inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
            first = _Block(inputs, width, stride, bottleneck=bottleneck)
            rest = (_Block(wide * width, width, 1, bottleneck=bottleneck) for _ in range(count - 1))
            return nn.Sequential(first, *rest)

        self.conv1 = conv3x3(channels, 64) if small else nn.Conv2d(channels, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = stage(64, 64, counts[0], stride=1)
        self.layer2 = stage(64 * wide, 128, counts[1], stride=2)
        self.layer3 = stage(128 * wide, 256, counts[2], stride=2)
        self.layer4 = stage(256 * wide, 512, counts[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.dropout = dropout_layer(dropout)
        self.fc = nn.Linear(512 * wide, classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images, (B, D, H, W) -> (B, C)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))  # (B, 64, H, W), or H/4, W/4 with ImageNet's stem
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (B, 512 or 2048, H/8, W/8), or H/32, W/32
        x = self.flatten(self.avgpool(x))  # (B, 512 or 2048)
        logits: Tensor = self.fc(self.dropout(x))
        return logits
