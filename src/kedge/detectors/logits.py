"""Scores of the logits alone: MSP, MaxLogit, Entropy, Energy, GEN and KLUniform; the base of those that divide by tau.

They need one forward pass and nothing to fit. On an anchored network they score the mean logits over its anchors.
With a shape they score the logits of shaped features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, between, one_of, resolve, shape_of
from kedge.detectors.base import REASONS, Detector, Outputs
from kedge.detectors.detection import Detection
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.detectors.shaping import SHAPES, shape_named
from kedge.errors import InputError, NotReadyError

PLAIN_ABOVE = 200  # classes from which on the paper divides by tau itself


class LogitDetector(FeatureDetector):
    """A detector whose score is a function of the logits: ``score_function``, or an `of_logits` of its own.

    With a ``shape`` (activation shaping) the score is that of other logits: the last layer's for features that are
    changed first, or the logits times a factor of the features. It then reads the features as well, and needs a
    network that ends in a linear layer. Labels and probabilities are always those of the logits as they are.

    Args:
        net: See `Detector`.
        shape: Name of a shape, see `Energy`; by default the logits are scored as they are.
        percentile: Share, or two shares, in [0, 1] that the shape works with; by default those of its paper.
        head: With a shape: see `FeatureDetector`.

    Attributes:
        clip: With the shapes ``"react"`` and ``"vra"``: the value or values that it clips at, once fitted.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> Energy(net, shape="scale", percentile=0.5).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    reads = "logits"
    options: ClassVar[tuple[str, ...]] = ("shape", "percentile", "head")
    score_function: ClassVar[Callable[[Tensor], Tensor]]

    def __init__(
        self,
        net: nn.Module,
        *,
        shape: str | None = None,
        percentile: float | Sequence[float] | None = None,
        head: str | None = None,
    ) -> None:
        self.shape, self._shape = shape, None if shape is None else shape_named(shape)
        super().__init__(net, head=head)
        self.clip: Any = None
        self._percentiles: tuple[float, ...] = ()
        if self._shape is not None:
            self.reads = "features"
            self._percentiles = self._shape.checked(percentile)
            self.grid = {**self.grid, "percentile": self._shape.grid}
            self.learned = (*self.learned, "clip") if self._shape.learns else self.learned
        elif percentile is not None:
            raise InputError(f"percentile must be given with a shape, one of {', '.join(map(repr, SHAPES))}")

    @property
    def percentile(self) -> float | tuple[float, ...] | None:
        """The percentile of the shape, or its two; None without a shape."""
        return self._percentiles[0] if len(self._percentiles) == 1 else self._percentiles or None

    @property
    def reads_features(self) -> bool:
        """Whether it has a shape."""
        return self._shape is not None

    @property
    def reason(self) -> str:
        """That of the logits, also where they are shaped."""
        return REASONS["logits"]

    @property
    def reads_train(self) -> bool:
        """Whether the method, or the shape, learns from the training images."""
        return super().reads_train and (self._shape is None or self._shape.learns)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Learn the values that the shape clips at, if it does."""
        if self._shape is None or not self._shape.learns:
            super().fit_features(batches)
            return
        clip = self._shape.learn((batch.features for batch in batches), self._percentiles)
        self.clip = clip[0] if len(clip) == 1 else torch.tensor(clip, dtype=torch.float64)

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and their score, or that of the logits of shaped features."""
        return self.of_logits(self.net(x)) if self._shape is None else super().outputs(x)

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits (B, C), and their score or that of the logits of shaped features (B, d)."""
        if self._shape is None:
            return self.of_logits(logits)
        numbers = torch.as_tensor(self.clip, dtype=torch.float64).view(-1).tolist() if self._shape.learns else None
        shaped = self._shape.logits(logits, features, self.last_layer, numbers or self._percentiles)
        return replace(self.of_logits(shaped), logits=logits)

    def of_logits(self, logits: Tensor) -> Outputs:
        """The score of logits (B, C)."""
        return Outputs(logits, type(self).score_function(logits))


@register
class MSP(LogitDetector):
    """Maximum softmax probability (Hendrycks and Gimpel, ICLR 2017): ``-max softmax(z)`` of logits z.

    Use it as the baseline that other methods have to beat. https://arxiv.org/abs/1610.02136

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> MSP(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "msp"
    score_function = scores.msp


@register
class MaxLogit(LogitDetector):
    """Maximum logit (Hendrycks et al., ICML 2022): ``-max z``, which keeps the logits' scale.

    Use it in place of MSP where only logits are available. https://arxiv.org/abs/1911.11132
    """

    name = "max_logit"
    score_function = scores.max_logit


@register
class Entropy(LogitDetector):
    """Entropy of the softmax, ``-sum p log p`` with ``p = softmax(z)``: close to MSP, but of all probabilities.

    Use it in place of MSP where more than the largest probability should count.
    """

    name = "entropy"
    score_function = scores.entropy


@register
class Energy(LogitDetector):
    """Free energy of the logits (Liu et al., NeurIPS 2020): ``-logsumexp(z)``.

    It keeps the logits' scale. Use it in place of MSP for images far from the training set. https://arxiv.org/abs/2010.03759

    Activation shaping (``shape=``) changes the features h before the last layer and scores the logits that they give:

    | shape | h becomes | percentile |
    |---|---|---|
    | ``"react"`` ([Sun et al., NeurIPS 2021](https://arxiv.org/abs/2111.12797)) | h clipped at a percentile of all \
training activations | 0.9 |
    | ``"vra"`` ([Xu et al., NeurIPS 2023](https://arxiv.org/abs/2302.11716)) | h clipped at the higher percentile of \
them, zero below the lower | 0.6, 0.95 |
    | ``"ash-p"`` ([Djurisic et al., ICLR 2023](https://arxiv.org/abs/2209.09858)) | zero but where h is above the \
image's own percentile | 0.6 |
    | ``"ash-b"`` | the same, with sum(h) spread evenly over what is left | 0.65 |
    | ``"ash-s"``, ``"ash"`` | as ash-p, times exp(r) with r = sum(h) / sum of what is left | 0.9 |
    | ``"scale"`` ([Xu et al., ICLR 2024](https://arxiv.org/abs/2310.00227)) | h exp(r) | 0.85 |
    | ``"lts"`` ([Djurisic et al., 2024](https://arxiv.org/abs/2409.01175)) | h, and the logits times r^2 | 0.95 |

    Every method of the logits takes a shape: ``kedge.MSP(net, shape="scale", percentile=0.8)``. ``"ash"``,
    ``"scale"``, ``"lts"`` and ``"vra"`` are also names of methods, with the energy as in their papers. Shaping wins on
    convolutional networks of ImageNet's size and often loses on small networks and transformers. It costs no further
    pass; ReAct and VRA read the training set once. Sums are of positive activations, which behind a ReLU are all, and
    at least one activation is left. VRA's percentiles are of all activations together; its code takes them of each
    feature on CIFAR and fixed values on ImageNet.
    """

    name = "energy"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        shape: {"shape": shape} for shape in ("ash", "scale", "lts", "vra")
    }
    score_function = scores.energy


@register
class KLUniform(LogitDetector):
    """KL divergence from uniform to the softmax, negated, up to a constant: ``mean(z) - logsumexp(z)``.

    The score of AMP, without anchors. Unlike `Energy` it does not change when all logits of an image shift together.
    Use it as the unanchored baseline of AMP; where all logits of unknown images fall together, it misses what `Energy`
    sees.
    """

    name = "kl_uniform"
    score_function = scores.kl_uniform


@register
class GEN(LogitDetector):
    """Generalised entropy (Liu et al., CVPR 2023): ``sum p^gamma (1 - p)^gamma`` over the m largest probabilities p.

    With its small gamma, small probabilities count far more than in `Entropy`, and ``m`` leaves out the many tiny ones
    of hundreds of classes. Use it in a `Combined` with a distance; alone it can miss images of another kind.
    https://openaccess.thecvf.com/content/CVPR2023/html/Liu_GEN_Pushing_the_Limits_of_Softmax-Based_Out-of-Distribution_Detection_CVPR_2023_paper.html

    Args:
        net: A classifier, unanchored or anchored.
        gamma: The exponent, in (0, 1).
        m: How many of the largest probabilities are summed; all of them if there are fewer.
        shape: See `Energy`.
        percentile: See `Energy`.
        head: With a shape: see `FeatureDetector`.
    """

    name = "gen"
    options = ("gamma", "m", *LogitDetector.options)
    grid: Mapping[str, Sequence[Any]] = {"gamma": (0.01, 0.1, 0.3, 0.5), "m": (10, 50, 100)}

    def __init__(
        self,
        net: nn.Module,
        *,
        gamma: float = 0.1,
        m: int = 100,
        shape: str | None = None,
        percentile: float | Sequence[float] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(net, shape=shape, percentile=percentile, head=head)
        self.gamma = between("gamma", gamma, 0, 1, open_ends=True)
        self.m = at_least("m", m, 2)

    def of_logits(self, logits: Tensor) -> Outputs:
        """The generalised entropy of logits (B, C)."""
        return Outputs(logits, scores.gen(logits, self.gamma, self.m))


class RescoringDetector(Detector):
    """Scores logits divided by each image's tau; ``score`` and ``rescale`` are those of `kedge.AMP`.

    ``others`` are further scores by name, of something else than the rescaled logits.
    """

    options: ClassVar[tuple[str, ...]] = ("score:score_name", "rescale")

    def __init__(
        self,
        net: nn.Module,
        *,
        score: str | scores.Score,
        rescale: str | None,
        others: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
    ) -> None:
        super().__init__(net)
        self.rescale = rescale if rescale is None else one_of("rescale", rescale, (*scores.RULES, "none"))
        self.score_by, self.score_name = score, score if isinstance(score, str) else None
        self._score = None if score in others else resolve("score", score, {**scores.SCORES, **others})

    @property
    def rescores(self) -> bool:
        """Whether the score is taken of logits divided by each image's own tau."""
        return self._score is not None and self.rescale != "none"

    def rescored(self, logits: Tensor, tau: Tensor) -> Tensor:
        """The score (B,) of logits (B, C) divided as tau (B,) has it."""
        if self._score is None:
            raise InputError(f"score={self.score_by!r} is taken of per-anchor logits, not of logits and tau")
        rule = self.rescale or ("plain" if logits.shape[1] > PLAIN_ABOVE else "exp")
        score = self._score(logits if rule == "none" else scores.rescale(logits, self._divisor_of(tau), rule))
        if not isinstance(score, Tensor) or score.shape != tau.shape:
            raise InputError(f"score must map logits (B, C) to (B,), {tuple(tau.shape)} here; got {shape_of(score)}")
        return score

    def with_tau(self, detection: Detection, tau: Tensor) -> Detection:
        """The detection if images (N,) had another tau, at the same threshold: a control of `kedge.evaluate`."""
        if self.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) first")
        if tau.shape != detection.score.shape:
            raise InputError(f"tau must be {tuple(detection.score.shape)}, got {shape_of(tau)}")
        return self._decided(Outputs(detection.logits, self.rescored(detection.logits, tau), tau), self.calibration)

    def _divisor_of(self, tau: Tensor) -> Tensor:
        return tau  # each image's own, unless a method shares one
