"""KNN."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.errors import InputError

DEFAULT_NEIGHBOUR, SHARE_OF_CLASS = 50, 0.1
SCANNED, SPARE, CHECKED = 2048, 64, 32  # the least bank that is scanned, rows beyond k and queries compared again
ROWS, QUERIES = 4096, 256  # of the bank and of the images that are compared at a time


@register
class KNN(FeatureDetector):
    """Deep nearest neighbours (Sun et al., ICML 2022): the distance to the k-th nearest training image.

    The features before the last layer, ``z / ||z||``, are kept for all training images; the score is the Euclidean
    distance of an image's own to the k-th nearest of them. Assumes nothing about the shape of the classes and needs no
    labels. Use it where the features of classes do not form simple clouds, or where the network is an encoder that
    another task trained. One forward pass and a comparison with every training image that is kept, N x d
    multiplications; the saved file holds their features, which ``limit`` bounds. https://arxiv.org/abs/2204.06507

    Args:
        net: A classifier, unanchored or anchored. With anchors the features are means.
        k: Which neighbour counts; by default a tenth of the images that are kept per class, at least the first and at
            most the 50th. The paper's are 50 for CIFAR-10, 200 for CIFAR-100 and 1000 for ImageNet.
        layer: The layer whose output to compare, or its input as in ``"fc:in"``; by default the input of the last
            linear layer. Maps (B, d, H, W) are averaged over their positions.
        head: See `FeatureDetector`.
        limit: Keep a random sample of this many training images instead of all.
        seed: Random seed of the sample.

    Attributes:
        bank: The features that are kept, (N, d), once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> KNN(net, k=3).fit(torch.rand(20, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "knn"
    options = ("k:given", "layer:given_layer", "limit", "seed", "head")
    learned = ("bank", "default_k")
    grid: Mapping[str, Sequence[Any]] = {"k": (1, 5, 10, 20, 50, 100, 200, 500, 1000)}

    def __init__(
        self,
        net: nn.Module,
        *,
        k: int | None = None,
        layer: str | None = None,
        limit: int | None = None,
        seed: int = 0,
        head: str | None = None,
    ) -> None:
        super().__init__(net, head=head, layer=layer)
        self.given = k if k is None else at_least("k", k, 1)
        self.limit = limit if limit is None else at_least("limit", limit, k or 1)
        self.seed = at_least("seed", seed, 0)
        self.bank: Any = None  # (N, d)
        self.default_k: Any = None

    @property
    def k(self) -> Any:
        """Which neighbour counts; None before `fit` if it was not given."""
        return self.given if self.given is not None or self.default_k is None else int(self.default_k)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Keep the training images' features, or a sample of them."""
        classes = 1

        def rows() -> Iterator[Tensor]:
            nonlocal classes
            for batch in batches:
                classes = batch.logits.shape[1]
                yield directions(batch.features)

        bank = sample_rows(rows(), self.limit, self.seed)
        if (self.given or 0) > len(bank):
            raise InputError(
                f"k must be at most the number of training images, {len(bank)}; got {self.given}: pass a smaller k, or "
                "more images"
            )
        self.bank = bank
        self.default_k = max(1, min(DEFAULT_NEIGHBOUR, int(SHARE_OF_CLASS * len(bank) / classes)))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the bank and the default k; files from before it was stored have the 50th."""
        older = torch.tensor(float(min(DEFAULT_NEIGHBOUR, len(state["bank"]))))
        super().load_state({"default_k": older, **state})

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits and the distance to the k-th nearest neighbour."""
        z = directions(features)
        return Outputs(logits, kth_distance(z, self.bank.to(z.device), self.k).to(z.dtype))


def directions(z: Tensor) -> Tensor:
    """Features scaled to length 1, (B, d), in single precision at least; maps are averaged over their positions."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return F.normalize(z.flatten(2).mean(dim=2) if z.ndim > 2 else z, dim=1)


def sample_rows(parts: Iterable[Tensor], limit: int | None, seed: int) -> Tensor:
    """All rows, or a uniform sample of ``limit`` of them that never holds more in memory (reservoir sampling)."""
    if limit is None:
        return torch.cat(list(parts))
    generator = torch.Generator().manual_seed(seed)
    first: list[Tensor] = []
    full: Tensor | None = None
    count = 0
    for part in parts:
        room = max(0, limit - count)
        first += [part[:room]] if room > 0 else []
        rest, count = part[room:], count + len(part)
        if len(rest) > 0:
            full, first = torch.cat(first) if full is None else full, []
            # Row number n takes a random one of n places, and stays if that place is one of those kept (algorithm R).
            numbers = torch.arange(count - len(rest), count) + 1
            places = (torch.rand(len(rest), generator=generator, dtype=torch.float64) * numbers).long().tolist()
            for place, row in zip(places, rest, strict=True):
                if place < len(full):
                    full[place] = row
    return torch.cat(first) if full is None else full


def kth_distance(queries: Tensor, bank: Tensor, k: int) -> Tensor:
    """The Euclidean distance of each query (B, d) to the k-th nearest row of the bank (N, d), in float64."""
    single = bank.dtype == queries.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if not single or len(bank) < SCANNED or torch.compiler.is_compiling():
        return _kth_in_double(queries, bank, k)
    parts = [_kth_by_scan(part, bank, k) for part in queries.split(CHECKED)]
    return torch.cat(parts)


def _kth_by_scan(q: Tensor, bank: Tensor, k: int) -> Tensor:
    """The same, from a scan in single precision: more than k rows are compared again in double precision.

    Where a row that was left out could be among the k nearest by the rounding of the scan, the query is done in double
    precision altogether.
    """
    longest = q.new_zeros(())

    def closeness(q: Tensor, rows: Tensor) -> Tensor:
        nonlocal longest
        squares = (rows * rows).sum(dim=1)
        longest = torch.maximum(longest, squares.max())
        return 2 * q @ rows.T - (q * q).sum(dim=1, keepdim=True) - squares

    values, index = largest(q, bank, k + SPARE, closeness)  # (B, k + SPARE)
    distance: Tensor = (q[:, None].double() - bank[index].double()).norm(dim=2).kthvalue(k, dim=1).values  # (B,)
    # Sums of d products, in any order, are off by less than d units in the last place of the sum of their sizes.
    error = (q.shape[1] + 8) * torch.finfo(q.dtype).eps * (q.double().norm(dim=1) + longest.double().sqrt()) ** 2
    unsure = -(distance**2) < values[:, -1] + error
    if bool(unsure.any()):
        distance[unsure] = _kth_in_double(q[unsure], bank, k)
    return distance


def _kth_in_double(queries: Tensor, bank: Tensor, k: int) -> Tensor:
    def closeness(q: Tensor, rows: Tensor) -> Tensor:
        q, rows = q.double(), rows.double()
        return 2 * q @ rows.T - (q * q).sum(dim=1, keepdim=True) - (rows * rows).sum(dim=1)

    # |q|^2 + |b|^2 - 2 q.b cancels near zero. In float64 it still finds the k-th neighbour among near duplicates; its
    # distance is then computed from the difference, so that a training image is at 0 from itself.
    _, index = largest(queries, bank, k, closeness)
    distance: Tensor = (queries.double() - bank[index[:, -1]].double()).norm(dim=1)
    return distance


def largest(
    queries: Tensor, bank: Tensor, k: int, similarity: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The k largest similarities of each query (B, d) to rows of the bank (N, d), in order, and which rows, (B, k).

    ``similarity`` gets some queries and some rows at a time, so that memory does not grow with either.
    """
    pieces = (queries,) if torch.compiler.is_compiling() else queries.split(QUERIES)  # an exported graph takes any B
    parts = [_largest(part, bank, k, similarity) for part in pieces]
    return torch.cat([values for values, _ in parts]), torch.cat([index for _, index in parts])


def _largest(q: Tensor, bank: Tensor, k: int, similarity: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    n = q.shape[0]  # not len(q), which an exported graph would keep
    values, index = q.new_empty(n, 0), torch.empty(n, 0, dtype=torch.long, device=q.device)
    for first in range(0, len(bank), ROWS):
        rows = bank[first : first + ROWS]
        values = torch.cat([values, similarity(q, rows)], dim=1)  # (B, k + rows)
        numbers = torch.arange(first, first + len(rows), device=q.device).expand(n, -1)
        values, order = values.topk(min(k, values.shape[1]))
        index = torch.cat([index, numbers], dim=1).gather(1, order)
    return values, index
