"""Temperature scaling."""

from typing import Any

import torch
from torch import Tensor, nn

from kedge import calibration, scores
from kedge.checks import between
from kedge.data import Features, Preprocess
from kedge.detectors.base import Outputs
from kedge.detectors.logits import LogitDetector
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError


@register
class TemperatureScaling(LogitDetector):
    """Temperature scaling (Guo et al., ICML 2017) with MSP: ``-max softmax(logits / T)``, one T for all images.

    T maximises the likelihood of held-out labels, so that confidence matches accuracy. It changes no label, and MSP
    only as far as it changes the order of images with different runners-up. Use it where calibrated probabilities
    matter; as a detector it is close to MSP. One forward pass; `calibrate` fits T on half of its images and the
    threshold on the other half. https://arxiv.org/abs/1706.04599

    Args:
        net: Any classifier, unanchored or anchored.
        temperature: A fixed T, instead of fitting it in `calibrate`.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> labelled = [(torch.rand(3, 2, 2), i % 2) for i in range(80)]
        >>> detector = TemperatureScaling(net).fit(labelled[:9]).calibrate(labelled[9:])
        >>> detector.temperature > 0
        True
    """

    name = "temperature_scaling"
    reads_train = False  # it learns from held-out images
    options = ("temperature:given",)
    learned = ("temperature",)

    def __init__(self, net: nn.Module, *, temperature: float | None = None) -> None:
        super().__init__(net)
        if temperature is not None:
            between("temperature", temperature, 0, float("inf"), open_ends=True)
        self.learns_held_out = temperature is None
        self.given = self.temperature = temperature

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Forget a temperature that was fitted before."""
        super().fit_method(train_set, preprocess)
        self.temperature = self.given

    def fit_held_out(self, images: Any, labels: Tensor) -> None:
        """Fit the temperature by the likelihood of the labels."""
        known = labels >= 0
        if not bool(known.any()):
            raise InputError(
                "held_out must have labels, since TemperatureScaling fits its temperature to them; pass labelled "
                "images, or temperature= with a fixed one"
            )
        if isinstance(images, Features):
            logits = images.logits[known]
        else:
            logits = torch.cat([self.net(self.as_input(x)).cpu() for x in images[known].split(256)])
        self.temperature = calibration.temperature_of_known(logits, labels[known])

    def of_logits(self, logits: Tensor) -> Outputs:
        """The logits as they are, and MSP of the logits divided by the temperature."""
        if self.temperature is None:
            raise NotReadyError(
                "TemperatureScaling has no temperature yet: call calibrate(held_out) with labelled images, or pass "
                "temperature= with a fixed one"
            )
        return Outputs(logits, scores.msp(logits / self.temperature))
