"""AMP: the paper's detector."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring import tta as viewing
from kedge.checks import at_least, one_of, shape_of
from kedge.data import Preprocess, choose
from kedge.data.batches import CHOICES
from kedge.detectors.base import Outputs
from kedge.detectors.registry import register
from kedge.detectors.rescoring import RescoringDetector
from kedge.errors import InputError, NotReadyError

FEW = 2  # hypotheses that every image gets with anchors="auto"
SETTLED = 0.95  # share of held-out images that all hypotheses accept where two are compared with them

# Scores that read all hypotheses instead of the rescaled logits.
HYPOTHESIS_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tau": lambda hypotheses, tau: tau,
    "mutual_information": lambda hypotheses, tau: scores.mutual_information(hypotheses),
}


@dataclass(frozen=True)
class Variant:
    """A reading of the method: how tau sums up the classes, what the anchors are, and what they are held against."""

    tau: str
    per_image: bool = False
    tta: int = 1


VARIANTS = {
    "paper": Variant(tau="sum"),
    "authors": Variant(tau="mean", per_image=True),  # as the published code computes it
    "recommended": Variant(tau="mean", tta=viewing.VIEWS),
}


@register
class AMP(RescoringDetector):
    """Anchor-marginalised prediction (Anirudh and Thiagarajan, ACML 2022).

    K anchors give K hypotheses of an image. Their mean is the prediction; how far they disagree is a temperature for
    this one image; the score is taken of the logits divided by it. Costs K forward passes through all but the first
    layer, and needs a network trained with anchors.

    Args:
        net: A network from `kedge.anchor`, trained.
        variant: ``"paper"`` sums tau over classes and shares the anchors between images; ``"authors"`` takes the mean
            and draws anchors per image, as the published code does; ``"recommended"`` takes the mean over
            classes, shares the anchors and holds each against another view of the image.
        score: ``"kl_uniform"``, ``"msp"``, ``"max_logit"``, ``"entropy"``, ``"energy"`` or a function of your own on the
            rescaled logits (B, C); or ``"tau"`` or ``"mutual_information"`` of the hypotheses alone.
        tau: ``"sum"`` or ``"mean"``, where it should differ from the variant's.
        rescale: ``"exp"``, ``"plain"`` or ``"none"``; by default ``"exp"`` up to 200 classes and ``"plain"`` above.
        shared_tau: Whether all images are divided by the mean tau of held-out images, learned in `calibrate`: the
            control that tells what the tau of the single image adds.
        anchors: ``"random"``, ``"balanced"`` over classes, ``"means"`` of the images of a class each, or images
            (K, D, H, W) of your own; by default the network's where it has some, or random ones. ``"auto"``: random
            ones, of which an image is held against two, and against all only where these do not settle that it is
            accepted.
        tta: Augmented views of the image that the anchors are paired with in turn, if not the variant's:
            1, the image itself; 2, the mirrored image too, for images that are as likely to be seen either way; 6,
            both moved by a pixel as well. The mean is then more accurate, and the disagreement of the views counts
            too, at no more passes but through the first layer.
        k: Anchors per image, 5 by default.
        pool: Anchors to draw from when each image has its own; fewer where the training set is smaller.
        seed: Of the draw of anchors.

    The network keeps its anchors: where it has some already, and neither ``anchors``, ``k`` nor ``seed`` is given,
    `fit` leaves them.

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
    reads = "per_anchor_logits"
    has_tau = True
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
                "it, or use a detector for plain networks such as kedge.Energy"
            )
        super().__init__(net, score=score, rescale=rescale, others=HYPOTHESIS_SCORES)
        chosen = VARIANTS[one_of("variant", variant, tuple(VARIANTS))]
        self.variant = variant
        self.tau = one_of("tau", tau or chosen.tau, scores.REDUCTIONS)
        self.per_image = chosen.per_image
        self.shared_tau = bool(shared_tau)
        self.tta = one_of("tta", chosen.tta if tta is None else tta, viewing.CHOICES)
        self.adaptive = anchors == "auto" if isinstance(anchors, str) else False
        if self.adaptive and (shared_tau or score in HYPOTHESIS_SCORES):
            raise InputError('anchors="auto" goes with a score of rescaled logits and each image\'s own tau')
        if shared_tau and not super().rescores:
            raise InputError(
                f"shared_tau=True goes with a score of rescaled logits; got score={score!r} and "
                f"rescale={rescale!r}, which no tau changes"
            )
        self.learns_held_out = self.shared_tau or self.adaptive
        self.settled: float | None = None  # a score of two hypotheses up to which an image is accepted
        self.asked = [0, 0]  # images, and passes for them
        self.global_tau: float | None = None
        if isinstance(anchors, Tensor):
            if anchors.ndim < 2 or len(anchors) < 2:
                raise InputError(f"anchors must be at least two images, (K, D, ...); got {shape_of(anchors)}")
            if k not in (None, len(anchors)) and not self.per_image:
                raise InputError(f"k must be the number of anchors given, {len(anchors)}; got {k}")
        elif anchors is not None and anchors not in ((*CHOICES, "auto") if isinstance(anchors, str) else ()):
            came = repr(anchors) if isinstance(anchors, str) else shape_of(anchors)
            raise InputError(
                f"anchors must be a tensor of images or one of {', '.join(map(repr, (*CHOICES, 'auto')))}; got {came}"
            )
        self._anchors = "random" if self.adaptive else anchors
        self._k = k if k is None else at_least("k", k, 2)
        self._pool = at_least("pool", pool, (self._k or DEFAULT_K) if self.per_image else 2)
        self._seed = seed

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Freeze the anchors, out of the training images where none are given."""
        if self.tta > 1 and not preprocess.is_image:
            raise InputError(f"tta must be 1 for inputs that are no images, {preprocess.shape}; got {self.tta}")
        self.global_tau = self.settled = None
        self.asked = [0, 0]
        asked = self._anchors is not None or self._k is not None or self._seed is not None
        if asked or self.net.anchors is None or (self.net.per_image is not None) != self.per_image:
            k = self._k or DEFAULT_K
            if isinstance(self._anchors, Tensor):
                images = preprocess.batch(self._anchors)
            else:
                how, count = self._anchors or "random", self._pool if self.per_image else k
                images = choose(train_set, preprocess, count, how, self._seed or 0, at_least=k)
            self.net.set_anchors(images, per_image=k if self.per_image else None)
        if self.net.anchors is not None and len(self.net.anchors) < 2:
            raise InputError(
                "anchors must be at least two, so that they can disagree; got 1: set more with set_anchors"
            )

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn when two hypotheses settle it, or the one temperature of the control: the mean over the images."""
        if self.adaptive:
            self.settled = self._settling(images)
            return
        with torch.no_grad():
            parts = [self.net.per_anchor_logits(self.as_input(x), tta=self.tta) for x in images.split(256)]
        self.global_tau = float(torch.cat([scores.tau(part, self.tau) for part in parts]).double().mean())

    def state(self) -> dict[str, Tensor]:
        """The one temperature of the control, and when two hypotheses settle it."""
        learned = {"global_tau": self.global_tau, "settled": self.settled}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in learned.items() if value is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them back."""
        self.global_tau = float(state["global_tau"]) if "global_tau" in state else None
        self.settled = float(state["settled"]) if "settled" in state else None

    def outputs(self, x: Tensor) -> Outputs:
        """The marginalised logits, tau and the score of the rescaled logits."""
        if self.adaptive:
            return self._adaptive(x)
        return self.of_per_anchor_logits(self.net.per_anchor_logits(x, tta=self.tta))

    def of_per_anchor_logits(self, hypotheses: Tensor) -> Outputs:
        """What the method makes of the logits under each anchor, (K, B, C): pure tensor operations."""
        logits = hypotheses.mean(dim=0)
        tau = scores.tau(hypotheses, self.tau)
        if self._score is None:
            assert isinstance(self.score_by, str)
            return Outputs(logits, HYPOTHESIS_SCORES[self.score_by](hypotheses, tau), tau)
        return Outputs(logits, self.rescored(logits, tau), tau)

    def _adaptive(self, x: Tensor) -> Outputs:
        """What two hypotheses say of the images that they settle, and what all say of the others."""
        if self.settled is None:
            raise NotReadyError(
                'AMP with anchors="auto" does not know yet when two hypotheses are enough: call calibrate(held_out), '
                "which learns it from half of the images"
            )
        few = self.net.per_anchor_logits(x, tta=self.tta, which=range(FEW))
        out = self.of_per_anchor_logits(few)
        open_ = out.score > self.settled
        rest = range(FEW, self.net.k)
        self.asked[0] += len(x)
        self.asked[1] += FEW * len(x) + len(rest) * int(open_.sum())
        if len(rest) and bool(open_.any()):
            more = self.net.per_anchor_logits(x[open_], tta=self.tta, which=rest)
            full = self.of_per_anchor_logits(torch.cat([few[:, open_], more]))
            for mine, found in (
                (out.logits, full.logits),
                (out.score, full.score),
                (out.tau, full.tau),
            ):
                assert mine is not None
                assert found is not None
                mine[open_] = found
        return out

    def _settling(self, images: Tensor) -> float:
        """The score of two hypotheses up to which no held-out image would be flagged by all of them."""
        few, full = [], []
        with torch.no_grad():
            for x in images.split(256):
                hypotheses = self.net.per_anchor_logits(self.as_input(x), tta=self.tta)
                few.append(self.of_per_anchor_logits(hypotheses[:FEW]).score)
                full.append(self.of_per_anchor_logits(hypotheses).score)
        return settling(torch.cat(few), torch.cat(full))

    def twin(self, held_out: Any, *, anchors: str | None = "auto") -> "AMP":
        """The same detector and promise on a network of its own, which asks as few anchors as needed, or all.

        Args:
            held_out: To calibrate it on, since its scores are others.
            anchors: ``"auto"``, or None for all of them for every image.
        """
        if self.calibration is None:
            raise NotReadyError("the detector has no promise that a twin could keep: call calibrate(held_out) first")
        made = AMP(copy.deepcopy(self.net), **{**self.config(), "score": self.score_by, "anchors": anchors})
        made.preprocess, made.classes = self.preprocess, self.classes
        return made.calibrate(held_out, alpha=self.calibration.alpha, delta=self.calibration.delta)

    @property
    def mean_passes(self) -> float:
        """Passes through the network for an image: K, or with ``anchors="auto"`` the mean over all images so far."""
        images, passes = self.asked
        return passes / images if images else float(self.net.k)

    @property
    def rescores(self) -> bool:
        """Whether the score is taken of logits that each image's own temperature divides."""
        return super().rescores and not self.shared_tau

    def _divisor_of(self, tau: Tensor) -> Tensor:
        """The temperature to divide by: the image's own, or the same for all."""
        if not self.shared_tau:
            return tau
        if self.global_tau is None:
            raise NotReadyError(
                "AMP with shared_tau=True has none yet: call calibrate(held_out), which learns it from half of "
                "the images"
            )
        return torch.full_like(tau, self.global_tau)

    def config(self) -> dict[str, Any]:
        """The arguments, less the anchors themselves, which the network keeps."""
        return {
            "variant": self.variant,
            **super().config(),
            "tau": self.tau,
            "shared_tau": self.shared_tau,
            "tta": self.tta,
            # An adaptive one draws its anchors whenever it is fitted; the others keep the network's.
            **({"anchors": "auto", "k": self._k, "seed": self._seed} if self.adaptive else {"anchors": None}),
        }


def settling(two: Tensor, all_: Tensor) -> float:
    """The score of two hypotheses up to which no held-out image would be flagged by all of them.

    As far below the score that all hypotheses would flag from as their score ever exceeded that of two.

    Args:
        two: Scores of the images by two hypotheses, (N,).
        all_: By all of them, (N,).

    Example:
        >>> settling(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.5, 2.0]))  # 1.95 is what they would flag from
        1.45
    """
    two, all_ = two.double(), all_.double()
    return float(all_.quantile(SETTLED) - (all_ - two).max())
