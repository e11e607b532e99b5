"""SVI with accuracy-versus-uncertainty calibration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge import scores
from kedge.anchoring import Anchored
from kedge.checks import between
from kedge.data import Preprocess
from kedge.detectors.registry import register
from kedge.detectors.trained.svi import SVI, SVILoss
from kedge.errors import InputError
from kedge.models.classifier import Classifier
from kedge.models.ensemble import log_mean_softmax
from kedge.training.engine import in_parallel
from kedge.training.losses import Step, StepLoss

FLOOR = 1e-10  # of the denominator, where no image is accurate and certain or inaccurate and uncertain


def avuc(logits: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """The AvUC loss: log(1 + (n_AU + n_IC) / (n_AC + n_IU)), with soft counts.

    An image counts as accurate (A) or inaccurate (I) by its label, and as certain (C) if the entropy u of its softmax
    is at most the threshold, uncertain (U) otherwise. With the largest probability p, it counts p if it is accurate and
    1 - p if not, times 1 - tanh(u) if it is certain and tanh(u) if not.
    """
    confidence, predicted = logits.softmax(dim=1).max(dim=1)  # (B,), (B,)
    entropy = scores.entropy(logits)  # (B,)
    accurate, certain = predicted == labels, entropy <= threshold
    counts = torch.where(accurate, confidence, 1 - confidence)
    counts = counts * torch.where(certain, 1 - entropy.tanh(), entropy.tanh())
    good = accurate == certain  # accurate and certain, or inaccurate and uncertain
    return torch.log1p(counts[~good].sum() / counts[good].sum().clamp_min(FLOOR))


@dataclass(eq=False)
class AvUCLoss(SVILoss):
    """The bound of `SVILoss`, plus beta times `avuc` once the warm-up is over.

    The threshold is half-way between the mean entropy of accurate and that of inaccurate predictions, measured over the
    warm-up. Entropy and probability are those of the mean softmax over the draws of a step.

    Arguments are those of `SVILoss`, with ``warmup`` above 0, and ``beta``, 3 in the paper.
    """

    name = "svi avuc"

    beta: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between("warmup", self.warmup, 0, 1, open_ends=True)
        between("beta", self.beta, 0, float("inf"))
        self._reset()

    @property
    def threshold(self) -> float:
        """Between certain and uncertain entropies; where all predictions were right, or wrong, their mean."""
        return float((self.sums / self.counts)[self.counts > 0].mean())

    def check(self, net: Classifier) -> None:
        """Raise if the network has no Gaussian weights, or if masked pairs have a uniform target."""
        super().check(net)
        if isinstance(net, Anchored) and net.options.mask > 0 and net.options.mask_target == "uniform":
            raise InputError(
                "mask_target must be 'label' with this loss, which makes accurate predictions certain; got 'uniform', "
                "which makes masked pairs uncertain: anchor the network with mask_target='label'"
            )

    def begin_epoch(self, net: Classifier, data: Any, outliers: Any, preprocess: Preprocess, epoch: int) -> None:
        """Start measuring at the beginning of a training."""
        if epoch == 0:
            self._reset()

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        bound, draws = self.bound(step)
        logits = log_mean_softmax(draws)
        if step.done < self.warmup:
            self._measure(logits.detach(), step.y)
            return StepLoss(bound, logits)
        return StepLoss(bound + self.beta * avuc(logits, step.y, self.threshold), logits)

    def state(self) -> dict[str, Tensor]:
        """The sums and counts behind the threshold."""
        return {"sums": self.sums, "counts": self.counts}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums and counts."""
        self.sums, self.counts = state["sums"], state["counts"]

    def _reset(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)  # entropy of inaccurate and of accurate predictions
        self.counts = torch.zeros(2, dtype=torch.float64)

    def _measure(self, logits: Tensor, labels: Tensor) -> None:
        entropy, accurate = scores.entropy(logits), logits.argmax(dim=1) == labels
        kinds = torch.stack([~accurate, accurate]).to(entropy.dtype)  # (2, B)
        seen = torch.stack([kinds @ entropy, kinds.sum(dim=1)])  # (2, 2)
        if in_parallel():
            torch.distributed.all_reduce(seen)  # one threshold for all processes
        sums, counts = seen.cpu().double()
        self.sums, self.counts = self.sums + sums, self.counts + counts


@register
class SVIAvUC(SVI):
    """SVI with accuracy-versus-uncertainty calibration (Krishnan and Tickoo, NeurIPS 2020).

    Trains the Gaussian weights of SVI with one more term, which rewards predictions that are right and certain or wrong
    and uncertain. Use it in place of SVI where confidence should follow accuracy, also on images that are corrupted or
    shifted. Trains and scores at the cost of SVI; a training step takes one draw of the weights, as in the authors'
    code, or ``loss(samples=...)``.

    Arguments are those of `SVI`.
    """

    name = "svi_avuc"
    loss = AvUCLoss
