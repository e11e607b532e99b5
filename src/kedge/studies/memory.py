"""Caching per-anchor logits, which rows of a table on the same network, anchors and images share; and their time."""

import hashlib
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.models.classifier import Classifier, evaluating


class Memory:
    """Per-anchor logits of batches of images, and the seconds that computing them took.

    Attributes:
        saved: Seconds that cached logits would have taken, since `start`.
    """

    def __init__(self) -> None:
        self._logits: dict[Hashable, tuple[Tensor, float]] = {}
        self.saved = 0.0

    def start(self) -> None:
        """Reset `saved`."""
        self.saved = 0.0

    def attach(self, net: Anchored) -> None:
        """Let a network use the cache; its weights must be those of all other networks with it."""
        compute = net.marginalise

        def cached(
            x: Tensor, layers: Sequence[str] = (), like: Tensor | None = None, **options: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            if layers or torch.is_grad_enabled():
                return compute(x, layers, like, **options)
            settings = tuple((name, str(value)) for name, value in sorted(options.items()))
            key = (_digest(net.anchors), net.per_image, _digest(x), _digest(like), settings)
            if key in self._logits:
                self.saved += self._logits[key][1]
            else:
                started = time.perf_counter()
                logits = compute(x, (), like, **options)[0]
                self._logits[key] = logits, time.perf_counter() - started
            return self._logits[key][0], {}

        net.marginalise = cached  # type: ignore[method-assign]


def pass_seconds(net: Classifier, images: Tensor) -> float:
    """Seconds of a network's pass for one image, timed on a batch."""
    with evaluating(net), torch.no_grad():
        x = net.as_input(images)
        net(x)  # the first pass also prepares memory
        started = time.perf_counter()
        net(x).cpu()
    return (time.perf_counter() - started) / len(images)


def _digest(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).digest()
