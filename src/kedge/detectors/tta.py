"""Test-time augmentation: a baseline."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring.tta import VIEWS, view
from kedge.checks import at_least, one_of
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.registry import register
from kedge.errors import InputError


@register
class TTA(Detector):
    """Test-time augmentation: energy of the mean logits over K flipped and shifted copies of an image.

    Use it as the baseline of AMP, which also takes K passes for an image: this does so on the unanchored network, with
    the unchanged image as the first copy. Where AMP does no better than this, its gain is that of averaging over K
    passes. The augmentations are the same for every image, so a score does not depend on its batch. K forward passes.

    Args:
        net: Any classifier of images.
        k: Copies of an image.
        shift: The largest shift of a copy, in pixels.
        flip: Whether every second copy is mirrored; not for digits.
        score: ``"energy"``, ``"msp"``, ``"max_logit"``, ``"entropy"`` or ``"kl_uniform"``, of the mean logits.
        seed: Random seed of the shifts.
        same_as_amp: Whether to use the augmentations of ``AMP(tta=6)`` (k at most 6) instead of shift, flip and seed.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
        >>> TTA(net, shift=2).fit(torch.rand(8, 3, 8, 8)).score(torch.rand(4, 3, 8, 8)).shape
        torch.Size([4])
    """

    name = "tta"
    reads = "passes"
    options = ("k", "shift", "flip", "score:score_by", "seed", "same_as_amp")

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
        return Cost(forward=self.k * self.net.passes)

    def outputs(self, x: Tensor) -> Outputs:
        """The mean logits over the copies and their score."""
        if x.ndim != 4:
            raise InputError(f"x must be images (B, D, H, W) to flip and crop, got {tuple(x.shape)}")
        logits = sum((self.net(copy) for copy in self._copies(x)), self.net(x)) / self.k
        return Outputs(logits, scores.SCORES[self.score_by](logits))

    def _copies(self, x: Tensor) -> Iterator[Tensor]:
        """All but the first, which is the image itself."""
        generator = torch.Generator().manual_seed(self.seed)
        shifts = torch.randint(-self.shift, self.shift + 1, (self.k, 2), generator=generator).tolist()
        for number, (down, right) in enumerate(shifts[1:], start=1):
            copy = view(x, number) if self.same_as_amp else shift_image(x, down, right)
            yield copy.flip(3) if self.flip and number % 2 and not self.same_as_amp else copy


def shift_image(x: Tensor, down: int, right: int) -> Tensor:
    """Images (B, D, H, W) shifted by some pixels, with zeros moving in."""
    height, width = x.shape[2:]
    down, right = min(max(down, -height), height), min(max(right, -width), width)
    return F.pad(x, (right, -right, down, -down))
