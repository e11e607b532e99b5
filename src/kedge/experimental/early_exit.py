"""Early exit: AMP with two anchors for every image, and all of them only for images that might be flagged."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.detectors.amp import AMP, PER_ANCHOR_SCORES
from kedge.detectors.base import Outputs
from kedge.detectors.registry import register
from kedge.errors import FileFormatError, InputError, NotReadyError


@register
class EarlyExit(AMP):
    """AMP that stops after ``min_anchors`` for images whose score with these is at most ``exit_threshold``.

    `calibrate` learns ``exit_threshold`` from half of the held-out images, such that none of them would be flagged
    with all anchors, and sets the threshold on the other half: the coverage guarantee is that of any detector.
    Use it in place of AMP where its K passes are too many.

    Args:
        detector: AMP, which keeps its network and anchors and stays as it is; or a network from `kedge.anchor`.
        min_anchors: Anchors for every image, at least two.
        **options: Arguments of `kedge.AMP` for a network.

    Example:
        >>> from kedge import anchor
        >>> net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), init="fresh")
        >>> detector = AMP(net).fit(torch.rand(50, 3, 4, 4))
        >>> fast = EarlyExit(detector).calibrate(torch.rand(80, 3, 4, 4))
        >>> 2 <= fast.mean_passes(torch.rand(9, 3, 4, 4)) <= 5
        True
    """

    name = "early_exit"

    def __init__(self, detector: AMP | nn.Module, *, min_anchors: int = 2, **options: Any) -> None:
        if isinstance(detector, AMP):
            options = {**detector.config(), "score": detector.score_by, **options}
            options.pop("min_anchors", None)
        super().__init__(detector.net if isinstance(detector, AMP) else detector, **options)
        if self.shared_tau or self.score_by in PER_ANCHOR_SCORES:
            raise InputError("early exit needs a score of rescaled logits, and each image's own tau")
        self.min_anchors = at_least("min_anchors", min_anchors, 2)
        self.exit_threshold: float | None = None
        self.learns_held_out = True
        self._alpha = 0.05
        if isinstance(detector, AMP):
            self.preprocess, self.classes = detector.preprocess, detector.classes
            self.fitted_on = detector.fitted_on

    def calibrate(self, held_out: Any, *, alpha: float = 0.05, **options: Any) -> Self:
        """Learn ``exit_threshold`` for alpha from half of the images, and calibrate on the others."""
        self._alpha = alpha
        return super().calibrate(held_out, alpha=alpha, **options)

    @property
    def takes_features(self) -> bool:
        """False, since it leaves out passes that `kedge.extract` makes."""
        return False

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn ``exit_threshold``."""
        few, full = [], []
        with torch.no_grad():
            for x in images.split(256):
                per_anchor = self.per_anchor_logits(self.as_input(x))
                few.append(self.of_per_anchor_logits(per_anchor[: self.min_anchors]).score)
                full.append(self.of_per_anchor_logits(per_anchor).score)
        self.exit_threshold = exit_threshold(torch.cat(few), torch.cat(full), self._alpha)

    def outputs(self, x: Tensor) -> Outputs:
        """The outputs of ``min_anchors`` for images that exit early, and of all anchors for the others."""
        few = self.per_anchor_logits(x, range(self.min_anchors))
        out = self.of_per_anchor_logits(few)
        going_on, rest = ~self._exits(out.score), range(self.min_anchors, self.net.k)
        if not len(rest) or not bool(going_on.any()):
            return out
        more = self.per_anchor_logits(x[going_on], rest)
        full = self.of_per_anchor_logits(torch.cat([few[:, going_on], more]))
        pairs = zip(vars(out).values(), vars(full).values(), strict=True)
        both: list[Any] = [None if v is None else v.index_put((going_on,), others) for v, others in pairs]
        return Outputs(*both)

    def mean_passes(self, images: Any) -> float:
        """The mean number of anchors that images take, and so of passes through the network."""
        counts = []
        with torch.no_grad():
            for x, _ in self.inputs(images, self._check_fitted()):
                few = self.of_per_anchor_logits(self.per_anchor_logits(x, range(self.min_anchors)))
                counts.append(torch.where(self._exits(few.score), self.min_anchors, self.net.k))
        return float(torch.cat(counts).double().mean())

    def without_early_exit(self) -> AMP:
        """AMP with all anchors for every image, on the same network: to be calibrated."""
        options = {**super().config(), "score": self.score_by}
        detector = AMP(self.net, **options)
        detector.preprocess, detector.classes = self.preprocess, self.classes
        return detector

    def state(self) -> dict[str, Tensor]:
        """The threshold for an early exit."""
        if self.exit_threshold is None:
            return {}
        return {"exit_threshold": torch.tensor(self.exit_threshold, dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set it from a file."""
        super().load_state(state)
        self.exit_threshold = float(state["exit_threshold"]) if "exit_threshold" in state else None
        if self.exit_threshold is not None and not math.isfinite(self.exit_threshold):
            raise FileFormatError(f"exit_threshold must be finite; the file has {self.exit_threshold}")

    def config(self) -> dict[str, Any]:
        """The arguments, without the anchors, which the network keeps."""
        return {**super().config(), "min_anchors": self.min_anchors}

    def _exits(self, score: Tensor) -> Tensor:
        if self.exit_threshold is None:
            raise NotReadyError(
                "EarlyExit has no exit_threshold yet: call calibrate(held_out), which learns it from half of the images"
            )
        return score <= self.exit_threshold


def exit_threshold(few: Tensor, full: Tensor, alpha: float) -> float:
    """The score with few anchors (N,) up to which no held-out image would be flagged with all anchors, ``full`` (N,).

    It lies below the (1 - alpha) quantile of the scores with all anchors by the most that these exceed those with few.

    Example:
        >>> exit_threshold(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.5, 2.0]), 0.05)  # 1.95 - 0.5
        1.45
    """
    few, full = few.double(), full.double()
    return float(full.quantile(1 - alpha) - (full - few).max())
