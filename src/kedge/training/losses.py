"""Losses: what a step of training minimises. A method that needs its own training brings its own loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.checks import between, one_of
from kedge.data import Preprocess
from kedge.errors import InputError
from kedge.models.classifier import Classifier
from kedge.training.synthetic_outliers import MAKERS, synthetic_outliers


@dataclass(frozen=True)
class Step:
    """What an loss sees of a step of training.

    Attributes:
        net: The network, in training mode: for its buffers and parts.
        forward: The network as it is to be called, which several processes may share.
        x: Images (B, D, ...) in [0, 1].
        y: Their classes (B,).
        index: Their numbers in the training set (B,), or None where a data loader hides them.
        outliers: Images beside the training set, (B', D, ...), or None.
        outlier_index: Their numbers in their set.
        anchors: What an anchored network draws anchors from: keyword arguments of its forward.
        done: The share of the training that is behind, from 0 to 1.
        epoch: From 0.
        images: In the training set.
        label_smoothing: Of the recipe.
        generator: Source of the loss's random numbers, seeded by the run's seed and the step, alike in all processes.
    """

    net: Classifier
    forward: Callable[..., Any]
    x: Tensor
    y: Tensor
    index: Tensor | None
    outliers: Tensor | None
    outlier_index: Tensor | None
    anchors: Mapping[str, Any]
    done: float
    epoch: int
    images: int
    label_smoothing: float
    generator: torch.Generator = field(default_factory=torch.Generator)

    def logits(self) -> Tensor:
        """The logits of ``x``, each under an anchor drawn for it where the network is anchored."""
        return self.fitting(self.forward(self.x, **self.anchors))

    def fitting(self, logits: Tensor) -> Tensor:
        """Return the logits of ``x`` after checking that the labels lie within their classes."""
        low, high, classes = int(self.y.min()), int(self.y.max()), logits.shape[1]
        if low < 0 or high >= classes:
            raise InputError(
                f"labels must lie in 0..{classes - 1}, since the network has {classes} outputs; got {low}..{high}: "
                f"build the network with classes={high + 1}, or number from 0"
            )
        return logits

    def targets(self, beside: int = 0) -> Tensor:
        """What to train the logits of ``x`` towards: classes, or probabilities where pairs are masked.

        Args:
            beside: Images that were in the batch behind those of ``x``, and have no classes.
        """
        if isinstance(self.net, Anchored) and self.net.options.mask > 0:
            return self.net.targets(torch.cat([self.y, self.y.new_zeros(beside)]))[: len(self.y)]
        return self.y


@dataclass(frozen=True)
class StepLoss:
    """What to minimise, and the logits (B, C) of the step's images, for its accuracy."""

    value: Tensor
    logits: Tensor


class Loss(ABC):
    """A loss, and the state that it keeps between steps.

    Attributes:
        name: For records and errors.
        outliers_per_image: How many images of the ``outliers`` come with each training image; 0 where none are used.
        unanchored_only: Whether an anchored network cannot be trained so.
    """

    name: ClassVar[str]
    outliers_per_image: int = 0
    unanchored_only: ClassVar[bool] = False

    @abstractmethod
    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""

    def check(self, net: Classifier) -> None:  # noqa: B027
        """Raise before the training begins if the network does not fit."""

    def begin_epoch(self, net: Classifier, data: Any, outliers: Any, preprocess: Preprocess, epoch: int) -> None:  # noqa: B027
        """Look at the whole of the data before an epoch; not called again when an epoch is resumed."""

    def after_step(self, step: Step) -> None:  # noqa: B027
        """Update what is not learned by gradients, after the optimizer's step."""

    def config(self) -> dict[str, Any]:
        """The arguments, as plain data for records."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What must be kept for a run that goes on after a crash, beside the network."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take back what `state` gave."""


class CrossEntropy(Loss):
    """The cross-entropy of the labels: how every network is trained unless its method needs more."""

    name = "cross-entropy"

    def loss(self, step: Step) -> StepLoss:
        """The mean cross-entropy of a batch."""
        logits = step.logits()
        return StepLoss(F.cross_entropy(logits, step.targets(), label_smoothing=step.label_smoothing), logits)


def loss_of(net: Classifier) -> Loss:
    """What a network is trained by where nobody says otherwise.

    Example:
        >>> from kedge import anchor
        >>> loss_of(anchor(torch.nn.Linear(4, 2), variant="recommended")).config()["share"]
        0.2
    """
    made = net.options.synthetic_outliers if isinstance(net, Anchored) else 0.0
    return SyntheticOutliers(made) if made else CrossEntropy()


class LogitNorm(Loss):
    """Cross-entropy of logits of one length (Wei et al., ICML 2022), so that confidence cannot make them grow.

    Detectors read the logits as they are: the length that training left free is what tells known from unknown.

    Args:
        temperature: What the logits of length one are divided by.

    Example:
        >>> LogitNorm().config()
        {'temperature': 0.04}
    """

    name = "logit norm"

    def __init__(self, temperature: float = 0.04) -> None:
        self.temperature = between("temperature", temperature, 0, float("inf"), open_ends=True)

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        logits = step.logits()
        fit = F.cross_entropy(
            F.normalize(logits, dim=1) / self.temperature, step.targets(), label_smoothing=step.label_smoothing
        )
        return StepLoss(fit, logits)

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {"temperature": self.temperature}


class SyntheticOutliers(Loss):
    """Cross-entropy, and the uniform distribution for outliers that are made of the batch's own images.

    See `kedge.training.synthetic_outliers`. An anchored network may get one of them as an anchor.

    Args:
        share: Made images for each training image.
        weight: Of their loss, the mean cross-entropy of the uniform distribution.
        kinds: Names of `kedge.training.synthetic_outliers.MAKERS`.

    Example:
        >>> SyntheticOutliers(share=0.1).config()["weight"]
        0.5
    """

    name = "made outliers"

    def __init__(self, share: float = 0.2, weight: float = 0.5, kinds: Sequence[str] = tuple(MAKERS)) -> None:
        self.share = between("share", share, 0, 1)
        self.weight = between("weight", weight, 0, float("inf"))
        self.kinds = tuple(one_of("kinds", kind, tuple(MAKERS)) for kind in kinds)
        if not self.kinds:
            raise InputError(f"kinds must name at least one of {', '.join(MAKERS)}; got none")

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        count = round(self.share * len(step.x))
        chosen = torch.randperm(len(step.x))[:count].to(step.x.device)
        # In one pass, so that batch norms see both: in passes of their own they would tell them apart.
        logits = step.forward(torch.cat([step.x, synthetic_outliers(step.x[chosen], self.kinds)]))
        known, made = logits.tensor_split([len(step.x)])
        targets = step.targets(beside=len(made))
        fit = F.cross_entropy(step.fitting(known), targets, label_smoothing=step.label_smoothing)
        return StepLoss(fit - self.weight * made.log_softmax(dim=1).mean() if len(made) else fit, known)

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {"share": self.share, "weight": self.weight, "kinds": list(self.kinds)}
