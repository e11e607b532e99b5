"""Maximum classifier discrepancy."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, between
from kedge.detectors.base import Outputs
from kedge.detectors.registry import register
from kedge.detectors.trained.base import MethodLoss, TrainedDetector
from kedge.models.classifier import Classifier
from kedge.models.conversion import convert, head_conversion
from kedge.models.head import HeadOutput, head_to_prepare, prepared_head
from kedge.seeds import seeded
from kedge.training.losses import Step, StepLoss


class TwoHeads(nn.Module):
    """Two linear layers in the place of one; the logits are the mean of theirs, a linear function of the features."""

    def __init__(self, like: nn.Linear, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            shape = (like.in_features, like.out_features, like.bias is not None)
            self.first, self.second = (nn.Linear(*shape).to(like.weight) for _ in range(2))

    def forward(self, features: Tensor) -> HeadOutput:
        """Features (B, d) to the mean of the logits, with the logits of both."""
        first, second = self.first(features), self.second(features)
        return HeadOutput((first + second) / 2, (first, second))


head_conversion("two-heads", TwoHeads)


@dataclass(eq=False)
class DiscrepancyLoss(MethodLoss):
    """Cross-entropy of the labels for both heads; later, unlabelled images drive the heads apart.

    From ``start`` on, ``max(margin - mean of [H(p1) - H(p2)], 0)`` over the unlabelled images is added, H being the
    entropy of a head's softmax: the first head learns to be unsure about them, the second to be sure.

    Labelled and unlabelled images go through the network as one batch, where reproductions of the paper pass one after
    the other; the learning rate is the recipe's throughout; and the weights of the last step are kept, not those of
    the epoch that did best on held-out outliers. OpenOOD differs more: its entropies run over the batch instead of the
    classes, its margin is never met, and its score is the MSP of the first head.

    Args:
        margin: 1.2 in the paper. The difference of entropies cannot pass log C, so with three classes or fewer use a
            margin below that.
        start: The fraction of the training that uses labels alone. The paper adds ten epochs at a low learning rate to
            a complete training: about as many as half of a short recipe has; a long one can begin later.
        outliers_per_image: Unlabelled images per training image.
    """

    name = "classifier discrepancy"
    unanchored_only = True

    margin: float = 1.2
    start: float = 0.5
    outliers_per_image: int = 1

    def __post_init__(self) -> None:
        between("margin", self.margin, 0, float("inf"))
        between("start", self.start, 0, 1)
        at_least("outliers_per_image", self.outliers_per_image, 1)

    def check(self, net: Classifier) -> None:
        """Raise if the network has one head."""
        prepared_head(net, TwoHeads, "ClassifierDiscrepancy")

    def loss(self, step: Step) -> StepLoss:
        """The loss of labelled images; from ``start`` on with the unlabelled ones as one batch."""
        assert step.outliers is not None
        late = step.done >= self.start
        output = step.forward(torch.cat([step.x, step.outliers]) if late else step.x, raw=True)
        count, heads = len(step.x), output.extra
        logits = step.fitting(output.logits[:count])
        first, second = (F.cross_entropy(z[:count], step.y, label_smoothing=step.label_smoothing) for z in heads)
        value = first + second
        if late:
            apart = (scores.entropy(heads[0][count:]) - scores.entropy(heads[1][count:])).mean()
            value = value + (self.margin - apart).clamp_min(0)
        return StepLoss(value, logits)


@register
class ClassifierDiscrepancy(TrainedDetector):
    """Maximum classifier discrepancy (Yu and Aizawa, ICCV 2019): two heads that agree only on known images.

    Two linear heads on one network learn the same labels; then, on unlabelled images, one is trained to be unsure and
    the other to be sure. The score is the L1 distance between their softmaxes, from 0 to 2. Use it where you have
    unlabelled images of the kind the detector will meet: known and unknown ones may be mixed. Tables mark it as having
    used outliers. Training takes about half as long again; scoring costs one forward pass.

    Args:
        net: A network from ``ClassifierDiscrepancy.prepare``, trained with ``ClassifierDiscrepancy.loss()``.

    Example:
        >>> import kedge
        >>> noise = lambda name: kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8)).byte(), torch.arange(64) % 2, name)
        >>> net = ClassifierDiscrepancy.prepare(kedge.models.build("compact", width=4, classes=2, channels=1))
        >>> loss = ClassifierDiscrepancy.loss(margin=0.5)
        >>> recipe = kedge.training.recipe("demo", epochs=1)
        >>> net = kedge.train(net, noise("a"), recipe, loss=loss, outliers=noise("b"))
        >>> ClassifierDiscrepancy(net).fit(noise("a")).score(noise("c")).shape
        torch.Size([64])
    """

    name = "discrepancy"
    needs_outliers = True
    loss = DiscrepancyLoss

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.head, _ = prepared_head(self.net, TwoHeads, type(self).__name__)

    @classmethod
    def prepare(cls, net: nn.Module, *, head: str | None = None, seed: int = 0) -> Any:
        """A copy of a network with two freshly drawn heads in the place of its last linear layer, or of ``head``."""
        name, _ = head_to_prepare(net, TwoHeads, head)
        return convert(net, "two-heads", head=name, seed=seed)

    def outputs(self, x: Tensor) -> Outputs:
        """The mean of the two heads' logits, and the L1 distance between their softmaxes."""
        names = (f"{self.head}.first", f"{self.head}.second")
        logits, features = self.net.features(x, names)
        first, second = (features[name].softmax(dim=1) for name in names)  # (B, C) each
        return Outputs(logits, (first - second).abs().sum(dim=1))
