"""Nearest training images: what a network takes others for."""

from typing import Any

import torch
from torch import Tensor, nn

from kedge.data import Features, ImageSet, Preprocess, StreamedSet
from kedge.detectors.extraction import Extraction, extract
from kedge.detectors.search import directions, largest
from kedge.models.classifier import as_classifier

KEPT = 2000  # training images that are searched, a random sample of more


class Neighbours:
    """Training images by the last features of a network, of which it finds the nearest to other images.

    Args:
        net: A classifier that ends in a linear layer; an anchored one must have its anchors.
        train_set: The images that it was trained on; a random sample of 2,000 of them is kept.
        preprocess: How images become inputs; by default what the network's record says, or the images' size.
        features: Those of ``train_set``, if they are extracted already.
        seed: Random seed of the sample.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> train_set = ImageSet(torch.randint(0, 256, (60, 3, 2, 2), dtype=torch.uint8))
        >>> Neighbours(net, train_set).nearest(train_set.subset([7]), 1).tolist()
        [[7]]
    """

    def __init__(
        self,
        net: nn.Module,
        train_set: ImageSet | StreamedSet,
        *,
        preprocess: Preprocess | None = None,
        features: Features | None = None,
        seed: int = 0,
    ) -> None:
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(seed))
        kept = order[:KEPT].sort().values.tolist()
        self.images = train_set.subset(kept)
        if features is None:
            features = extract(net, self.images, preprocess=preprocess)
        else:
            features = features.subset(kept)
        self.net, self.preprocess, self.head = as_classifier(net), features.preprocess, features.head
        self.bank = directions(features.features)  # (N, d)

    def nearest(self, images: Any, count: int) -> Tensor:
        """The places in ``self.images`` of those nearest to each image, by the angle of the features, (B, count)."""
        rows = Extraction(self.net, self.preprocess, self.head, None, None).rows(images)
        features = torch.cat([row["features"] for row in rows])  # (B, d)
        _, places = largest(directions(features), self.bank, count, lambda q, rows: q @ rows.T)
        return places
