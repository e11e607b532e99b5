"""Scores of the logits alone: MSP, MaxLogit, Entropy, Energy and KLUniform.

They need one forward pass and nothing to fit. On an anchored network they score the mean logits over its anchors.
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from kedge import scores
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.registry import register


class LogitDetector(Detector):
    """A detector whose score is a function of the logits: ``score_function``, or an `of_logits` of its own."""

    reads = "logits"
    score_function: ClassVar[Callable[[Tensor], Tensor]]

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and their score."""
        return self.of_logits(self.net(x))

    def of_logits(self, logits: Tensor) -> Outputs:
        """The score of logits (B, C)."""
        return Outputs(logits, type(self).score_function(logits))


@register
class MSP(LogitDetector):
    """Maximum softmax probability (Hendrycks and Gimpel, ICLR 2017): ``-max softmax(z)`` of logits z.

    The baseline of the field. https://arxiv.org/abs/1610.02136

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

    Better than MSP with many classes. https://arxiv.org/abs/1911.11132
    """

    name = "max_logit"
    score_function = scores.max_logit


@register
class Entropy(LogitDetector):
    """Entropy of the softmax, ``-sum p log p`` with ``p = softmax(z)``: close to MSP, but of all probabilities."""

    name = "entropy"
    score_function = scores.entropy


@register
class Energy(LogitDetector):
    """Free energy of the logits (Liu et al., NeurIPS 2020): ``-logsumexp(z)``.

    Usually better than MSP, since it keeps the logits' scale. https://arxiv.org/abs/2010.03759
    """

    name = "energy"
    score_function = scores.energy


@register
class KLUniform(LogitDetector):
    """KL divergence from uniform to the softmax, negated, up to a constant: ``mean(z) - logsumexp(z)``.

    The score of AMP, without anchors. Unlike `Energy` it does not change when all logits of an image shift together.
    """

    name = "kl_uniform"
    score_function = scores.kl_uniform
