"""Losses: what a training step minimizes. A method with its own training brings a `Loss` of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.checks import between, one_of
from kedge.data import Preprocess
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.head import head_name
from kedge.training.synthetic_outliers import KINDS, synthetic_outliers


@dataclass(frozen=True)
class Step:
    """The inputs of a loss in one training step.

    Attributes:
        net: The network in training mode, for its buffers and layers.
        forward: The network to call; with several processes a wrapper of ``net``.
        x: Images (B, D, ...) in [0, 1].
        y: Class labels (B,).
        index: Indices of ``x`` in the training set (B,), or None if a data loader does not give them.
        outliers: Outlier images (B', D, ...), or None.
        outlier_index: Their indices in the outlier set.
        anchors: Keyword arguments of an anchored network's forward; empty for an unanchored network.
        done: Fraction of the training that is done, from 0 to 1.
        epoch: Counted from 0.
        images: Number of training images.
        label_smoothing: From the recipe.
        among: The images of all processes in this step, of which ``x`` are the rows from ``first`` on; None for ``x``.
        first: See ``among``.
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
    among: Tensor | None = None
    first: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)

    def logits(self) -> Tensor:
        """Logits of ``x``; an anchored network draws one anchor per image."""
        return self.fitting(self.forward(self.x, **self.anchors))

    def fitting(self, logits: Tensor) -> Tensor:
        """Return the logits of ``x`` after checking that the labels are among their classes."""
        low, high, classes = int(self.y.min()), int(self.y.max()), logits.shape[1]
        if low < 0 or high >= classes:
            raise InputError(
                f"labels must lie in 0..{classes - 1}, since the network has {classes} outputs; got {low}..{high}: "
                f"build the network with classes={high + 1}, or number from 0"
            )
        return logits

    def targets(self, is_x: Tensor | None = None) -> Tensor:
        """Training targets of ``x``: labels, or probabilities (B, C) if the network masks anchors.

        Args:
            is_x: Mask of the rows of ``x`` in the last forward pass, if other images were in it too.
        """
        if not (isinstance(self.net, Anchored) and self.net.options.mask > 0):
            return self.y
        if is_x is None:
            return self.net.targets(self.y)
        labels = self.y.new_zeros(len(is_x))
        labels[is_x] = self.y
        return self.net.targets(labels)[is_x]


@dataclass(frozen=True)
class StepLoss:
    """The value to minimize, and the logits (B, C) of the step's images, for the accuracy."""

    value: Tensor
    logits: Tensor


class Loss(ABC):
    """Base class of losses. A subclass sets ``name`` and defines `loss`; the other methods are optional hooks.

    Attributes:
        name: For records and errors.
        outliers_per_image: Images of ``train(outliers=)`` for each training image; 0 if none are used.
        unanchored_only: Whether only unanchored networks can be trained with it.
    """

    name: ClassVar[str]
    outliers_per_image: int = 0
    unanchored_only: ClassVar[bool] = False

    @abstractmethod
    def loss(self, step: Step) -> StepLoss:
        """Loss of one step."""

    def check(self, net: Classifier) -> None:  # noqa: B027
        """Raise an error before training starts if the network does not fit."""

    def begin_epoch(self, net: Classifier, data: Any, outliers: Any, preprocess: Preprocess, epoch: int) -> None:  # noqa: B027
        """Prepare for an epoch with access to all data; not called again if the epoch is resumed."""

    def after_step(self, step: Step) -> None:  # noqa: B027
        """Update what is not learned by gradients, after the optimizer's step."""

    def finish(self, net: Classifier) -> None:  # noqa: B027
        """Change the network once, after the last step."""

    def config(self) -> dict[str, Any]:
        """Arguments as plain data, for records and to identify a run."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Tensors to save in a checkpoint besides the network."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore what `state` returned."""


class CrossEntropy(Loss):
    """Cross entropy of the labels, the default loss."""

    name = "cross-entropy"

    def loss(self, step: Step) -> StepLoss:
        """Mean cross entropy of a batch."""
        logits = step.logits()
        return StepLoss(F.cross_entropy(logits, step.targets(), label_smoothing=step.label_smoothing), logits)


class LogitNorm(Loss):
    """Cross entropy of logits normalized to length one (Wei et al., ICML 2022); detectors read the logits unnormalized.

    Args:
        temperature: Divides the normalized logits.

    Example:
        >>> LogitNorm().config()
        {'temperature': 0.04}
    """

    name = "logit-norm"

    def __init__(self, temperature: float = 0.04) -> None:
        self.temperature = between("temperature", temperature, 0, float("inf"), open_ends=True)

    def loss(self, step: Step) -> StepLoss:
        """Mean cross entropy of the normalized logits."""
        logits = step.logits()
        scaled = F.normalize(logits, dim=1) / self.temperature
        return StepLoss(F.cross_entropy(scaled, step.targets(), label_smoothing=step.label_smoothing), logits)

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {"temperature": self.temperature}


class T2FNorm(Loss):
    """Cross entropy with features of length one before the last layer (Regmi et al., CVPR Workshops 2024).

    In training the last layer takes ``h / (temperature ||h||)``; after it, features as they are, over the temperature,
    which is divided into the layer's weights when training ends. The norm of the features is then free to tell known
    images from unknown ones, and any detector reads it.

    Args:
        temperature: Divides the features.
        head: The name of the last linear layer, where it is not the one registered last.

    Example:
        >>> T2FNorm().config()
        {'temperature': 0.1, 'head': None}
    """

    name = "t2fnorm"

    def __init__(self, temperature: float = 0.1, head: str | None = None) -> None:
        self.temperature = between("temperature", temperature, 0, float("inf"), open_ends=True)
        self.head = head

    def check(self, net: Classifier) -> None:
        """Raise if the network has no linear layer of that name."""
        self._layer(net)

    def loss(self, step: Step) -> StepLoss:
        """Mean cross entropy of the logits of normalized features."""
        outputs: list[Tensor] = []
        layer = self._layer(step.net)

        def normalized(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (F.normalize(inputs[0], dim=-1) / self.temperature, *inputs[1:])

        with (
            layer.register_forward_pre_hook(normalized),
            layer.register_forward_hook(lambda _, inputs, output: outputs.append(output)),
        ):
            logits = step.logits()
        if not outputs or not torch.equal(outputs[-1], logits):
            name = head_name(step.net.network, self.head)
            raise ArchitectureError(
                f"the logits are not the output of {name!r}, the network's last linear layer; pass head= with the name "
                "of the right layer to T2FNorm"
            )
        return StepLoss(F.cross_entropy(logits, step.targets(), label_smoothing=step.label_smoothing), logits)

    def finish(self, net: Classifier) -> None:
        """Divide the last layer's weights by the temperature."""
        with torch.no_grad():
            self._layer(net).weight.div_(self.temperature)

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {"temperature": self.temperature, "head": self.head}

    def _layer(self, net: Classifier) -> nn.Linear:
        return cast(nn.Linear, net.network.get_submodule(head_name(net.network, self.head)))


class SyntheticOutliers(Loss):
    """Cross entropy, plus cross entropy to the uniform distribution on outliers made from the batch's own images.

    See `kedge.training.synthetic_outliers`. An anchored network may draw an outlier as an anchor. Several processes
    that share a batch in memory draw the outliers and anchors that one process would draw.

    Args:
        share: Synthetic outliers per training image.
        weight: Weight of their loss.
        kinds: Names in `kedge.training.synthetic_outliers.KINDS`.

    Example:
        >>> SyntheticOutliers(share=0.1).config()["weight"]
        0.5
    """

    name = "synthetic outliers"

    def __init__(self, share: float = 0.2, weight: float = 0.5, kinds: Sequence[str] = tuple(KINDS)) -> None:
        self.share = between("share", share, 0, 1)
        self.weight = between("weight", weight, 0, float("inf"))
        self.kinds = tuple(one_of("kinds", kind, tuple(KINDS)) for kind in kinds)
        if not self.kinds:
            raise InputError(f"kinds must name at least one of {', '.join(KINDS)}; got none")

    def loss(self, step: Step) -> StepLoss:
        """Loss of the images and of the outliers, in one forward pass, so that batch norms see both together."""
        batch = step.x if step.among is None else step.among
        chosen = torch.randperm(len(batch), generator=step.generator)[: round(self.share * len(batch))]
        outliers = synthetic_outliers(batch[chosen.to(batch.device)], self.kinds, generator=step.generator)
        order, rows = _interleaved(len(batch), len(outliers), step.first, len(step.x))
        mixed = torch.cat([batch, outliers])[order.to(batch.device)]
        anchors = {"among": mixed, "first": rows.start} if isinstance(step.net, Anchored) else {}
        logits = step.forward(mixed[rows], **anchors)
        is_x = (order[rows] < len(batch)).to(logits.device)
        fit = F.cross_entropy(step.fitting(logits[is_x]), step.targets(is_x), label_smoothing=step.label_smoothing)
        # The mean over processes of this sum is the mean over all outliers, however many fell to each process.
        refused = -logits[~is_x].log_softmax(dim=1).mean(dim=1).sum() * len(batch) / len(step.x) / max(1, len(outliers))
        return StepLoss(fit + self.weight * refused, logits[is_x])

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {"share": self.share, "weight": self.weight, "kinds": list(self.kinds)}


LOSSES: dict[str, type[Loss]] = {kind.name: kind for kind in (CrossEntropy, LogitNorm, T2FNorm)}  # by name


def make_loss(loss: str | Loss | None, net: Classifier) -> Loss:
    """A loss, or one of `LOSSES` by name; by default cross entropy, with the synthetic outliers that a network has."""
    if loss is not None:
        return loss if isinstance(loss, Loss) else LOSSES[one_of("loss", loss, tuple(LOSSES))]()
    share = net.options.synthetic_outliers if isinstance(net, Anchored) else 0.0
    return SyntheticOutliers(share) if share else CrossEntropy()


def _interleaved(images: int, outliers: int, first: int, count: int) -> tuple[Tensor, slice]:
    """Order that spreads outliers evenly among images, and its rows from image ``first`` to the next ``count`` images.

    It is the same for any number of processes, and each process's images and part of the outliers are neighbors.
    """
    position = torch.cat([torch.arange(images) / images, (torch.arange(outliers) + 0.5) / max(1, outliers)])
    order = position.argsort(stable=True)
    place = order.argsort()
    stop = int(place[first + count]) if first + count < images else len(order)
    return order, slice(int(place[first]), stop)
