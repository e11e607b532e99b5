"""A summary of rows: how many were flagged, by class, and which were the most suspicious."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.scoring.rows import Row

TOP = 20
SAMPLE = 50_000  # scores that are kept for the plot


@dataclass(frozen=True)
class RowSummary:
    """Counts over a file of rows."""

    images: int
    errors: int  # images that could not be read
    flagged: int
    by_class: dict[str, tuple[int, int]]  # images and flagged images by predicted class, the most common first
    suspicious: tuple[Row, ...]  # the rows with the highest scores, the highest first
    scores: NDArray[np.float64]  # for a plot; a random sample if there are very many

    @property
    def share(self) -> float:
        """The share of readable images that was flagged."""
        readable = self.images - self.errors
        return self.flagged / readable if readable else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON, without the single scores."""
        by_class = {name: {"images": n, "flagged": flagged} for name, (n, flagged) in self.by_class.items()}
        counts = {name: getattr(self, name) for name in ("images", "errors", "flagged")}
        suspicious = list(map(dict, self.suspicious))
        return counts | {"share_flagged": self.share, "by_class": by_class, "suspicious": suspicious}


def summarize_rows(rows: Iterable[Row], *, top: int = TOP, seed: int = 0) -> RowSummary:
    """Go through rows once, in constant memory.

    Args:
        rows: From `kedge.scoring.read_rows`.
        top: Number of suspicious rows to keep.
        seed: Random seed of the sample of scores.

    Example:
        >>> row = {"name": "a.png", "label": 0, "class": "cat", "score": 2.0, "is_ood": True, "error": None}
        >>> summarize_rows([row, row | {"score": 1.0, "is_ood": False}]).share
        0.5
    """
    rng = np.random.default_rng(seed)
    images = errors = 0
    count: Counter[str] = Counter()
    flagged: Counter[str] = Counter()
    highest: list[tuple[float, int, Row]] = []  # the row's number breaks ties in favour of earlier ones
    scores = np.empty(SAMPLE)
    for row in rows:
        images += 1
        if row["error"]:
            errors += 1
            continue
        predicted = class_of(row)
        count[predicted] += 1
        flagged[predicted] += bool(row["is_ood"])
        heapq.heappush(highest, (row["score"], -images, row))
        if len(highest) > top:
            heapq.heappop(highest)
        seen = images - errors - 1
        place = seen if seen < SAMPLE else int(rng.integers(seen + 1))  # reservoir sampling
        if place < SAMPLE:
            scores[place] = row["score"]
    return RowSummary(
        images=images,
        errors=errors,
        flagged=sum(flagged.values()),
        by_class={name: (n, flagged[name]) for name, n in count.most_common()},
        suspicious=tuple(row for _, _, row in sorted(highest, key=lambda entry: entry[:2], reverse=True)),
        scores=scores[: images - errors],
    )


def class_of(row: Row) -> str:
    """The name of a row's predicted class, or its number if it has no name."""
    return str(row["label"]) if row["class"] is None else str(row["class"])
