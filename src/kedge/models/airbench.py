"""The network of the CIFAR-10 speed records for training on very little (K. Jordan, 2024), at any width."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.models.base import Network, conv3x3, dropout_layer

PATCH = 2  # pixels of a side of the patches that the first layer whitens
PATCHES = 200_000  # to take their covariance of
RIDGE = 5e-4  # added to every variance, so that directions with hardly any do not become noise


class _Group(nn.Module):
    """Two convolutions, with a pooling behind the first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1, self.act1 = _conv(inputs, outputs), _norm(outputs), nn.GELU()
        self.conv2, self.norm2, self.act2 = _conv(outputs, outputs), _norm(outputs), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        y: Tensor = self.act2(self.norm2(self.conv2(x)))
        return y


class Airbench(Network):
    """Whitened patches, then three groups of two convolutions, for images of at least 9x9.

    Train it by the recipe ``"airbench"``; `kedge.train` sets its first layer from the training images.

    Args:
        width: Channels of the first group; the other two have four times as many.
        classes: Number of classes.
        channels: Number of image channels.
        dropout: Probability of dropping a value before the last layer, in training.

    Example:
        >>> sum(p.numel() for p in Airbench(width=32).parameters())
        498104
    """

    feature_layers: ClassVar[tuple[str, ...]] = ("group1", "group2", "group3", "flatten")
    whitened: Tensor

    def __init__(self, *, width: int = 64, classes: int = 10, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__("airbench", width=width, classes=classes, channels=channels, dropout=dropout)
        self.channels, self.shrink = channels, (4 * width) ** -0.5
        self.stem = nn.Conv2d(channels, 2 * channels * PATCH**2, PATCH)
        nn.init.zeros_(self.stem.bias)  # type: ignore[arg-type]
        self.act = nn.GELU()
        self.group1 = _Group(self.stem.out_channels, width)
        self.group2 = _Group(width, 4 * width)
        self.group3 = _Group(4 * width, 4 * width)
        self.flatten = nn.Flatten()
        self.dropout = dropout_layer(dropout)
        self.fc = nn.Linear(4 * width, classes, bias=False)
        nn.init.normal_(self.fc.weight, std=self.shrink)
        self.register_buffer("whitened", torch.tensor(False))

    def prepare(self, images: Tensor) -> None:
        """Set the first layer to whiten the patches of normalised training images (N, D, H, W), unless it does already.

        All parts of an anchored first layer get the same filters; where weights are Gaussian, they are the means.
        """
        if bool(self.whitened):
            return
        filters = whitening(images)
        with torch.no_grad():
            for name, weight in self.stem.named_parameters():
                if name.rpartition(".")[2] in ("weight", "original"):  # the latter with torch's parametrizations
                    weight.copy_(filters.repeat(1, weight.shape[1] // self.channels, 1, 1).to(weight))
            self.whitened.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images, (B, D, H, W) -> (B, C)."""
        x = self.group3(self.group2(self.group1(self.act(self.stem(x)))))  # (B, 4 width, about H/8, W/8)
        # The maxima of all features add up to large logits, which would saturate the softmax from the first step on.
        x = self.flatten(x.amax(dim=(2, 3), keepdim=True) * self.shrink)  # (B, 4 width)
        logits: Tensor = self.fc(self.dropout(x))
        return logits


def whitening(images: Tensor) -> Tensor:
    """Filters (2 P, D, 2, 2), P = 4 D: patches of images (N, D, H, W) get uncorrelated values of unit variance."""
    patches = F.unfold(images, PATCH).transpose(1, 2).flatten(0, 1)  # (N * places, D * 4)
    patches = patches[:: max(1, len(patches) // PATCHES)].double()
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    scaled = directions.T.flip(0) / (variances.flip(0)[:, None] + RIDGE).sqrt()  # the strongest first
    filters = scaled.view(-1, images.shape[1], PATCH, PATCH)
    return torch.cat([filters, -filters]).to(images.dtype)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    """A convolution whose first filters pass their input on."""
    layer = conv3x3(inputs, outputs)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def _norm(width: int) -> nn.BatchNorm2d:
    """A batch norm without a scale of its own, and with a short memory: trainings are a thousand steps long."""
    norm = nn.BatchNorm2d(width, momentum=0.6)
    norm.weight.requires_grad_(False)
    return norm
