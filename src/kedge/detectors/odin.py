"""ODIN."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring.sampling import choose
from kedge.checks import at_least, between
from kedge.data import Preprocess
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.registry import register
from kedge.models.classifier import Classifier

# Up to the largest step of Generalized ODIN, 0.08 deviations, which is about 0.02 of the range of pixels. Larger ones
# would often be chosen, since the step goes where probability rises, but they drown what tells images apart.
EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.0024, 0.005, 0.01, 0.02)
SAMPLE = 500  # training images that epsilon is chosen on


@register
class ODIN(Detector):
    """ODIN (Liang, Li and Srikant, ICLR 2018): MSP at a high temperature, after a step towards more confidence.

    Every pixel moves by epsilon in the direction that makes the predicted class more likely, and the score is
    ``-max softmax(f(x + epsilon sign(grad)) / T)``; in-distribution images gain more by the step than others. Use it
    where the network must stay as it is and a gradient is affordable; it often does better than MSP when the unknown
    images differ clearly from the training set. Epsilon is chosen on training images alone, as the step that raises
    their mean probability most (Generalized ODIN, Hsu et al., CVPR 2020), never on outliers. Two forward passes and one
    backward pass. https://arxiv.org/abs/1706.02690

    Args:
        net: Any classifier, unanchored or anchored.
        temperature: The divisor T of the logits.
        epsilon: The step in pixels of [0, 1]; by default `fit` chooses it. 0.0014 is the paper's for CIFAR.
        seed: Random seed of the at most 500 training images that epsilon is chosen on.

    Attributes:
        epsilon: The step in use, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> detector = ODIN(net).fit(torch.rand(8, 3, 2, 2))
        >>> detector.epsilon in EPSILONS, detector.score(torch.rand(4, 3, 2, 2)).shape
        (True, torch.Size([4]))
    """

    name = "odin"
    reads_train = False  # a sample is enough
    reads = "gradients"
    options = ("temperature", "epsilon:given", "seed")
    learned = ("epsilon",)
    grid: Mapping[str, Sequence[Any]] = {"temperature": (1.0, 10.0, 100.0, 1000.0), "epsilon": EPSILONS}

    def __init__(
        self, net: nn.Module, *, temperature: float = 1000.0, epsilon: float | None = None, seed: int = 0
    ) -> None:
        super().__init__(net)
        self.temperature = between("temperature", temperature, 0, float("inf"), open_ends=True)
        self.given = epsilon if epsilon is None else between("epsilon", epsilon, 0, 1)
        self.epsilon: Any = self.given
        self.seed = at_least("seed", seed, 0)

    @property
    def cost(self) -> Cost:
        """A pass and its gradient, and a pass of the moved image."""
        return Cost(forward=2 * self.net.passes, backward=self.net.passes)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Choose epsilon if it is not given: the largest mean probability of a sample, the smaller of equal ones."""
        super().fit_method(train_set, preprocess)
        if self.given is not None:
            return
        sample = choose(train_set, preprocess, SAMPLE, "random", self.seed, at_least=1)
        total = [0.0] * len(EPSILONS)
        for piece in self.pieces(sample):
            x = self.as_input(piece)
            _, direction = uphill(self.net, x, self.temperature)
            for i, epsilon in enumerate(EPSILONS):
                total[i] -= float(self._score(x + epsilon * direction, like=x).sum())
        self.epsilon = EPSILONS[total.index(max(total))]

    def outputs(self, x: Tensor) -> Outputs:
        """The logits of the images as they are, and the score of the moved ones."""
        outs = []
        for piece in self.pieces(x):
            logits, direction = uphill(self.net, piece, self.temperature)
            outs.append((logits, self._score(piece + self.epsilon * direction, like=piece)))
        return Outputs(*map(torch.cat, zip(*outs, strict=True)))

    def _score(self, moved: Tensor, *, like: Tensor) -> Tensor:
        logits, _ = self.net.features(moved, like=like)
        # At T = 1000 every probability is nearly 1 / C, and single precision would round their differences away.
        return scores.msp(logits.double() / self.temperature)


def uphill(net: Classifier, x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logits (B, C) of images, and the sign of each pixel's gradient of the predicted class's log-probability."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        logits, _ = net.features(x, like=x.detach())
        confidence = (logits.double() / temperature).log_softmax(dim=-1).max(dim=-1).values
        (gradient,) = torch.autograd.grad(confidence.sum(), x)
    return logits.detach(), gradient.sign()
