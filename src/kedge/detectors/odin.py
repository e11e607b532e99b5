"""ODIN."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring.sampling import choose
from kedge.checks import at_least, between
from kedge.data import Preprocess
from kedge.detectors.base import GRADIENT_ROWS, Cost, Detector, Outputs, passes
from kedge.detectors.registry import register
from kedge.models.classifier import Classifier, evaluating

# Up to the largest step of Generalized ODIN, 0.08 deviations, which is about 0.02 of the range of pixels. Larger ones
# would often be chosen, since the step goes where probability rises, but they drown what tells images apart.
EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.0024, 0.005, 0.01, 0.02)
SAMPLE = 500  # training images that the size of the step is chosen on


@register
class ODIN(Detector):
    """ODIN (Liang, Li and Srikant, ICLR 2018): MSP at a high temperature, after a step towards more confidence.

    Every pixel is moved by epsilon in the direction that makes the predicted class more likely, and the score is minus
    the maximum softmax probability of the logits of the moved image divided by the temperature; in-distribution images
    gain more by the step than others. Use it where the network must stay as it is and a gradient can be paid for; it
    often does better than MSP when the unknown images differ plainly from the training set. Epsilon is chosen on
    training images alone, as the step that raises their mean probability most (Generalized ODIN, Hsu et al., CVPR
    2020), never on outliers. Costs two forward passes and one backward pass.

    Args:
        net: Any classifier, plain or anchored.
        temperature: What the logits are divided by.
        epsilon: The step in pixels of [0, 1]; by default `fit` chooses it. 0.0014 is the paper's for CIFAR.
        seed: Of the draw of at most 500 training images to choose epsilon on.

    Attributes:
        epsilon: The step in use, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> detector = ODIN(net).fit(torch.rand(8, 3, 2, 2))
        >>> detector.epsilon in EPSILONS, detector.score(torch.rand(4, 3, 2, 2)).shape
        (True, torch.Size([4]))
    """

    name = "odin"

    def __init__(
        self, net: nn.Module, *, temperature: float = 1000.0, epsilon: float | None = None, seed: int = 0
    ) -> None:
        super().__init__(net)
        self.temperature = between("temperature", temperature, 0, float("inf"), open_ends=True)
        self.given = self.epsilon = epsilon if epsilon is None else between("epsilon", epsilon, 0, 1)
        self.seed = at_least("seed", seed, 0)

    @property
    def cost(self) -> Cost:
        """A pass and its gradient, and a pass of the moved image."""
        return Cost(forward=2 * passes(self.net), backward=passes(self.net))

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Choose epsilon where it is not given."""
        super().fit_method(train_set, preprocess)
        self.epsilon = self._choose_epsilon(train_set, preprocess) if self.given is None else self.given

    def outputs(self, x: Tensor) -> Outputs:
        """The logits of the images as they are, and the score of the moved ones."""
        assert self.epsilon is not None
        logits, found = [], []
        for part in self._pieces(x):
            clean, direction = uphill(self.net, part, self.temperature)
            logits.append(clean)
            found.append(self._score(part + self.epsilon * direction, like=part))
        return Outputs(torch.cat(logits), torch.cat(found))

    def config(self) -> dict[str, Any]:
        """The arguments; epsilon only where it was given."""
        return {"temperature": self.temperature, "epsilon": self.given, "seed": self.seed}

    def state(self) -> dict[str, Tensor]:
        """The step in use."""
        return {} if self.epsilon is None else {"epsilon": torch.tensor(self.epsilon, dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the step back."""
        self.epsilon = float(state["epsilon"])

    def _choose_epsilon(self, train_set: Any, preprocess: Preprocess) -> float:
        """The step that gives a sample of the training images the largest mean probability; the smaller one of two."""
        sample = choose(train_set, preprocess, SAMPLE, "random", self.seed, at_least=1)
        total = [0.0] * len(EPSILONS)
        with evaluating(self.net), torch.no_grad():
            for part in self._pieces(sample):
                x = self.as_input(part)
                _, direction = uphill(self.net, x, self.temperature)
                for i, epsilon in enumerate(EPSILONS):
                    total[i] -= float(self._score(x + epsilon * direction, like=x).sum())
        return EPSILONS[total.index(max(total))]

    def _score(self, moved: Tensor, *, like: Tensor) -> Tensor:
        logits, _ = self.net.features(moved, like=like)
        # At T = 1000 every probability is nearly 1 / C, and single precision would round their differences away.
        return scores.msp(logits.double() / self.temperature)

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = x.split(max(1, GRADIENT_ROWS // passes(self.net)))
        return pieces


def uphill(net: Classifier, x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logits (B, C) of images, and which way each pixel must go, 1 or -1, to make the predicted class more likely.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> net.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> net.bias.data = torch.zeros(2)
        >>> uphill(Classifier(net), torch.tensor([[0.8, 0.3]]), temperature=1000.0)[1]
        tensor([[ 1., -1.]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        logits, _ = net.features(x, like=x.detach())
        confidence = (logits.double() / temperature).log_softmax(dim=-1).max(dim=-1).values
        (gradient,) = torch.autograd.grad(confidence.sum(), x)
    return logits.detach(), gradient.sign()
