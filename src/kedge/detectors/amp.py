"""AMP: the paper's detector."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring import tta as augmentation
from kedge.anchoring.sampling import SAMPLINGS, choose
from kedge.checks import at_least, one_of, shape_of
from kedge.data import Features, Preprocess
from kedge.detectors.base import Outputs
from kedge.detectors.logits import RescoringDetector
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError

# Scores of the per-anchor logits (K, B, C) and tau (B,), instead of the rescaled logits.
PER_ANCHOR_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tau": lambda per_anchor, tau: tau,
    "mutual_information": lambda per_anchor, tau: scores.mutual_information(per_anchor),
    "probability_deviation": lambda per_anchor, tau: scores.probability_deviation(per_anchor),
    "relative_deviation": lambda per_anchor, tau: scores.relative_deviation(per_anchor),
}

# How tau is taken of the per-anchor logits (K, B, C).
TAUS: dict[str, Callable[[Tensor], Tensor]] = {
    **{reduce: partial(scores.tau, reduce=reduce) for reduce in scores.REDUCTIONS},
    "relative": scores.relative_deviation,
}


VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"tau": "sum", "per_image": False, "tta": 1},
    "authors": {"tau": "mean", "per_image": True, "tta": 1},  # the published code
    "recommended": {"tau": "mean", "per_image": False, "tta": augmentation.VIEWS},
}


@register
class AMP(RescoringDetector):
    """Anchor-marginalised prediction (Anirudh and Thiagarajan, ACML 2022).

    ``H = mean_k f(c_k, x - c_k)``, ``tau = sum_classes std_k sigmoid(f(c_k, x - c_k))``, and the score is taken of
    ``H / (1 + exp(tau))``. Costs K forward passes through all but the anchored layer, and needs a network trained with
    anchors. Use it on networks that were trained with anchors, beside `Energy` of the same network, which takes the
    same passes.

    Args:
        net: A network from `kedge.anchor`, trained.
        variant: ``"paper"`` sums tau over classes and shares the anchors between images; ``"authors"`` takes the mean
            and draws anchors per image, as the published code does; ``"recommended"`` takes the mean, shares the
            anchors and pairs them with augmented views of the image.
        score: ``"kl_uniform"``, ``"msp"``, ``"max_logit"``, ``"entropy"``, ``"energy"`` or a function of your own on
            the rescaled logits (B, C); or a reading of the disagreement alone, see below.
        tau: ``"sum"`` or ``"mean"`` over classes, if not the variant's; or ``"relative"``, see below.
        rescale: ``"exp"``, ``"plain"`` or ``"none"``; by default ``"exp"`` up to 200 classes and ``"plain"`` above.
        shared_tau: Whether all images are divided by the mean tau of held-out images, learned in `calibrate`: a
            control for the effect of each image's own tau.
        anchors: ``"random"``, ``"balanced"`` over classes, ``"means"`` of one class each, or images (K, D, H, W) of
            your own; by default the network's if it has any, or random ones.
        tta: Augmented views of the image that the anchors are paired with in turn, if not the variant's: 1, the image
            itself; 2, its mirror image too; 6, both shifted by a pixel as well. It costs passes through the anchored
            layer only.
        k: Anchors per image, 5 by default.
        pool: Anchors to draw from if each image has its own; fewer if the training set is smaller.
        seed: Seed of the draw of anchors.

    `fit` keeps the anchors of a network that has some, unless ``anchors``, ``k`` or ``seed`` is given.

    The disagreement between anchors can be read in four ways, as ``score=``:

    | reading | over anchors | saturates |
    |---|---|---|
    | ``"tau"`` | deviation of each class's sigmoid, over classes | yes: it vanishes where all logits are far from \
zero, however much they deviate |
    | ``"probability_deviation"`` | deviation of each class's probability, summed | only where one class has all \
probability under every anchor, which a common offset of the logits does not change |
    | ``"mutual_information"`` | entropy of the mean probabilities less the mean entropy | the same; at most log K |
    | ``"relative_deviation"`` | deviation of the logits, relative to that of their mean over classes | no: neither \
offset nor scale of the logits changes it, but it is large where all mean logits are nearly equal |

    With ``tau="relative"`` the logits are divided by 1 + exp of the last.

    Example:
        >>> import torch
        >>> from kedge import anchor
        >>> images = torch.rand(50, 3, 4, 4)
        >>> net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), init="fresh")
        >>> detector = AMP(net).fit(images).calibrate(torch.rand(40, 3, 4, 4))
        >>> detector(images[:3]).is_ood.shape
        torch.Size([3])
    """

    name = "amp"
    reads_train = False  # only anchors are drawn
    reads = "per_anchor_logits"
    has_tau = True
    options = ("variant", "score:score_name", "rescale", "tau", "shared_tau", "tta")  # the network keeps the anchors
    net: Anchored

    def __init__(
        self,
        net: nn.Module,
        *,
        variant: str = "paper",
        score: str | scores.Score = "kl_uniform",
        tau: str | None = None,
        rescale: str | None = None,
        shared_tau: bool = False,
        tta: int | None = None,
        anchors: str | Tensor | None = None,
        k: int | None = None,
        pool: int = 128,
        seed: int | None = None,
    ) -> None:
        if not isinstance(net, Anchored):
            raise InputError(
                f"AMP needs an anchored network, got {type(net).__name__}; make one with kedge.anchor(net) and train "
                "it, or use a detector for unanchored networks such as kedge.Energy"
            )
        super().__init__(net, score=score, rescale=rescale, others=PER_ANCHOR_SCORES)
        defaults = VARIANTS[one_of("variant", variant, tuple(VARIANTS))]
        self.variant, self.per_image = variant, defaults["per_image"]
        self.tau = one_of("tau", tau or defaults["tau"], tuple(TAUS))
        self.tta = one_of("tta", defaults["tta"] if tta is None else tta, augmentation.CHOICES)
        if shared_tau and not super().rescores:
            raise InputError(
                f"shared_tau=True goes with a score of rescaled logits; got score={score!r} and "
                f"rescale={rescale!r}, which no tau changes"
            )
        self.shared_tau = self.learns_held_out = bool(shared_tau)
        self.learned = ("global_tau",) if shared_tau else ()
        self.global_tau: float | None = None
        if isinstance(anchors, Tensor):
            if anchors.ndim < 2 or len(anchors) < 2:
                raise InputError(f"anchors must be at least two images, (K, D, ...); got {shape_of(anchors)}")
            if k not in (None, len(anchors)) and not self.per_image:
                raise InputError(f"k must be the number of anchors given, {len(anchors)}; got {k}")
        elif anchors is not None and not (isinstance(anchors, str) and anchors in SAMPLINGS):
            came = repr(anchors) if isinstance(anchors, str) else shape_of(anchors)
            raise InputError(f"anchors must be a tensor of images or one of {SAMPLINGS}; got {came}")
        self._anchors, self._seed = anchors, seed
        self._k = k if k is None else at_least("k", k, 2)
        self._pool = at_least("pool", pool, (self._k or DEFAULT_K) if self.per_image else 2)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Freeze the anchors, drawn from the training images unless given."""
        if self.tta > 1 and not preprocess.is_image:
            raise InputError(f"tta must be 1 for inputs that are no images, {preprocess.shape}; got {self.tta}")
        self.load_state({})
        given = self._anchors is not None or self._k is not None or self._seed is not None
        if given or self.net.anchors is None or (self.net.per_image is not None) != self.per_image:
            if isinstance(train_set, Features):
                raise InputError(
                    "train_set must be images, from which AMP draws anchors, not features, which are of the network "
                    "with the anchors that it has: leave anchors, k and seed out, or fit on images"
                )
            k = self._k or DEFAULT_K
            if isinstance(self._anchors, Tensor):
                images = preprocess.batch(self._anchors)
            else:
                count = self._pool if self.per_image else k
                images = choose(train_set, preprocess, count, self._anchors or "random", self._seed or 0, at_least=k)
            self.net.set_anchors(images, per_image=k if self.per_image else None)
        if self.net.k < 2:
            raise InputError(
                "anchors must be at least two, so that they can disagree; got 1: set more with set_anchors"
            )

    def fit_held_out(self, images: Any, labels: Tensor) -> None:
        """Learn the tau that all images share: the mean over these."""
        if isinstance(images, Features):
            read = images.anchor_batches(1024, self.net.mean.device)
        else:
            read = (self.per_anchor_logits(self.as_input(x)) for x in images.split(256))
        taus = [TAUS[self.tau](per_anchor) for per_anchor in read]
        self.global_tau = float(torch.cat(taus).double().mean())

    def per_anchor_logits(self, x: Tensor, which: range | None = None) -> Tensor:
        """Logits (K, B, C) of a batch under each anchor, or under some of them by number."""
        return self.net.per_anchor_logits(x, tta=self.tta, which=which)

    def outputs(self, x: Tensor) -> Outputs:
        """The marginalised logits, tau and the score of the rescaled logits."""
        return self.of_per_anchor_logits(self.per_anchor_logits(x))

    @property
    def takes_features(self) -> bool:
        """Whether each anchor is paired with the image itself, as in `kedge.extract`."""
        return self.tta == 1

    def of_extracted(self, features: Features, size: int) -> Iterator[Outputs]:
        """The outputs of extracted per-anchor logits."""
        yield from map(self.of_per_anchor_logits, features.anchor_batches(size, self.net.mean.device))

    def of_per_anchor_logits(self, per_anchor: Tensor) -> Outputs:
        """The outputs as a function of the per-anchor logits (K, B, C): pure tensor operations."""
        logits, tau = per_anchor.mean(dim=0), TAUS[self.tau](per_anchor)
        if isinstance(self.score_by, str) and self.score_by in PER_ANCHOR_SCORES:
            return Outputs(logits, PER_ANCHOR_SCORES[self.score_by](per_anchor, tau), tau)
        return Outputs(logits, self.rescored(logits, tau), tau)

    @property
    def rescores(self) -> bool:
        """Whether the score is taken of logits divided by each image's own tau."""
        return super().rescores and not self.shared_tau

    def _divisor_of(self, tau: Tensor) -> Tensor:
        if not self.shared_tau:
            return tau
        if self.global_tau is None:
            raise NotReadyError(
                "AMP with shared_tau=True has none yet: call calibrate(held_out), which learns it from half of "
                "the images"
            )
        return torch.full_like(tau, self.global_tau)
