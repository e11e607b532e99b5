"""How an anchored network is trained."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.anchoring.corruption import Corruption, Transform
from kedge.checks import at_least, between, one_of
from kedge.errors import InputError
from kedge.seeds import mix_seed

DEFAULT_K = 5  # anchors in evaluation, as in the paper
MASK_TARGETS = ("label", "uniform")
CORRUPTIONS = {"default": Corruption(), "authors": Corruption(joint_jitter_blur=True)}


@dataclass(frozen=True)
class AnchoringOptions:
    """How an anchored network is trained; the defaults are the paper's, as in `VARIANTS`.

    Args:
        corruption: T of consistency training: ``"default"`` for the five corruptions (images only), ``"authors"`` for
            them as in the published code, a `Corruption`, a function of your own on batches of anchors, a
            `FeatureNoise` on what reaches the anchored layer, or None for no consistency.
        every: T acts on every N-th batch (5 for CIFAR, 10 for ImageNet).
        per_sample: Whether T acts on a share 1 / every of the pairs of each batch instead.
        mask: Probability of reference masking: the anchor's half is zero, the residual stays.
        mask_target: The target of a masked pair, its ``"label"`` or the ``"uniform"`` distribution.
        synthetic_outliers: Synthetic outliers for each training image, trained towards uniform; see
            `kedge.training.losses.SyntheticOutliers`.
        seed: Seed of permutations, corruptions and masks; a draw depends on it and the number of the batch alone.
    """

    corruption: str | Transform | None = "default"
    every: int = 5
    per_sample: bool = False
    mask: float = 0.0
    mask_target: str = "label"
    synthetic_outliers: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.corruption, str):
            one_of("corruption", self.corruption, tuple(CORRUPTIONS))
        elif self.corruption is not None and not callable(self.corruption):
            raise InputError(f"corruption must be 'default', a function or None; got {self.corruption!r}")
        at_least("every", self.every, 1)
        between("mask", self.mask, 0, 1)
        one_of("mask_target", self.mask_target, MASK_TARGETS)
        between("synthetic_outliers", self.synthetic_outliers, 0, 1)
        one_of("per_sample", self.per_sample, (False, True))
        at_least("seed", self.seed, -(2**63))

    def transform(self, ndim: int) -> Transform | None:
        """T for inputs of so many dimensions; the built-in ones are for images (B, D, H, W) only."""
        if isinstance(self.corruption, str):
            return CORRUPTIONS[self.corruption] if ndim == 4 else None
        return self.corruption

    def seed_of(self, number: int) -> int:
        """The seed of the training batch with a number."""
        return mix_seed(self.seed, number)

    def draw(self, number: int, size: int, device: torch.device) -> "Draw":
        """The draws of the training batch with a number, of so many images, if T acts where it is due."""
        generator = torch.Generator().manual_seed(self.seed_of(number))

        def drawn(p: float) -> Tensor:
            return (torch.rand(size, generator=generator) < p).to(device)

        permutation, masked = torch.randperm(size, generator=generator).to(device), drawn(self.mask)
        per_sample = drawn(1 / self.every) if self.per_sample else None
        due = number % self.every == 0 if per_sample is None else bool(per_sample.any())
        return Draw(permutation, due, masked, per_sample)


# The training that goes with each variant of `kedge.AMP`.
VARIANTS = {
    "paper": AnchoringOptions(),
    "authors": AnchoringOptions(corruption="authors"),
    "recommended": AnchoringOptions(per_sample=True, synthetic_outliers=0.2),
}


@dataclass(frozen=True)
class Draw:
    """The draws of a training batch: each image's anchor, whether T acted, and on which pairs if not on all."""

    permutation: Tensor
    corrupted: bool
    masked: Tensor
    per_sample: Tensor | None = None

    def of(self, rows: slice) -> "Draw":
        """Those of some images of the batch."""
        per_sample = None if self.per_sample is None else self.per_sample[rows]
        return Draw(self.permutation[rows], self.corrupted, self.masked[rows], per_sample)
