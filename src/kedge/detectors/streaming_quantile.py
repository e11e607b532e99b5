"""Quantiles of a stream of numbers in memory of a fixed size."""

import math

import torch
from torch import Tensor

from kedge.checks import between, finite
from kedge.errors import NotReadyError

BINS = 2**20  # at most four times as wide as the numbers need: within 4e-6 of their range


class StreamingQuantile:
    """A histogram whose range doubles for numbers outside it, each time merging neighbouring bins.

    A quantile is that of `numpy.quantile` (linear between neighbours) to within 1e-5 of the range of the numbers; the
    smallest and the largest number are exact.
    """

    def __init__(self) -> None:
        self.count = 0
        self.smallest = math.inf
        self.largest = -math.inf
        self._bins = torch.zeros(BINS, dtype=torch.int64)
        self._low = self._span = 0.0  # the bins cover [low, low + span]

    def add(self, values: Tensor) -> None:
        """Count more numbers, in a tensor of any shape."""
        values = finite("values", values, "find out where they arise").detach().flatten().cpu().double()
        if len(values) == 0:
            return
        before = self.smallest
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        if self._span == 0:  # the numbers before were all equal: the range is that of the numbers now
            self._low, self._span = self.smallest, self.largest - self.smallest
            if self.count > 0:
                self._bins.zero_()
                self._bins[self._bin_of(torch.tensor(before, dtype=torch.float64))] = self.count
        while not self._low <= self.smallest <= self.largest <= self._low + self._span:
            merged, empty = self._bins.view(-1, 2).sum(dim=1), torch.zeros(BINS // 2, dtype=torch.int64)
            downwards = self.smallest < self._low
            self._bins = torch.cat([empty, merged] if downwards else [merged, empty])
            self._low -= self._span if downwards else 0.0
            self._span *= 2
        index = self._bin_of(values)
        self._bins.scatter_add_(0, index, torch.ones_like(index))  # a bincount would fill all bins for each batch
        self.count += len(values)

    def _bin_of(self, values: Tensor) -> Tensor:
        """The bin of each number; the first for all while they are equal."""
        return ((values - self._low) / (self._span or 1.0) * BINS).long().clamp(0, BINS - 1)

    def quantile(self, q: float) -> float:
        """The number below which a fraction ``q`` of the numbers lies."""
        between("q", q, 0, 1)
        if self.count == 0:
            raise NotReadyError("there is no quantile of no numbers: call add(values) first")
        position = q * (self.count - 1)
        low, high = self._at(math.floor(position)), self._at(math.ceil(position))
        return low + (position - math.floor(position)) * (high - low)

    def _at(self, rank: int) -> float:
        """The number of a rank from 0, with the numbers of a bin spread evenly over it."""
        if rank in (0, self.count - 1):
            return self.smallest if rank == 0 else self.largest
        upto = self._bins.cumsum(dim=0)
        bin_ = int(torch.searchsorted(upto, rank, right=True))
        inside = (rank - int(upto[bin_] - self._bins[bin_]) + 0.5) / int(self._bins[bin_])
        value = self._low + (bin_ + inside) * self._span / BINS
        return min(max(value, self.smallest), self.largest)
