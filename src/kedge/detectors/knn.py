"""KNN."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.detectors.bank import BankDetector, sample_rows
from kedge.detectors.base import Outputs
from kedge.detectors.features import TrainingFeatures
from kedge.detectors.registry import register
from kedge.detectors.search import directions, kth_distance
from kedge.errors import InputError

DEFAULT_NEIGHBOUR, SHARE_OF_CLASS = 50, 0.1


@register
class KNN(BankDetector):
    """Deep nearest neighbours (Sun et al., ICML 2022): the distance to the k-th nearest training image.

    The features before the last layer, ``z / ||z||``, are kept for all training images; the score is the Euclidean
    distance of an image's own to the k-th nearest of them. Assumes nothing about the shape of the classes and needs no
    labels. Use it where the features of classes do not form simple clouds, or where the network is an encoder that
    another task trained. One forward pass and a comparison with every training image that is kept, N x d
    multiplications, or from 50,000 on with a few hundred that an index finds; the saved file holds their features,
    which ``limit`` bounds. https://arxiv.org/abs/2204.06507

    Args:
        net: A classifier, unanchored or anchored. With anchors the features are means.
        k: Which neighbour counts; by default a tenth of the images that are kept per class, at least the first and at
            most the 50th. The paper's are 50 for CIFAR-10, 200 for CIFAR-100 and 1000 for ImageNet.
        layer: The layer whose output to compare, or its input as in ``"fc:in"``; by default the input of the last
            linear layer. Maps (B, d, H, W) are averaged over their positions.
        head: See `FeatureDetector`.
        limit: Keep a random sample of this many training images instead of all.
        seed: Random seed of the sample and of the index.
        index: ``"exact"`` compares with every image, ``"ivf"`` with those that an inverted file finds: rows in cells
            around the centres of k-means, of which the nearest are searched. ``"auto"`` is exact below 50,000 images.
        probes: Cells to search; by default as many as find 99 % of the k nearest, measured in `fit`.

    Attributes:
        bank: The features that are kept, (N, d), once fitted.
        recall: The share of the k nearest that the index finds, as measured in `fit` on images of the bank, each
            compared with the others; 1 without an index.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> KNN(net, k=3).fit(torch.rand(20, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "knn"
    options = ("k:given", "layer:given_layer", "limit", "seed", "index", "probes:given_probes", "head")
    learned = ("bank", "default_k")
    distances = True
    grid: Mapping[str, Sequence[Any]] = {"k": (1, 5, 10, 20, 50, 100, 200, 500, 1000)}

    def __init__(
        self,
        net: nn.Module,
        *,
        k: int | None = None,
        layer: str | None = None,
        limit: int | None = None,
        seed: int = 0,
        index: str = "auto",
        probes: int | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(net, limit=limit, seed=seed, index=index, probes=probes, head=head, layer=layer)
        self.given = k if k is None else at_least("k", k, 1)
        if limit is not None:
            at_least("limit", limit, k or 1)
        self.default_k: Any = None

    @property
    def k(self) -> Any:
        """Which neighbour counts; None before `fit` if it was not given."""
        return self.given if self.given is not None or self.default_k is None else int(self.default_k)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Keep the training images' features, or a sample of them."""
        classes = 1

        def read() -> Iterator[Tensor]:
            nonlocal classes
            for batch in batches:
                classes = batch.logits.shape[1]
                yield self.rows(batch.features, batch.logits)

        bank = sample_rows(read(), self.limit, self.seed)
        if (self.given or 0) > len(bank):
            raise InputError(
                f"k must be at most the number of training images, {len(bank)}; got {self.given}: pass a smaller k, or "
                "more images"
            )
        self.bank = bank
        self.default_k = max(1, min(DEFAULT_NEIGHBOUR, int(SHARE_OF_CLASS * len(bank) / classes)))
        self.build_index()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the bank and the default k; files from before it was stored have the 50th."""
        older = torch.tensor(float(min(DEFAULT_NEIGHBOUR, len(state["bank"]))))
        super().load_state({"default_k": older, **state})

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits and the distance to the k-th nearest neighbour."""
        z = directions(features)
        return Outputs(logits, self.compared(z, lambda q, rows: kth_distance(q, rows, self.k)).to(z.dtype))
