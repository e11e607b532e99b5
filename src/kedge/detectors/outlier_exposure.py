"""Outlier Exposure."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, between, one_of
from kedge.detectors.base import Outputs
from kedge.detectors.registry import register
from kedge.detectors.trained import TrainedDetector
from kedge.training.losses import Loss, Step, StepLoss


class ExposureLoss(Loss):
    """Cross-entropy of the labels, plus ``weight`` times the cross-entropy of the outliers to the uniform distribution.

    Args:
        weight: 0.5 in the paper for images.
        outliers_per_image: Outliers that come with each training image; 2 in the paper.
    """

    name = "outlier exposure"
    unanchored_only = True

    def __init__(self, weight: float = 0.5, outliers_per_image: int = 2) -> None:
        self.weight = between("weight", weight, 0, float("inf"))
        self.outliers_per_image = at_least("outliers_per_image", outliers_per_image, 1)

    def loss(self, step: Step) -> StepLoss:
        """The loss of images and outliers, which go through the network as one batch."""
        if self.weight == 0:  # the outliers would still move the statistics of batch norm
            logits = step.logits()
            return StepLoss(F.cross_entropy(logits, step.y, label_smoothing=step.label_smoothing), logits)
        assert step.outliers is not None
        logits, exposed = step.forward(torch.cat([step.x, step.outliers])).split([len(step.x), len(step.outliers)])
        known = F.cross_entropy(step.fitting(logits), step.y, label_smoothing=step.label_smoothing)
        return StepLoss(known - self.weight * exposed.log_softmax(dim=1).mean(), logits)

    def config(self) -> dict[str, Any]:
        """The weight, and how many outliers come with an image."""
        return {"weight": self.weight, "outliers_per_image": self.outliers_per_image}


@register
class OutlierExposure(TrainedDetector):
    """Outlier Exposure (Hendrycks, Mazeika and Dietterich, ICLR 2019): train the network to be unsure about outliers.

    Beside the labelled images the network sees images of anything else and is trained towards equal probabilities for
    them; the score is that of the softmax. Use it where you have images of what may go wrong, and remember that it may
    know those better than others: it is marked in tables as having used outliers. A step of training takes
    three times the images of a plain one (two outliers with each); scoring costs one forward pass.

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

    def __init__(self, net: nn.Module, *, score: str = "msp") -> None:
        super().__init__(net)
        self.score_by = one_of("score", score, tuple(scores.SCORES))

    @classmethod
    def loss(cls, *, weight: float = 0.5, outliers_per_image: int = 2) -> ExposureLoss:
        """Cross-entropy, with outliers trained towards equal probabilities; see `ExposureLoss`."""
        return ExposureLoss(weight, outliers_per_image)

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and their score."""
        logits = self.net(x)
        return Outputs(logits, scores.SCORES[self.score_by](logits))

    def config(self) -> dict[str, Any]:
        """The score."""
        return {"score": self.score_by}
