"""Exact search for the nearest rows of a bank, in blocks so that memory stays small."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SCANNED, SPARE, CHECKED = 256, 64, 32  # the least bank that is scanned, rows beyond k and queries compared again
ROWS, QUERIES = 4096, 256  # of the bank and of the images that are compared at a time


def directions(z: Tensor) -> Tensor:
    """Features scaled to length 1, (B, d), in single precision at least; maps are averaged over their positions."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return F.normalize(z.flatten(2).mean(dim=2) if z.ndim > 2 else z, dim=1)


def kth_distance(queries: Tensor, bank: Tensor, k: int) -> Tensor:
    """The Euclidean distance of each query (B, d) to the k-th nearest row of the bank (N, d), in float64."""
    single = bank.dtype == queries.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if not single or len(bank) < max(SCANNED, k + SPARE) or torch.compiler.is_compiling():
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
        squares: Tensor = torch.linalg.vector_norm(rows, dim=1).square()
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
