"""FeatureDetector: methods that read one vector per image inside the network, by default the input of its head."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kedge.checks import finite
from kedge.data import Preprocess
from kedge.data.features import FeatureBatch, Features
from kedge.detectors.base import REASONS, Detector, Outputs
from kedge.errors import InputError
from kedge.models.head import check_head, find_head, head_name

KEPT_BYTES = 2**26  # features of training images up to this size are kept for a second pass


class FeatureDetector(Detector):
    """A detector that reads the input of the network's last linear layer, or another layer.

    A method defines `fit_features`, if it learns, and `of_features`.

    Args:
        net: See `Detector`. With anchors, features and logits are means over them.
        head: The name of the last linear layer; by default `fit` finds it by running the network.
        layer: A layer to read instead: its output, or its input as in ``"fc:in"``.
    """

    reads = "features"
    options: ClassVar[tuple[str, ...]] = ("head",)
    needs_labels: ClassVar[bool] = False  # whether `fit_features` needs a label for each training image
    learns_logits: ClassVar[bool] = False  # whether `fit_features` learns, though features are not read
    reads_twice: ClassVar[bool] = False  # whether `fit_features` iterates more than once

    def __init__(self, net: nn.Module, *, head: str | None = None, layer: str | None = None) -> None:
        super().__init__(net)
        self.given_layer = layer
        self._head_given = head is not None
        self.head = head_name(self.net.network, head) if self.reads_features and not layer else head

    @property
    def layer(self) -> str:
        """The layer that is read."""
        return self.given_layer or f"{self.head}:in"

    @property
    def reads_features(self) -> bool:
        """Whether it reads the layer at all, which a method may leave to an option."""
        return True

    @property
    def reason(self) -> str:
        """As of other methods, by whether it reads the layer."""
        return REASONS["features" if self.reads_features else "logits"]

    @property
    def takes_features(self) -> bool:
        """Whether it reads the input of the last linear layer, which `kedge.extract` stores."""
        return self.given_layer is None

    @property
    def last_layer(self) -> nn.Linear:
        """The last linear layer, whose input is read."""
        return cast(nn.Linear, self.net.network.get_submodule(str(self.head)))

    @property
    def reads_train(self) -> bool:
        """Whether `fit` reads the training images."""
        if type(self).fit_method is not FeatureDetector.fit_method:
            return True
        learns = type(self).fit_features is not FeatureDetector.fit_features
        return learns and (self.reads_features or self.learns_logits)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn from the training images' features."""
        super().fit_method(train_set, preprocess)
        if self.reads_features or self.learns_logits:
            self.fit_features(TrainingFeatures(self, train_set, preprocess))

    def fit_features(self, batches: "TrainingFeatures") -> None:
        """Learn from batches of features, logits and labels, which can be iterated more than once."""
        for _ in batches:  # checks the head
            break
        self._prints = []  # so that `fit` takes fingerprints of the whole set, not of one batch

    @abstractmethod
    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The score of logits (B, C) and features (B, d), or (B, d, ...) of another layer."""

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and the score of its features."""
        return self.of_features(*self.features(x))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and the layer's features (B, d), or (B, d, ...) of a layer inside; (B, 0) if none are read."""
        if not self.reads_features:
            logits = self.net(x)
            return logits, logits[:, :0]
        logits, features = self.net.features(x, [self.layer])
        return logits, features[self.layer]


class FeatureStream:
    """Batches that other code computes of a training set, with the name of the last layer; to be read once.

    Args:
        batches: The name of the last linear layer, and a batch.
        images: The training set, for detectors that read it again.
    """

    def __init__(self, batches: Iterator[tuple[str, FeatureBatch]], images: Any) -> None:
        self.images = images
        self._batches: Iterator[tuple[str, FeatureBatch]] | None = batches

    def once(self) -> Iterator[tuple[str, FeatureBatch]] | None:
        """The batches, or None if they were read before."""
        batches, self._batches = self._batches, None
        return batches


class TrainingFeatures:
    """Batches of the training images' logits, features and labels, checked; from images or extracted features.

    Features of images are kept for a second iteration if they are few enough, and computed again otherwise.
    """

    def __init__(self, detector: FeatureDetector, train_set: Any, preprocess: Preprocess) -> None:
        self._detector, self._train_set, self._preprocess = detector, train_set, preprocess
        self._kept: list[FeatureBatch] | None = None

    def __iter__(self) -> Iterator[FeatureBatch]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[FeatureBatch] | None = []
        size = 0
        if not self._detector.reads_twice or isinstance(self._train_set, Features):
            kept = None
        for batch in self._read():
            size += sum(values.numel() * values.element_size() for values in batch[:2])
            if kept is not None:
                kept = [*kept, batch] if size <= KEPT_BYTES else None
            yield batch
        self._kept = kept

    def _read(self) -> Iterator[FeatureBatch]:
        detector, first = self._detector, True
        for batch in self._batches():
            finite("logits", batch.logits, "check the network's weights")
            finite("features", batch.features, "check the network's weights")
            if first and detector.reads_features and detector.head is not None and detector.given_layer is None:
                check_head(detector.net.network, detector.head, batch.logits, batch.features)
            first = False
            if detector.needs_labels:
                check_class_labels(detector, batch.labels, batch.logits.shape[1])
            yield batch

    def _batches(self) -> Iterator[FeatureBatch]:
        detector, images = self._detector, self._train_set
        if isinstance(images, FeatureStream):
            if (stream := images.once()) is not None:
                for head, batch in stream:
                    detector.head = head if detector.reads_features else detector.head
                    yield batch
                return
            images = images.images
        if isinstance(images, Features):
            detector.head = images.head
            for part, prints in images.batches(1024, detector.net.mean.device):
                detector.add_prints(prints)
                yield part
            return
        unknown = detector.reads_features and detector.given_layer is None and not detector._head_given
        for x, y in detector.inputs(images, self._preprocess):
            if unknown:
                detector.head, unknown = find_head(detector.net, x[:2]), False
            yield FeatureBatch(*detector.features(x), y)


def mean_features(batches: TrainingFeatures) -> Tensor:
    """The mean of the training images' features (d,), in float64."""
    total, count = torch.zeros(1, dtype=torch.float64), 0
    for batch in batches:
        total = total.to(batch.features.device) + batch.features.double().sum(dim=0)
        count += len(batch.features)
    return total / count


def check_class_labels(detector: Detector, labels: Tensor | None, classes: int) -> Tensor:
    """The labels of a batch of training images, if each image has one of the network's classes."""
    name = type(detector).__name__
    if labels is None or bool((labels < 0).any()):
        raise InputError(
            f"train_set must have a label for each image, since {name} learns from each class; pass an ImageSet with "
            "labels or (image, label) pairs"
        )
    low, high = int(labels.min()), int(labels.max())
    if high >= classes:
        raise InputError(
            f"labels must lie in 0..{classes - 1}, the classes of the network; got {low}..{high}: number them as the "
            "network's outputs are"
        )
    return labels
