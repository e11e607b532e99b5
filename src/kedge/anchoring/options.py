"""How an anchored network is trained: what its anchors are drawn from, and what is made to be refused."""

from dataclasses import dataclass

from torch import Tensor

from kedge.anchoring.corruption import Transform
from kedge.checks import at_least, between, one_of
from kedge.errors import InputError

DEFAULT_K = 5  # anchors in evaluation, as in the paper
MASK_TARGETS = ("label", "uniform")


@dataclass(frozen=True)
class AnchoringOptions:
    """How an anchored network is trained; the defaults are the paper's, as in `VARIANTS`.

    Args:
        corruption: T of consistency training: ``"default"`` for the five corruptions (images only), a `Corruption`, a
            function of your own on batches of anchors, or None for no consistency.
        every: T acts on every N-th batch (5 for CIFAR, 10 for ImageNet).
        per_sample: Whether T acts on a share 1 / every of the pairs of each batch instead.
        mask: Probability of reference masking: the anchor's half is zero, the residual stays.
        mask_target: What a masked pair is trained towards, its ``"label"`` or the ``"uniform"`` distribution.
        synthetic_outliers: Synthetic outliers for each training image, trained towards uniform; see
            `kedge.training.losses.SyntheticOutliers`.
        seed: Of permutations, corruptions and masks; the draw depends on it and the number of the batch alone.

    Example:
        >>> AnchoringOptions(every=10).every
        10
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
            one_of("corruption", self.corruption, ("default",))
        elif self.corruption is not None and not callable(self.corruption):
            raise InputError(f"corruption must be 'default', a function or None; got {self.corruption!r}")
        at_least("every", self.every, 1)
        between("mask", self.mask, 0, 1)
        one_of("mask_target", self.mask_target, MASK_TARGETS)
        between("synthetic_outliers", self.synthetic_outliers, 0, 1)


# How the networks are trained that the variants of `kedge.AMP` are for. The paper's and the authors' differ in reading.
VARIANTS = {
    "paper": AnchoringOptions(),
    "authors": AnchoringOptions(),
    "recommended": AnchoringOptions(per_sample=True, synthetic_outliers=0.2),
}


@dataclass(frozen=True)
class Draw:
    """What the last training batch drew: image i had ``x[permutation[i]]`` as its anchor.

    ``corrupted`` says whether T acted on the batch, and ``per_sample`` on which pairs of it, where not on all.
    """

    permutation: Tensor
    corrupted: bool
    masked: Tensor
    per_sample: Tensor | None = None
