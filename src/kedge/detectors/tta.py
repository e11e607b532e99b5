"""Flips and crops: a control."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring.tta import VIEWS, view
from kedge.checks import at_least, one_of
from kedge.detectors.base import Cost, Detector, Outputs, passes
from kedge.detectors.registry import register
from kedge.errors import InputError


@register
class TTA(Detector):
    """Energy of the mean logits over K flipped and shifted copies of an image: what AMP's cost buys without anchors.

    A control, not a method of the field: anchoring asks a network K times about an image, and so does this, on the
    plain twin, with the first copy as the image is. Where AMP does no better than this, its gain is that of averaging
    over K passes. The copies are the same for every image, so a score does not depend on its batch. K forward passes.

    Args:
        net: Any classifier of images.
        k: Copies of an image.
        shift: The farthest that a copy is shifted, in pixels.
        flip: Whether every second copy is mirrored; not for digits.
        score: ``"energy"``, ``"msp"``, ``"max_logit"``, ``"entropy"`` or ``"kl_uniform"``, of the mean logits.
        seed: Of the shifts.
        same_as_amp: Whether to use the augmentations of ``AMP(tta=6)`` (k at most 6) instead of shift, flip and seed.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
        >>> TTA(net, shift=2).fit(torch.rand(8, 3, 8, 8)).score(torch.rand(4, 3, 8, 8)).shape
        torch.Size([4])
    """

    name = "tta"

    def __init__(
        self,
        net: nn.Module,
        *,
        k: int = 5,
        shift: int = 4,
        flip: bool = True,
        score: str = "energy",
        seed: int = 0,
        same_as_amp: bool = False,
    ) -> None:
        super().__init__(net)
        self.k, self.shift, self.flip, self.seed = at_least("k", k, 1), at_least("shift", shift, 0), bool(flip), seed
        self.score_by = one_of("score", score, tuple(scores.SCORES))
        self.same_as_amp = bool(same_as_amp)
        if self.same_as_amp and k > VIEWS:
            raise InputError(f"k must be at most {VIEWS} with same_as_amp=True, which has no more; got {k}")

    @property
    def cost(self) -> Cost:
        """A pass for each copy."""
        return Cost(forward=self.k * passes(self.net))

    def outputs(self, x: Tensor) -> Outputs:
        """The mean logits over the copies and their score."""
        if x.ndim != 4:
            raise InputError(f"x must be images (B, D, H, W) to flip and crop, got {tuple(x.shape)}")
        logits = self.net(x)
        for copy in self._copies(x):
            logits = logits + self.net(copy)
        logits = logits / self.k
        return Outputs(logits, scores.SCORES[self.score_by](logits))

    def _copies(self, x: Tensor) -> Iterator[Tensor]:
        """All but the first, which is the image as it is."""
        generator = torch.Generator().manual_seed(self.seed)
        moves = torch.randint(-self.shift, self.shift + 1, (self.k, 2), generator=generator).tolist()
        for number, (down, right) in enumerate(moves[1:], start=1):
            if self.same_as_amp:
                yield view(x, number)
            else:
                copy = shifted(x, down, right)
                yield copy.flip(3) if self.flip and number % 2 else copy

    def config(self) -> dict[str, Any]:
        """The arguments."""
        names = ("k", "shift", "flip", "seed", "same_as_amp")
        return {name: getattr(self, name) for name in names} | {"score": self.score_by}


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """Images moved by so many pixels, zeros moving in.

    Example:
        >>> shifted(torch.tensor([[[[1, 2], [3, 4]]]]), 1, 0)
        tensor([[[[0, 0],
                  [1, 2]]]])
    """
    rolled = torch.zeros_like(x)
    height, width = x.shape[2:]
    down, right = min(max(down, -height), height), min(max(right, -width), width)
    to_rows = slice(max(down, 0), height + min(down, 0))
    from_rows = slice(max(-down, 0), height + min(-down, 0))
    to_columns = slice(max(right, 0), width + min(right, 0))
    from_columns = slice(max(-right, 0), width + min(-right, 0))
    rolled[:, :, to_rows, to_columns] = x[:, :, from_rows, from_columns]
    return rolled
