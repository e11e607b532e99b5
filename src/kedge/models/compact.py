"""A nine-layer residual network for machines without a GPU, after the CIFAR-10 speed records (D. Page's ResNet-9)."""

from typing import ClassVar

from torch import Tensor, nn

from kedge.models.base import Network, conv3x3, dropout_layer

# Global max pooling gives large values; logits an eighth as large keep the first steps at a high learning rate stable.
SCALE = 1 / 8


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(conv3x3(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU())


class _Residual(nn.Module):
    """Two convolutions whose result is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, width)
        self.conv2 = _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.conv2(self.conv1(x))
        return x + change


class Compact(Network):
    """A shallow residual network of three stages, for images of at least 8x8.

    Args:
        width: Channels after the first layer; the three stages have two, four and eight times as many.
        classes: Number of classes.
        channels: Number of image channels.
        dropout: Probability of dropping a value before the last layer, in training.

    Example:
        >>> sum(p.numel() for p in Compact(width=16, channels=1).parameters())
        412666
    """

    feature_layers: ClassVar[tuple[str, ...]] = ("stage1", "stage2", "stage3", "flatten")

    def __init__(self, *, width: int = 32, classes: int = 10, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__("compact", width=width, classes=classes, channels=channels, dropout=dropout)
        self.prep = _conv(channels, width)
        self.stage1 = nn.Sequential(_conv(width, 2 * width), nn.MaxPool2d(2), _Residual(2 * width))
        self.stage2 = nn.Sequential(_conv(2 * width, 4 * width), nn.MaxPool2d(2))
        self.stage3 = nn.Sequential(_conv(4 * width, 8 * width), nn.MaxPool2d(2), _Residual(8 * width))
        self.flatten = nn.Flatten()
        self.dropout = dropout_layer(dropout)
        self.fc = nn.Linear(8 * width, classes)
        # No Kaiming here: the learning rates of this family of networks were found with PyTorch's smaller weights.

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images, (B, D, H, W) -> (B, C)."""
        x = self.stage3(self.stage2(self.stage1(self.prep(x))))  # (B, 8 width, H/8, W/8)
        # The scale stands before the linear layer, which is the same for its weights and leaves fc's output the logits.
        # amax, because the gradient of nn.AdaptiveMaxPool2d is not deterministic on a GPU.
        x = self.flatten(x.amax(dim=(2, 3), keepdim=True) * SCALE)  # (B, 8 width)
        logits: Tensor = self.fc(self.dropout(x))
        return logits
