"""KL matching."""

from typing import Any

import torch
from torch import Tensor, nn

from kedge.detectors.base import Outputs
from kedge.detectors.features import TrainingFeatures
from kedge.detectors.logits import LogitDetector
from kedge.detectors.registry import register


@register
class KLM(LogitDetector):
    """KL matching (Hendrycks et al., ICML 2022): the divergence from the closest mean posterior of a predicted class.

    With p the softmax of the logits and d_c the mean of p over the training images that the network predicts as class
    c, the score is ``min_c KL(p || d_c)``; classes that no image is predicted as have no d_c. It is small for images
    whose probabilities are as usual for some class, whether certain or not, and large for unusual mixtures. Use it with
    many classes that are alike; an unknown image that is classified with confidence is missed. One forward pass;
    `fit` reads the training set once and needs no labels. The paper learns d_c from held-out images, on which a
    network is less sure than on those it was trained on; to do so, pass some to `fit` and others to `calibrate`.
    https://arxiv.org/abs/1911.11132

    Args:
        net: Any classifier, unanchored or anchored.

    Attributes:
        posteriors: The mean probabilities d_c, one row for each class that is predicted, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> KLM(net).fit(torch.rand(50, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "klm"
    options = ()
    learned = ("posteriors",)
    learns_logits = True

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.posteriors: Any = None  # (P, C)

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Learn the mean probabilities of the images that are predicted as each class."""
        sums = counts = torch.zeros(())
        for logits, _, _ in batches:
            classes, predicted = logits.shape[1], logits.argmax(dim=1)
            sums = sums.to(logits.device) + logits.new_zeros(classes, classes, dtype=torch.float64).index_add_(
                0, predicted, logits.double().softmax(dim=1)
            )
            counts = counts.to(logits.device) + predicted.bincount(minlength=classes)
        self.posteriors = sums[counts > 0] / counts[counts > 0, None]

    def of_logits(self, logits: Tensor) -> Outputs:
        """The divergence of logits (B, C) from the closest mean posterior."""
        log_p = logits.double().log_softmax(dim=1)
        p = log_p.exp()
        known = self.posteriors.to(logits.device).clamp_min(torch.finfo(torch.float64).tiny).log()  # (P, C)
        divergence = (p * log_p).sum(dim=1, keepdim=True) - p @ known.T  # (B, P)
        return Outputs(logits, divergence.amin(dim=1).to(logits.dtype))
