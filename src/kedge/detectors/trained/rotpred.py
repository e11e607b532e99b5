"""RotPred: predicting rotations."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.checks import between
from kedge.data import Preprocess
from kedge.detectors.base import Cost, Outputs
from kedge.detectors.registry import register
from kedge.detectors.trained.base import MethodLoss, TrainedDetector
from kedge.errors import InputError
from kedge.models.classifier import Classifier
from kedge.models.conversion import convert, head_conversion
from kedge.models.head import HeadOutput, head_to_prepare, prepared_head
from kedge.seeds import seeded
from kedge.training.losses import Step, StepLoss

TURNS = 4  # by 0, 90, 180 and 270 degrees


class RotationHead(nn.Module):
    """A network's own head, and a second one that predicts by how many quarter turns an image is rotated."""

    def __init__(self, head: nn.Linear, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.rotations = nn.Linear(head.in_features, TURNS).to(head.weight)
        self.classes = head  # after the rotations, since the last linear layer of a network is its head

    def forward(self, features: Tensor) -> HeadOutput:
        """Features (B, d) to the logits of the classes, with those of the rotations."""
        return HeadOutput(self.classes(features), (self.rotations(features),))


head_conversion("rotpred", RotationHead)


def rotated(images: Tensor) -> Tensor:
    """Each image in its four rotations, one after the other: (B, D, H, H) -> (4 B, D, H, H)."""
    return torch.stack([images.rot90(turns, (2, 3)) for turns in range(TURNS)], dim=1).flatten(0, 1)


@dataclass(eq=False)
class RotationLoss(MethodLoss):
    """Cross-entropy of the labels of upright images, plus ``weight`` times that of the rotations of all four.

    An anchored network draws anchors among all rotated images of the batch.

    Args:
        weight: 0.5 in the paper; OpenOOD takes 1.
    """

    name = "rotpred"

    weight: float = 0.5

    def __post_init__(self) -> None:
        between("weight", self.weight, 0, float("inf"))

    def check(self, net: Classifier) -> None:
        """Raise if the network has no head for rotations."""
        prepared_head(net, RotationHead, "RotPred")

    def loss(self, step: Step) -> StepLoss:
        """The loss of a batch and its rotations, in one forward pass."""
        _check_square(tuple(step.x.shape[1:]))
        _, head = prepared_head(step.net, RotationHead, "RotPred")
        anchors = {"among": rotated(step.anchors["among"]), "first": TURNS * step.first} if step.anchors else {}
        outputs: list[Tensor] = []
        # By a hook, since an anchored network returns nothing but logits.
        with head.register_forward_hook(lambda _, inputs, output: outputs.append(output.extra[0])):
            logits = step.forward(rotated(step.x), **anchors)
        turns = torch.arange(len(logits), device=logits.device) % TURNS
        upright = turns == 0
        fit = F.cross_entropy(
            step.fitting(logits[upright]), step.targets(upright), label_smoothing=step.label_smoothing
        )
        value = fit + self.weight * F.cross_entropy(outputs[-1].to(logits.dtype), turns)
        return StepLoss(value, logits[upright])


@register
class RotPred(TrainedDetector):
    """Rotation prediction (Hendrycks et al., NeurIPS 2019): whether the network can tell how an image is rotated.

    A second head learns to tell by how many quarter turns a training image is rotated; images of unknown kinds are
    harder to set upright. The score is ``mean(z) - logsumexp(z)`` of the logits z, which is the KL divergence from
    uniform to the softmax, negated, plus the mean over the four rotations of the second head's cross-entropy; logits
    are those of the upright image. With PixMix (``Recipe(pixmix=True)``) it leads OpenOOD's table of CIFAR-10. Use it
    on square images with an upright side, and where training anew is fine; it fails on images without one, as from
    above or under a microscope. Training and scoring cost four forward passes per image.
    https://arxiv.org/abs/1906.12340

    Args:
        net: A network from ``RotPred.prepare``, trained with ``RotPred.loss()``, unanchored or anchored. With anchors,
            both heads' logits are means.

    Example:
        >>> import kedge
        >>> noise = kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8)).byte(), torch.arange(64) % 2)
        >>> net = RotPred.prepare(kedge.models.build("compact", width=4, classes=2, channels=1))
        >>> recipe = kedge.training.recipe("demo", epochs=1)
        >>> net = kedge.train(net, noise, recipe, loss=RotPred.loss())
        >>> RotPred(net).fit(noise).score(noise).shape
        torch.Size([64])
    """

    name = "rotpred"
    reads_train = False  # its network has learned already
    loss = RotationLoss

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.head, _ = prepared_head(self.net, RotationHead, type(self).__name__)

    @classmethod
    def prepare(cls, net: nn.Module, *, head: str | None = None, seed: int = 0) -> Any:
        """A copy of a network with a head for rotations next to its last linear layer, or next to ``head``."""
        name, _ = head_to_prepare(net, RotationHead, head)
        return convert(net, "rotpred", head=name, seed=seed)

    @property
    def cost(self) -> Cost:
        """A pass for each rotation."""
        return Cost(forward=TURNS * self.net.passes)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Check that images are square."""
        _check_square(preprocess.shape)
        super().fit_method(train_set, preprocess)

    def outputs(self, x: Tensor) -> Outputs:
        """The logits of the upright images, and the score of both heads."""
        layer = f"{self.head}.rotations"
        logits, losses = [], []
        for turns in range(TURNS):
            z, features = self.net.features(x.rot90(turns, (2, 3)), [layer], like=x)
            logits.append(z)
            losses.append(-features[layer].log_softmax(dim=1)[:, turns])
        return Outputs(logits[0], scores.kl_uniform(logits[0]) + torch.stack(losses).mean(dim=0))


def _check_square(shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or shape[1] != shape[2]:
        raise InputError(f"images must be square to be rotated by RotPred, (D, H, H); got {shape}: resize or crop them")
