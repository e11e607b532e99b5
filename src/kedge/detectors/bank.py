"""BankDetector: methods that compare an image with the training images whose features they keep."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge.checks import at_least, one_of
from kedge.detectors.features import FeatureDetector
from kedge.detectors.inverted_file import InvertedFile, build_inverted_file
from kedge.detectors.search import directions
from kedge.errors import FileFormatError
from kedge.io.artifact import part as part_of

INDEXES = ("auto", "exact", "ivf")
JOINED = 2**26  # bytes that are joined at a time, so that freed ones go back to the system


class BankDetector(FeatureDetector):
    """A detector that compares an image's features with a bank of those of training images.

    Args:
        net: See `Detector`.
        limit: The most training images to keep, a random sample; None for all.
        seed: Random seed of the sample and of the index.
        index: ``"exact"`` compares an image with the whole bank, ``"ivf"`` with the rows of an inverted file that are
            likely the nearest; ``"auto"`` is ``"ivf"`` for banks of `INDEXED` rows and more.
        probes: Cells of the inverted file that an image is compared with; by default as many as it takes to find 99 %
            of the nearest rows, measured in `fit` on rows of the bank.
        head, layer: See `FeatureDetector`.
    """

    distances: ClassVar[bool]  # whether the nearest rows are those at the least distance, or with the largest product
    INDEXED: ClassVar[int] = 50_000
    learned: tuple[str, ...] = ("bank",)
    k: Any

    def __init__(
        self,
        net: nn.Module,
        *,
        limit: int | None,
        seed: int,
        index: str,
        probes: int | None,
        head: str | None = None,
        layer: str | None = None,
    ) -> None:
        super().__init__(net, head=head, layer=layer)
        self.limit = limit if limit is None else at_least("limit", limit, 1)
        self.seed = at_least("seed", seed, 0)
        self.index = one_of("index", index, INDEXES)
        self.given_probes = probes if probes is None else at_least("probes", probes, 1)
        self.bank: Any = None  # (N, d)
        self.inverted_file: InvertedFile | None = None

    @property
    def probes(self) -> int | None:
        """Cells that an image is compared with; None if it is compared with the whole bank."""
        return None if self.inverted_file is None else self.inverted_file.probes

    @property
    def recall(self) -> float:
        """The share of the k nearest rows that the index finds, measured in `fit`; 1 without an index."""
        return 1.0 if self.inverted_file is None else self.inverted_file.recall

    def rows(self, features: Tensor, logits: Tensor) -> Tensor:
        """What the bank keeps of images with features (B, d) and logits (B, C): by default the directions, (B, d)."""
        return directions(features)

    def build_index(self) -> None:
        """Build the index of the bank, if it has one."""
        self.inverted_file = None
        if self.index == "ivf" or (self.index == "auto" and len(self.bank) >= self.INDEXED):
            self.inverted_file = build_inverted_file(
                self.bank, self.k, distances=self.distances, probes=self.given_probes, seed=self.seed
            )

    def compared(self, queries: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The result (B, ...) of a comparison of queries (B, d) with the bank, or of each with its candidates."""
        bank = self.bank.to(queries.device)
        if self.inverted_file is None:
            return compare(queries, bank)
        index = self.inverted_file.to(queries.device)
        return torch.cat([compare(q[None], bank.index_select(0, index.candidates(q))) for q in queries])

    def state(self) -> dict[str, Tensor]:
        """What was learned, with the index."""
        index = {} if self.inverted_file is None else self.inverted_file.state()
        return super().state() | {f"index.{name}": value for name, value in index.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; files from before there was an index have none, and are compared exactly."""
        super().load_state(state)
        index = part_of(state, "index.")
        if self.index == "ivf" and not index:
            raise FileFormatError('the index must be in the file, since the detector was built with index="ivf"')
        self.inverted_file = InvertedFile.of_state(index, self.bank) if index else None


def sample_rows(parts: Iterable[Tensor], limit: int | None, seed: int) -> Tensor:
    """All rows, or a uniform sample of ``limit`` of them that never holds more in memory (reservoir sampling)."""
    generator = torch.Generator().manual_seed(seed)
    rest = iter(parts)
    left: list[Tensor] = []  # of the part that fills the sample

    def first() -> Iterator[Tensor]:
        count = 0
        for part in rest:
            room = len(part) if limit is None else limit - count
            count += len(part)
            yield part[:room]
            if limit is not None and count >= limit:
                left.append(part[room:])
                return

    rows = _joined(first())
    count = len(rows)
    for part in chain((left.pop() for _ in range(len(left))), rest):
        # Row number n takes a random one of n places, and stays if that place is one of those kept (algorithm R).
        numbers = torch.arange(count, count + len(part)) + 1
        places = (torch.rand(len(part), generator=generator, dtype=torch.float64) * numbers).long().tolist()
        for place, row in zip(places, part, strict=True):
            if place < len(rows):
                rows[place] = row
        count += len(part)
    return rows


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """All rows in one tensor, without a second copy of a large one."""
    blocks: list[Tensor] = []
    recent: list[Tensor] = []
    size = 0
    for part in parts:
        recent.append(part)
        size += part.nbytes
        if size >= JOINED:
            blocks, recent, size = [*blocks, torch.cat(recent)], [], 0
    if not blocks:
        return torch.cat(recent)
    blocks = [*blocks, torch.cat(recent)] if recent else blocks
    del recent
    joined = blocks[0].new_empty(sum(map(len, blocks)), *blocks[0].shape[1:])  # takes memory as it is filled
    end = len(joined)
    while blocks:
        block = blocks.pop()
        joined[end - len(block) : end] = block
        end -= len(block)
    return joined
