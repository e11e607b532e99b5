"""FeatureDetector: methods that read one vector per image inside the network, by default the input of its head."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from kedge.checks import finite
from kedge.data import Preprocess
from kedge.detectors.base import Detector
from kedge.models.head import check_head, head_name


class FeatureDetector(Detector):
    """A detector that reads the input of the network's last linear layer, or another layer.

    Args:
        net: See `Detector`. With anchors, features and logits are means over them.
        head: The name of the last linear layer, if it is not the one registered last.
        layer: A layer to read instead: its output, or its input as in ``"fc:in"``.
    """

    reads = "features"
    choose_by: ClassVar[str] = "head"  # the argument of the method that chooses the layer

    def __init__(self, net: nn.Module, *, head: str | None = None, layer: str | None = None) -> None:
        super().__init__(net)
        self.head = None if layer else head_name(self.net.network, head)
        self.layer = layer or f"{self.head}:in"

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and the layer's features (B, d), or (B, d, ...) of a layer inside."""
        logits, features = self.net.features(x, [self.layer])
        return logits, features[self.layer]

    def training_features(self, train_set: Any, preprocess: Preprocess) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and features of the training images batch by batch, checked."""
        unchecked = self.head
        for x, _ in self.inputs(train_set, preprocess):
            logits, z = self.features(x)
            finite("features", z, "check the network's weights")
            if unchecked:
                check_head(self.net.network, unchecked, logits, z, self.choose_by)
                unchecked = None
            yield logits, z
