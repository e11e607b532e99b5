"""Losses and corruptions T that only the study `insight` uses."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.anchoring.corruption import Corruption
from kedge.anchoring.layer import Pairs, calling
from kedge.models.classifier import logits_of
from kedge.studies.cifar10_fast import MASKED
from kedge.training.losses import CrossEntropy, Loss, Step, StepLoss


def twice(images: Tensor) -> Tensor:
    """T applied twice, by independent draws."""
    once = Corruption()
    return once(once(images))


def as_published(images: Tensor) -> Tensor:
    """T as published: one draw for the batch, on normalised images, which jitter clamps to [0, 1]."""
    import kornia.augmentation as K  # as in `kedge.anchoring.corruption`

    mean, std = (torch.tensor(values).view(3, 1, 1) / 255 for values in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)))
    steps: list[Any] = [
        K.RandomResizedCrop(images.shape[-2:], scale=(0.6, 1.0), cropping_mode="resample", same_on_batch=True),
        K.RandomHorizontalFlip(p=0.5, same_on_batch=True),
    ]
    if torch.rand(()) < 0.8:
        steps += [
            K.ColorJitter(brightness=0.5, p=1.0, same_on_batch=True),
            K.RandomGaussianBlur(kernel_size=(9, 3), sigma=(0.1, 5.0), p=1.0, same_on_batch=True),
        ]
    corrupted = (images - mean) / std
    for step in (*steps, K.RandomGrayscale(p=0.2, same_on_batch=True)):
        corrupted = step(corrupted)
    return corrupted * std + mean


class Agreement(Loss):
    """Cross-entropy under two anchors for each image, plus the squared difference of their log-probabilities."""

    name = "two anchors agree"
    weight = 0.1

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        first, second = step.fitting(step.forward(step.x.repeat(2, *(1,) * (step.x.ndim - 1)))).chunk(2)
        fits = [F.cross_entropy(logits, step.y, label_smoothing=step.label_smoothing) for logits in (first, second)]
        apart = (first.log_softmax(dim=1) - second.log_softmax(dim=1)).square().mean()
        return StepLoss(sum(fits) / 2 + self.weight * apart, first)

    def config(self) -> dict[str, Any]:
        """Its weight."""
        return {"weight": self.weight}


class Differences(Loss):
    """Masked pairs without anchors: a quarter of the images become differences, trained towards uniform.

    A masked pair ``[0, x - c]`` is the difference of two images alone; in pixels it is ``x - c`` and the mean image.
    """

    name = "differences"

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        masked = torch.rand(len(step.x)) < MASKED
        other = step.x[torch.randperm(len(step.x))]
        per_channel = (-1, *(1,) * (step.x.ndim - 2))
        chosen, mean = masked.to(step.x.device).view(-1, *(1,) * (step.x.ndim - 1)), step.net.mean.view(per_channel)
        logits = step.fitting(step.forward(torch.where(chosen, step.x - other + mean, step.x)))
        classes = F.one_hot(step.y, logits.shape[1]).to(logits.dtype)
        targets = torch.where(masked.to(logits.device)[:, None], 1 / logits.shape[1], classes)
        return StepLoss(F.cross_entropy(logits, targets, label_smoothing=step.label_smoothing), logits)

    def config(self) -> dict[str, Any]:
        """The share."""
        return {"share": MASKED}


class SameClass(Loss):
    """Cross-entropy under anchors of the image's own class, and the uniform distribution under those of another.

    The target of a pair depends on its anchor, so a network that ignores the anchor cannot fit it.
    """

    name = "same class"

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step; half of the images take an anchor of their own class, where the batch has one."""
        net, size = step.net, len(step.x)
        assert isinstance(net, Anchored)
        alike = step.y[:, None] == step.y
        wanted = (torch.rand(size) < 0.5).to(step.y.device)
        fits = (alike == wanted[:, None]) & ~torch.eye(size, dtype=torch.bool, device=step.y.device)
        chosen = (torch.rand(size, size).to(step.y.device) * fits).argmax(dim=1)
        with calling(Pairs(chosen)):
            logits = step.fitting(logits_of(net.network(net.normalise(step.x))))
        classes = F.one_hot(step.y, logits.shape[1]).to(logits.dtype)
        targets = torch.where(alike.gather(1, chosen[:, None]), classes, 1 / logits.shape[1])
        return StepLoss(F.cross_entropy(logits, targets, label_smoothing=step.label_smoothing), logits)


class AsNoise(Loss):
    """Consistency training without anchors: a fifth of the images become ``x + T(c) - c`` and keep their labels.

    This is the input that the pair ``[T(c), x - c]`` amounts to if the first layer has equal halves.
    """

    name = "T as noise"
    share = 1 / 5

    def __init__(self, clean_final_fraction: float) -> None:
        self.clean_final_fraction = clean_final_fraction

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        x = step.x
        if step.done < 1 - self.clean_final_fraction:
            chosen = torch.rand(len(x)).to(x.device) < self.share
            anchors = x[torch.randperm(len(x))][chosen]
            x = x.index_put((chosen,), x[chosen] + Corruption()(anchors) - anchors)
        logits = step.fitting(step.forward(x))
        return StepLoss(F.cross_entropy(logits, step.y, label_smoothing=step.label_smoothing), logits)

    def config(self) -> dict[str, Any]:
        """The shares."""
        return {"share": self.share, "clean_final_fraction": self.clean_final_fraction}


class AliveAnchors(Loss):
    """Cross-entropy, and a penalty where the two layers of the pair differ by less than half of their size.

    The pair computes ``W_x x + (W_c - W_x) c``: where both are equal, the anchor has no effect at all.
    """

    name = "anchors kept alive"
    least, weight = 0.5, 10.0

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        fit = CrossEntropy().loss(step)
        assert isinstance(step.net, Anchored)
        pair = step.net.anchored_layer
        of_anchor, of_image = cast(Tensor, pair.layer_c.weight), cast(Tensor, pair.layer_x.weight)
        apart = (of_anchor - of_image).norm() / of_image.norm()
        return StepLoss(fit.value + self.weight * (self.least - apart).clamp_min(0).square(), fit.logits)

    def config(self) -> dict[str, Any]:
        """The arguments."""
        return {"least": self.least, "weight": self.weight}
