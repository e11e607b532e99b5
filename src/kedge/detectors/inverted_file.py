"""An inverted file: finds nearly all of the nearest rows of a large bank while it reads a small part of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kedge.detectors.kmeans import kmeans, nearest
from kedge.detectors.search import SPARE, largest
from kedge.errors import FileFormatError

WIDTH = 256  # dimensions of the projection, the last for the rows' lengths
SAMPLE = 2**16  # rows that projection and cells are learned from
TESTED = 256  # rows that the recall is measured on
STEPS = 10  # of k-means
BLOCK = 2**14  # rows that are read at a time
RECALL = 0.99  # share of the k nearest rows that is found
WEIGHT = 4  # how much longer a number of a candidate takes than one of a projection

NUMBERS = ("probes", "count", "least", "recall")


@dataclass(frozen=True, eq=False)
class InvertedFile:
    """Rows by cells of k-means, and their projections to few dimensions; the rows themselves stay where they are.

    A query is compared with the centres of cells, with the projections of the rows in the ``probes`` nearest cells, and
    the ``count`` rows that are best by these are its candidates, to be compared in full. Every query is computed alone,
    so its candidates do not depend on the batch.

    Args:
        projection: The directions that keep most of the products between rows, (d, p).
        centres: The mean of the projected rows of each cell, (M, p + 1).
        starts: Where each cell starts and the last one ends, (M + 1,).
        order: The numbers of the rows, cell by cell, (N,).
        rows: Their projections in that order, (N, p + 1); the last column is ``-|x|^2 / 2`` for distances, or 0.
        probes: How many cells a query is compared with.
        count: How many rows of them are candidates, at most.
        least: How many rows are candidates at least, for which further cells are probed.
        recall: The share of the k nearest rows that were candidates, of rows of the bank without themselves.
    """

    projection: Tensor
    centres: Tensor
    starts: Tensor
    order: Tensor
    rows: Tensor
    probes: int
    count: int
    least: int
    recall: float
    _cells: tuple[Tensor, ...] = field(init=False, repr=False)  # the rows of each

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cells", self.rows.split(self.starts.diff().tolist()))

    def __repr__(self) -> str:
        cells = len(self.centres)
        return f"InvertedFile({len(self.rows):,} rows, {self.probes} of {cells} cells, recall {self.recall:.4f})"

    def to(self, device: torch.device) -> "InvertedFile":
        """The same on a device."""
        if self.rows.device == device:
            return self
        parts: dict[str, Any] = {name: value.to(device) for name, value in self._tensors().items()}
        return replace(self, **parts)

    def candidates(self, query: Tensor) -> Tensor:
        """The numbers of the candidates for a query (d,), the best by their projections first."""
        q = self._projected(query)
        closeness, probes = self.centres @ q, self.probes
        while True:
            ranked = closeness.topk(probes).indices
            cells = [self._cells[cell] for cell in ranked.tolist()]
            if sum(map(len, cells)) >= self.least:
                break
            probes = min(2 * probes, len(self.centres))
        products = torch.cat([cell.mv(q) for cell in cells])
        best = products.topk(min(self.count, len(products))).indices
        first, last = self.starts[ranked], self.starts[ranked + 1]
        ends = (last - first).cumsum(0)
        shift = last - ends  # from places among the products to those of `rows`
        return self.order[best + shift[torch.searchsorted(ends, best, right=True)]]

    def state(self) -> dict[str, Tensor]:
        """All as tensors."""
        numbers = {name: torch.tensor(float(getattr(self, name)), dtype=torch.float64) for name in NUMBERS}
        return self._tensors() | numbers

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], bank: Tensor) -> "InvertedFile":
        """What `state` returned, checked against the bank."""
        n, d = bank.shape
        m, p = len(state["centres"]), state["projection"].shape[1]
        shapes = {"projection": (d, p), "centres": (m, p + 1), "starts": (m + 1,), "order": (n,), "rows": (n, p + 1)}
        for name, shape in shapes.items():
            whole = name in ("starts", "order")
            if state[name].shape != shape or state[name].dtype != (torch.int64 if whole else torch.float32):
                raise FileFormatError(f"index.{name} must be {shape}; got {state[name].dtype} {state[name].shape}")
        starts, order = state["starts"], state["order"]
        if int(starts[0]) != 0 or int(starts[-1]) != n or bool((starts.diff() < 0).any()):
            raise FileFormatError(f"index.starts must rise from 0 to the {n} rows of the bank")
        if not torch.equal(order.sort().values, torch.arange(n)):
            raise FileFormatError(f"index.order must hold each of the {n} rows of the bank once")
        probes, count, least, recall = (float(state[name]) for name in NUMBERS)
        if not (1 <= probes <= m and 1 <= least <= count <= n and 0 <= recall <= 1):
            raise FileFormatError(f"index must probe 1 to {m} cells for 1 to {n} rows; got {probes} and {count}")
        tensors = {name: state[name] for name in shapes}
        return cls(**tensors, probes=int(probes), count=int(count), least=int(least), recall=recall)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("projection", "centres", "starts", "order", "rows")}

    def _projected(self, query: Tensor) -> Tensor:
        q = query.to(self.projection.dtype) @ self.projection
        return torch.cat([q, q.new_ones(1)])  # (p + 1,)


def build_inverted_file(
    bank: Tensor, k: int, *, distances: bool, probes: int | None = None, seed: int = 0
) -> InvertedFile:
    """An inverted file of a bank (N, d), which is neither copied nor changed, for the k nearest rows.

    Cells are probed until the recall on rows of the bank, each without itself, is at least `RECALL`.

    Args:
        bank: (N, d), N at least k.
        k: How many rows are looked for.
        distances: Whether the nearest rows are those at the least Euclidean distance, or with the largest product.
        probes: Cells that a query is compared with; by default as many as the recall takes.
        seed: Random seed of the rows that it is learned from and measured on.
    """
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bank), generator=draw).to(bank.device)
    tested = min(TESTED, len(bank) // 2)
    sample = bank[order[tested:][:SAMPLE].sort().values].float()
    projection = principal(sample, WIDTH - 1)
    rows = torch.cat([_reduced(part.float(), projection, distances) for part in bank.split(BLOCK)])  # (N, p + 1)
    cells = min(len(sample), round(2 * math.sqrt(len(bank))))
    _, centres = kmeans(sample @ projection, cells, seed=seed, steps=STEPS)
    groups = torch.cat([nearest(part[:, :-1], centres) for part in rows.split(BLOCK)])
    places = groups.argsort(stable=True)
    counts = torch.bincount(groups, minlength=cells)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = rows[places]
    sums = torch.zeros(cells, rows.shape[1], dtype=torch.float64, device=rows.device)
    for first in range(0, len(rows), BLOCK):
        part = slice(first, first + BLOCK)
        sums.index_add_(0, groups[places[part]], rows[part].double())
    means = sums / counts.clamp(min=1)[:, None]
    means[counts == 0, -1] = -math.inf  # an empty cell comes last
    whole = InvertedFile(
        projection, means.float(), starts, places, rows, cells, count=len(bank), least=min(k, len(bank)), recall=1.0
    )
    return _tuned(whole, bank, order[:tested], k, distances, probes)


def _tuned(
    whole: InvertedFile, bank: Tensor, rows: Tensor, k: int, distances: bool, probes: int | None
) -> InvertedFile:
    """The same with as few probes and candidates as find most of the nearest of some rows (T,) of the bank."""

    def closeness(q: Tensor, rows: Tensor) -> Tensor:
        products = q @ rows.T
        return products - rows.square().sum(dim=1) / 2 if distances else products

    if len(rows) == 0:
        return whole
    _, numbers = largest(bank[rows], bank, k + 1, closeness)
    itself = (numbers == rows[:, None]).int()
    numbers = numbers.gather(1, itself.argsort(dim=1, stable=True))[:, :-1]  # (T, k), without the row itself
    place_of = torch.empty_like(whole.order).index_copy_(0, whole.order, torch.arange(len(bank), device=bank.device))
    in_bank, in_cells = [], []
    for row, wanted in zip(rows, numbers, strict=True):
        q = whole._projected(bank[row])
        places, products = place_of[wanted], whole.rows @ q
        levels, order = products[places].sort()
        above = torch.bincount(torch.bucketize(products, levels), minlength=len(levels) + 1)  # by how many levels
        larger = above.flip(0).cumsum(0).flip(0)[1:]  # how many products are larger than each level
        in_bank.append(torch.empty_like(larger).index_copy_(0, order, larger))
        own = torch.searchsorted(whole.starts, places, right=True) - 1
        in_cells.append((whole.centres @ q).argsort(descending=True, stable=True).argsort()[own])
    cells = len(whole.centres)
    rank, cell = torch.stack(in_bank).flatten(), torch.stack(in_cells).flatten()  # from 0
    plans = []
    for candidates in _growing(k + SPARE, len(bank)):
        needed = cell.masked_fill(rank >= candidates, cells).sort().values  # probes that find each row, less one
        enough = min(cells, int(needed[math.ceil(RECALL * len(needed)) - 1]) + 1)
        tried = enough if probes is None else min(probes, cells)
        recall = float((needed < tried).double().mean())
        cost = len(bank) * tried / cells * whole.rows.shape[1] + WEIGHT * candidates * bank.shape[1]
        plans.append((math.ceil(100 * max(0, RECALL - recall)), cost, tried, candidates, recall))
    _, _, tried, candidates, recall = min(plans)
    return replace(whole, probes=tried, count=candidates, recall=recall)


def _growing(first: int, last: int) -> list[int]:
    """Whole numbers from the first to the last, each about a quarter larger than the one before."""
    numbers = [min(first, last)]
    while numbers[-1] < last:
        numbers.append(min(last, numbers[-1] * 5 // 4 + 1))
    return numbers


def principal(sample: Tensor, width: int) -> Tensor:
    """The directions (d, p) on which rows (N, d) keep most of their products: the largest of their second moments."""
    moments = torch.zeros(sample.shape[1], sample.shape[1], dtype=torch.float64, device=sample.device)
    for part in sample.split(BLOCK // 4):
        moments += part.double().T @ part.double()
    directions: Tensor = torch.linalg.eigh(moments).eigenvectors[:, -width:].flip(1)
    return directions.float().contiguous()


def _reduced(rows: Tensor, projection: Tensor, distances: bool) -> Tensor:
    lengths = rows.square().sum(dim=1, keepdim=True)
    return torch.cat([rows @ projection, -lengths / 2 if distances else torch.zeros_like(lengths)], dim=1)
