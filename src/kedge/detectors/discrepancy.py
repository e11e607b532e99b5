"""Maximum classifier discrepancy."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, between
from kedge.detectors.base import Outputs
from kedge.detectors.registry import register
from kedge.detectors.trained import TrainedDetector
from kedge.errors import InputError
from kedge.models.classifier import Classifier
from kedge.models.conversion import conversion, convert
from kedge.models.head import HeadOutput, head_name
from kedge.seeds import seeded
from kedge.training.losses import Loss, Step, StepLoss


class TwoHeads(nn.Module):
    """Two linear layers in the place of one; the logits are the mean of theirs.

    The mean of the two log-softmaxes would give the same probabilities; the mean of the logits is also a linear
    function of the features, as the logits of any other network are.

    Example:
        >>> output = TwoHeads(nn.Linear(8, 3), seed=0)(torch.rand(2, 8))
        >>> output.logits.shape, len(output.extra)
        (torch.Size([2, 3]), 2)
    """

    def __init__(self, like: nn.Linear, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            shape = (like.in_features, like.out_features, like.bias is not None)
            self.first = nn.Linear(*shape).to(like.weight)
            self.second = nn.Linear(*shape).to(like.weight)

    def forward(self, features: Tensor) -> HeadOutput:
        """Features (B, d) to the mean of the logits, with the logits of both."""
        first, second = self.first(features), self.second(features)
        return HeadOutput((first + second) / 2, (first, second))


@conversion("two-heads")
def two_heads(network: nn.Module, *, head: str, seed: int) -> nn.Module:
    """Put two freshly drawn heads in the place of a network's head.

    Example:
        >>> net = two_heads(nn.Sequential(nn.Linear(4, 3)), head="0", seed=0)
        >>> type(net[0]).__name__
        'TwoHeads'
    """
    network.set_submodule(head, TwoHeads(cast(nn.Linear, network.get_submodule(head)), seed))
    return network


class DiscrepancyLoss(Loss):
    """Cross-entropy of the labels for both heads; later, images without labels must divide the heads.

    From ``start`` on, ``max(margin - mean of [H(p1) - H(p2)], 0)`` over the unlabelled images is added, H being the
    entropy of a head's softmax: the first head learns to be unsure about them, the second to be sure.

    Labelled and unlabelled images go through the network as one batch, where reproductions of the paper pass one after
    the other; the learning rate is the recipe's throughout; and the weights of the last step are kept, not those of
    the epoch that did best on held-out outliers. OpenOOD differs more: its entropies run over the batch instead of the
    classes, its margin is never met, and its score is the MSP of the first head.

    Args:
        margin: 1.2 in the paper. The difference of entropies cannot pass log C, so with three classes or fewer a
            margin below that lets the training come to rest.
        start: The share of the training that is done with labels alone. The paper trains so to the end and then adds
            ten epochs at a low learning rate: about as many as half of a short recipe has; a long one can begin later.
        outliers_per_image: Unlabelled images that come with each training image.
    """

    name = "classifier discrepancy"
    unanchored_only = True

    def __init__(self, margin: float = 1.2, start: float = 0.5, outliers_per_image: int = 1) -> None:
        self.margin = between("margin", margin, 0, float("inf"))
        self.start = between("start", start, 0, 1)
        self.outliers_per_image = at_least("outliers_per_image", outliers_per_image, 1)

    def check(self, net: Classifier) -> None:
        """Raise if the network has one head."""
        _head_of(net)

    def loss(self, step: Step) -> StepLoss:
        """The loss of labelled images, and with unlabelled ones as one batch once it is their time."""
        assert step.outliers is not None
        late = step.done >= self.start
        output = step.forward(torch.cat([step.x, step.outliers]) if late else step.x, raw=True)
        count, (first, second) = len(step.x), output.extra
        logits = step.fitting(output.logits[:count])
        value = _cross_entropy(first[:count], step) + _cross_entropy(second[:count], step)
        if late:
            apart = (scores.entropy(first[count:]) - scores.entropy(second[count:])).mean()
            value = value + (self.margin - apart).clamp_min(0)
        return StepLoss(value, logits)

    def config(self) -> dict[str, Any]:
        """The margin, when it begins, and how many unlabelled images come with an image."""
        return {"margin": self.margin, "start": self.start, "outliers_per_image": self.outliers_per_image}


@register
class ClassifierDiscrepancy(TrainedDetector):
    """Maximum classifier discrepancy (Yu and Aizawa, ICCV 2019): two heads that agree on known images alone.

    Two linear heads on one network learn the same labels; then, on unlabelled images, one is trained to be unsure and
    the other to be sure, as far as the labels allow, so that they part where there are no labels to hold them
    together. The score is the L1 distance between their softmaxes, from 0 to 2. Use it where you have unlabelled images
    of the kind the detector will meet: known and unknown ones may be mixed, so nobody has to sort them; tables mark it
    as having used outliers. Trains about half as long again as a plain network (one unlabelled image with each labelled
    one, in the second half); scoring costs one forward pass.

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

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.head = _head_of(self.net)

    @classmethod
    def prepare(cls, net: nn.Module, *, head: str | None = None, seed: int = 0) -> Any:
        """A copy of a network with two freshly drawn heads in the place of its last linear layer, or of ``head``."""
        network = net.network if isinstance(net, Classifier) else net
        if _names_of_heads(network):
            raise InputError("net must have one head, to be replaced by two; it has two already: train it as it is")
        return convert(net, "two-heads", head=head_name(network, head), seed=seed)

    @classmethod
    def loss(cls, *, margin: float = 1.2, start: float = 0.5, outliers_per_image: int = 1) -> DiscrepancyLoss:
        """Cross-entropy of both heads, which unlabelled images divide later; see `DiscrepancyLoss`."""
        return DiscrepancyLoss(margin, start, outliers_per_image)

    def outputs(self, x: Tensor) -> Outputs:
        """The mean of the two heads' logits, and how far apart their softmaxes are."""
        names = (f"{self.head}.first", f"{self.head}.second")
        logits, found = self.net.features(x, names)
        first, second = (found[name].softmax(dim=1) for name in names)  # (B, C) each
        return Outputs(logits, (first - second).abs().sum(dim=1))

    def config(self) -> dict[str, Any]:
        """There is nothing to configure."""
        return {}


def _cross_entropy(logits: Tensor, step: Step) -> Tensor:
    return F.cross_entropy(logits, step.y, label_smoothing=step.label_smoothing)


def _names_of_heads(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, TwoHeads)]


def _head_of(net: Classifier) -> str:
    """The name of the two heads, inside the network."""
    names = _names_of_heads(net.network)
    if not names:
        raise InputError(
            "net must have two heads; it has one: make them with ClassifierDiscrepancy.prepare(net) and train it with "
            "loss=ClassifierDiscrepancy.loss()"
        )
    return names[0]
