"""Outlier Exposure."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kedge.checks import at_least, between
from kedge.detectors.registry import register
from kedge.detectors.trained.base import LogitTrainedDetector, MethodLoss
from kedge.training.losses import Step, StepLoss


@dataclass(eq=False)
class ExposureLoss(MethodLoss):
    """Cross-entropy of the labels, plus ``weight`` times the cross-entropy of the outliers to the uniform distribution.

    Args:
        weight: 0.5 in the paper for images.
        outliers_per_image: Outliers per training image; 2 in the paper.
    """

    name = "outlier exposure"
    unanchored_only = True

    weight: float = 0.5
    outliers_per_image: int = 2

    def __post_init__(self) -> None:
        between("weight", self.weight, 0, float("inf"))
        at_least("outliers_per_image", self.outliers_per_image, 1)

    def loss(self, step: Step) -> StepLoss:
        """The loss of images and outliers, which go through the network as one batch."""
        if self.weight == 0:  # the outliers would still move the statistics of batch norm
            logits = step.logits()
            return StepLoss(F.cross_entropy(logits, step.y, label_smoothing=step.label_smoothing), logits)
        assert step.outliers is not None
        logits, exposed = step.forward(torch.cat([step.x, step.outliers])).split([len(step.x), len(step.outliers)])
        value = F.cross_entropy(step.fitting(logits), step.y, label_smoothing=step.label_smoothing)
        return StepLoss(value - self.weight * exposed.log_softmax(dim=1).mean(), logits)


@register
class OutlierExposure(LogitTrainedDetector):
    """Outlier Exposure (Hendrycks, Mazeika and Dietterich, ICLR 2019): train the network to be unsure about outliers.

    Besides the labelled images the network is trained on images of anything else, towards equal probabilities; the
    score is that of the softmax. Use it where you have images of what may go wrong; it may detect those better than
    others, so tables mark it as having used outliers. A training step takes three times the images of an ordinary one
    (two outliers with each); scoring costs one forward pass.

    Args:
        net: A network that was trained with ``OutlierExposure.loss()``.
        score: ``"msp"``, as in the paper, ``"max_logit"``, ``"entropy"``, ``"energy"`` or ``"kl_uniform"``.

    Example:
        >>> import kedge
        >>> noise = lambda name: kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8)).byte(), torch.arange(64) % 2, name)
        >>> net = kedge.models.build("compact", width=4, classes=2, channels=1)
        >>> recipe = kedge.training.recipe("demo", epochs=1)
        >>> net = kedge.train(net, noise("a"), recipe, loss=OutlierExposure.loss(), outliers=noise("b"))
        >>> OutlierExposure(net).fit(noise("a")).score(noise("c")).shape
        torch.Size([64])
    """

    name = "outlier_exposure"
    needs_outliers = True
    loss = ExposureLoss
