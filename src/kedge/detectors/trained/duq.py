"""Deterministic uncertainty quantification."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, between
from kedge.detectors.logits import LogitDetector
from kedge.detectors.registry import register
from kedge.detectors.trained.base import MethodLoss, TrainedDetector
from kedge.models.classifier import Classifier, evaluating
from kedge.models.conversion import convert, head_conversion
from kedge.models.features import INPUT
from kedge.models.head import head_to_prepare, prepared_head
from kedge.seeds import seeded
from kedge.training.engine import in_parallel
from kedge.training.losses import Step, StepLoss

INITIAL = 0.05  # standard deviation of the first centroids, as in the published code


class RBFHead(nn.Module):
    """A head that measures how close an image's features are to the centroid of each class.

    Each class has a matrix W_c of its own. The outputs are the logarithms of the kernel values
    K_c = exp(-mean of (W_c f - e_c)^2 / (2 length_scale^2)): 0 at the centroid, less further away.
    """

    counts: Tensor  # N_c, (C,)
    centroids: Tensor  # e_c = m_c / N_c, (C, E)

    def __init__(self, like: nn.Linear, centroid_size: int, *, length_scale: float, gamma: float, seed: int) -> None:
        super().__init__()
        classes, width = like.out_features, like.in_features
        at_least("centroid_size", centroid_size, 1)
        self.length_scale = between("length_scale", length_scale, 0, float("inf"), open_ends=True)
        self.gamma = between("gamma", gamma, 0, 1, open_ends=True)
        with seeded(seed):
            weight = torch.randn(classes, centroid_size, width) * math.sqrt(2 / (classes * width))
            centroids = torch.randn(classes, centroid_size) * INITIAL
        self.weight = nn.Parameter(weight.to(like.weight))
        self.register_buffer("centroids", centroids.to(like.weight))
        # A first centroid, drawn at random, weighs as much as one image: the images of the first steps replace it.
        self.register_buffer("counts", like.weight.new_full((classes,), 1 - gamma))

    def embed(self, features: Tensor) -> Tensor:
        """W_c f for each class, (B, d) -> (B, C, E)."""
        return torch.einsum("bd,ced->bce", features, self.weight)

    def forward(self, features: Tensor) -> Tensor:
        """The logarithms of the kernel values, (B, d) -> (B, C)."""
        distance = (self.embed(features) - self.centroids).square().mean(dim=2)  # (B, C)
        return -distance / (2 * self.length_scale**2)

    @torch.no_grad()
    def move(self, features: Tensor, labels: Tensor) -> None:
        """Move the centroids towards the mean embedding of their classes' images, features (B, d).

        The same as N_c <- gamma N_c + (1 - gamma) n_c and m_c <- gamma m_c + (1 - gamma) (sum of the embeddings), with
        e_c = m_c / N_c kept instead of m_c: a class that does not appear keeps its centroid, even when N_c fades to 0.
        """
        own = F.one_hot(labels, len(self.counts)).to(features)  # (B, C)
        seen, sums = own.sum(dim=0), torch.einsum("bce,bc->ce", self.embed(features), own)  # (C,), (C, E)
        if in_parallel():
            torch.distributed.all_reduce(seen)
            torch.distributed.all_reduce(sums)
        self.counts.lerp_(seen, 1 - self.gamma)
        share = (1 - self.gamma) / self.counts.clamp_min(torch.finfo(self.counts.dtype).tiny)  # of one image, (C,)
        self.centroids += share[:, None] * (sums - seen[:, None] * self.centroids)


head_conversion("duq", RBFHead)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact where exp(x) is close to 0 and where it is close to 1 (Maechler, 2012)."""
    middle = -math.log(2)
    # Each branch gets only the values that it is used for: a branch not taken must not put NaN into the gradient.
    near, far = x.clamp_min(middle), x.clamp_max(middle)
    return torch.where(x > middle, (-near.expm1()).log(), (-far.exp()).log1p())


def kernel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over images and classes of the binary cross-entropy of K_c = exp(logits) to the one-hot labels."""
    own = F.one_hot(labels, logits.shape[1]).bool()
    # Below this, K is 1 in this precision, and the logarithm of 1 - K would be infinite.
    other = log1mexp(logits.clamp_max(-torch.finfo(logits.dtype).eps))
    return -torch.where(own, logits, other).mean()


def gradient_penalty(gradients: Tensor) -> Tensor:
    """The mean over images of (length - 1)^2, the length being that of an image's gradient, (B, ...)."""
    lengths: Tensor = torch.linalg.vector_norm(gradients.flatten(start_dim=1), dim=1)  # (B,)
    return (lengths - 1).square().mean()


@dataclass(eq=False)
class DUQLoss(MethodLoss):
    """Binary cross-entropy of the kernel values, plus ``penalty`` times the gradient penalty on their sum.

    The penalty is two-sided, (length - 1)^2 as in the published code, where the paper's formula has
    (length^2 - 1)^2; the gradient is that of the sum of K_c with respect to the normalised image. The cross-entropy is
    the mean over classes, as in the published code. After each step the centroids move, by the features of the step's
    images in evaluation mode. The recipe's label smoothing is not used.

    Args:
        penalty: 0.5 in the paper for CIFAR-10; 0 leaves the second derivatives out.
    """

    name = "duq"
    unanchored_only = True

    penalty: float = 0.5

    def __post_init__(self) -> None:
        between("penalty", self.penalty, 0, float("inf"))

    def check(self, net: Classifier) -> None:
        """Raise if the network has no RBF head."""
        prepared_head(net, RBFHead, "DUQ")

    def loss(self, step: Step) -> StepLoss:
        """The loss of a batch."""
        x = step.x.detach().requires_grad_(self.penalty > 0)
        logits = step.fitting(step.forward(x))
        value = kernel_cross_entropy(logits, step.y)
        if self.penalty > 0:
            (gradients,) = torch.autograd.grad(logits.exp().sum(), x, create_graph=True)
            per_channel = step.net.std.view(1, -1, *(1,) * (x.ndim - 2))
            value = value + self.penalty * gradient_penalty(gradients * per_channel)  # of (x - mean) / std
        return StepLoss(value, logits)

    def after_step(self, step: Step) -> None:
        """Move the centroids."""
        name, head = prepared_head(step.net, RBFHead, "DUQ")
        with evaluating(step.net), torch.no_grad():
            _, features = step.net.features(step.x, [name + INPUT])
        head.move(features[name + INPUT], step.y)


@register
class DUQ(LogitDetector, TrainedDetector):
    """Deterministic uncertainty quantification (van Amersfoort et al., ICML 2020): the distance to the closest class.

    The network learns to bring images close to the centroid of their class and away from the others; a penalty on its
    gradient keeps it sensitive to changes of the image, so that unknown images do not fall on known centroids. The
    score is -log of the paper's largest kernel value, a squared distance: the same order, without underflow. Use it
    where training anew is fine and scoring must be cheap: training takes about three times as long, for the second
    derivatives of the penalty; scoring costs one forward pass.

    Args:
        net: A network from ``DUQ.prepare``, trained with ``DUQ.loss()``.

    Example:
        >>> import kedge
        >>> noise = kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8)).byte(), torch.arange(64) % 2)
        >>> net = DUQ.prepare(kedge.models.build("compact", width=4, classes=2, channels=1))
        >>> recipe = kedge.training.recipe("demo", epochs=1)
        >>> net = kedge.train(net, noise, recipe, loss=DUQ.loss())
        >>> DUQ(net).fit(noise).score(noise).shape
        torch.Size([64])
    """

    name = "duq"
    options = ()
    loss = DUQLoss
    score_function = scores.max_logit  # minus the largest logarithm of a kernel value

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        prepared_head(self.net, RBFHead, "DUQ")

    @classmethod
    def prepare(
        cls,
        net: nn.Module,
        *,
        centroid_size: int | None = None,
        length_scale: float = 0.1,
        gamma: float = 0.999,
        head: str | None = None,
        seed: int = 0,
    ) -> Any:
        """A copy of a network with a freshly drawn `RBFHead` in the place of its last linear layer, or of ``head``.

        Args:
            net: A network that ends in a linear layer.
            centroid_size: Length of the centroids; by default that of the penultimate vector, as in the paper.
            length_scale: Length scale of the kernel; 0.1 in the paper, chosen among 0.05 to 1 by validation accuracy.
            gamma: Decay of the exponential average that moves the centroids.
            head: The name of the last linear layer, where it is not the one registered last.
            seed: Seed of the new head.
        """
        name, linear = head_to_prepare(net, RBFHead, head)
        size = linear.in_features if centroid_size is None else centroid_size
        options = {"length_scale": length_scale, "gamma": gamma, "seed": seed}
        return convert(net, "duq", head=name, centroid_size=size, **options)
