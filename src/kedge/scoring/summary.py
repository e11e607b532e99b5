"""What a file of rows says: how many were flagged, of which class, and which were the most suspicious."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.scoring.rows import Row

TOP = 20
KEPT = 50_000  # scores for the plot: all of them, or a sample of so many


@dataclass(frozen=True)
class Summary:
    """Of a file of rows.

    Attributes:
        images: In all.
        errors: That could not be read.
        flagged: Of those that could.
        by_class: Images and flagged images by predicted class, the most common first.
        suspicious: The rows with the highest scores, the highest first.
        scores: Of images, for a plot; a sample where there are very many.
        is_ood: Whether these were flagged.
    """

    images: int
    errors: int
    flagged: int
    by_class: dict[str, tuple[int, int]]
    suspicious: tuple[Row, ...]
    scores: NDArray[np.float64]
    is_ood: NDArray[np.bool_]

    @property
    def share(self) -> float:
        """The share of readable images that was flagged."""
        read = self.images - self.errors
        return self.flagged / read if read else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON, without the single scores."""
        return {
            "images": self.images,
            "errors": self.errors,
            "flagged": self.flagged,
            "share_flagged": self.share,
            "by_class": {name: {"images": n, "flagged": flagged} for name, (n, flagged) in self.by_class.items()},
            "suspicious": [dict(row) for row in self.suspicious],
        }


def summarise(rows: Iterable[Row], *, top: int = TOP, seed: int = 0) -> Summary:
    """Go once through rows, in constant memory.

    Args:
        rows: From `kedge.scoring.read_rows`.
        top: How many suspicious rows to keep.
        seed: Of the sample of scores.

    Example:
        >>> row = {"path": "a.png", "label": "cat", "score": 2.0, "is_ood": True, "error": None}
        >>> summarise([row, row | {"score": 1.0, "is_ood": False}]).share
        0.5
    """
    rng = np.random.default_rng(seed)
    images = errors = 0
    count: Counter[str] = Counter()
    flagged: Counter[str] = Counter()
    highest: list[tuple[float, int, Row]] = []  # the row's number breaks ties: earlier ones stay
    scores, marks = np.empty(KEPT), np.empty(KEPT, dtype=bool)
    for row in rows:
        images += 1
        if row["error"]:
            errors += 1
            continue
        seen = images - errors - 1
        count[row["label"]] += 1
        flagged[row["label"]] += bool(row["is_ood"])
        entry = (row["score"], -images, row)
        if len(highest) < top:
            heapq.heappush(highest, entry)
        else:
            heapq.heappushpop(highest, entry)
        place = seen if seen < KEPT else int(rng.integers(seen + 1))  # reservoir sampling
        if place < KEPT:
            scores[place], marks[place] = row["score"], row["is_ood"]
    kept = min(images - errors, KEPT)
    return Summary(
        images=images,
        errors=errors,
        flagged=sum(flagged.values()),
        by_class={name: (n, flagged[name]) for name, n in count.most_common()},
        suspicious=tuple(row for _, _, row in sorted(highest, key=lambda entry: entry[:2], reverse=True)),
        scores=scores[:kept],
        is_ood=marks[:kept],
    )
