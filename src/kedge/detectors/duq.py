"""Deterministic uncertainty quantification."""

import math
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
from kedge.models.classifier import Classifier, evaluating
from kedge.models.conversion import conversion, convert
from kedge.models.ensemble import Ensemble
from kedge.models.features import INPUT
from kedge.models.head import head_name
from kedge.seeds import seeded
from kedge.training.losses import Loss, Step, StepLoss

SPREAD = 0.05  # deviation of the first centroids, as in the published code


class RBFHead(nn.Module):
    """A head that says how close an image's features are to the centroid of each class.

    Each class looks at the features through a matrix of its own. The outputs are the logarithms of the kernel values
    K_c = exp(-mean of (W_c f - e_c)^2 / (2 length_scale^2)): 0 at the centroid, less further away.

    Args:
        like: The layer whose place it takes.
        centroid_size: E, the length of the centroids.
        length_scale: Of the kernel.
        gamma: Of the exponential average that moves the centroids.
        seed: Of the first matrices and centroids.

    Example:
        >>> head = RBFHead(nn.Linear(8, 3), 4, length_scale=0.1, gamma=0.999, seed=0)
        >>> head(torch.rand(5, 8)).shape
        torch.Size([5, 3])
    """

    counts: Tensor  # N_c, (C,)
    centroids: Tensor  # e_c = m_c / N_c, (C, E)

    def __init__(self, like: nn.Linear, centroid_size: int, *, length_scale: float, gamma: float, seed: int) -> None:
        super().__init__()
        classes, width = like.out_features, like.in_features
        self.length_scale, self.gamma = length_scale, gamma
        with seeded(seed):
            weight = torch.randn(classes, centroid_size, width) * math.sqrt(2 / (classes * width))
            centroids = torch.randn(classes, centroid_size) * SPREAD
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
        """Move the centroids towards the mean of what their classes' images (B, d) are embedded to.

        The same as N_c <- gamma N_c + (1 - gamma) n_c and m_c <- gamma m_c + (1 - gamma) (sum of the embeddings), with
        e_c = m_c / N_c kept instead of m_c: a class that does not appear keeps its centroid, even when N_c fades to 0.
        """
        own = F.one_hot(labels, len(self.counts)).to(features)  # (B, C)
        seen, sums = own.sum(dim=0), torch.einsum("bce,bc->ce", self.embed(features), own)  # (C,), (C, E)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(seen)
            torch.distributed.all_reduce(sums)
        self.counts.lerp_(seen, 1 - self.gamma)
        share = (1 - self.gamma) / self.counts.clamp_min(torch.finfo(self.counts.dtype).tiny)  # of one image, (C,)
        self.centroids += share[:, None] * (sums - seen[:, None] * self.centroids)


@conversion("duq")
def rbf_head(
    network: nn.Module, *, head: str, centroid_size: int, length_scale: float, gamma: float, seed: int
) -> nn.Module:
    """Put a freshly drawn `RBFHead` in the place of a network's head.

    Example:
        >>> options = {"centroid_size": 5, "length_scale": 0.1, "gamma": 0.999}
        >>> rbf_head(nn.Sequential(nn.Linear(4, 3)), head="0", seed=0, **options)[0].weight.shape
        torch.Size([3, 5, 4])
    """
    like = cast(nn.Linear, network.get_submodule(head))
    network.set_submodule(head, RBFHead(like, centroid_size, length_scale=length_scale, gamma=gamma, seed=seed))
    return network


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact where exp(x) is close to 0 and where it is close to 1 (Maechler, 2012).

    Example:
        >>> log1mexp(torch.tensor([-1e-5, -20.0]))
        tensor([-1.1513e+01, -2.0612e-09])
    """
    middle = -math.log(2)
    # Each branch sees only what it is used for: a branch not taken must not put NaN into the gradient.
    near, far = x.clamp_min(middle), x.clamp_max(middle)
    return torch.where(x > middle, (-near.expm1()).log(), (-far.exp()).log1p())


def kernel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over images and classes of the binary cross-entropy of K_c = exp(logits) to the one-hot labels.

    Example:
        >>> half = math.log(0.5)
        >>> kernel_cross_entropy(torch.tensor([[half, half]]), torch.tensor([0]))
        tensor(0.6931)
    """
    own = F.one_hot(labels, logits.shape[1]).bool()
    # Below this, K is 1 in this precision, and the logarithm of 1 - K would be infinite.
    other = log1mexp(logits.clamp_max(-torch.finfo(logits.dtype).eps))
    return -torch.where(own, logits, other).mean()


def gradient_penalty(gradients: Tensor) -> Tensor:
    """How far the gradient of each image, (B, ...), is from having length one: the mean of (length - 1)^2.

    Example:
        >>> gradient_penalty(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor(8.)
    """
    lengths: Tensor = torch.linalg.vector_norm(gradients.flatten(start_dim=1), dim=1)  # (B,)
    return (lengths - 1).square().mean()


class DUQLoss(Loss):
    """Binary cross-entropy of the kernel values, plus ``penalty`` times the gradient penalty on their sum.

    The penalty is two-sided, (length - 1)^2 as in the published code, where the paper's formula has
    (length^2 - 1)^2; the gradient is that of the sum of K_c with respect to the normalised image. The cross-entropy is
    the mean over classes, as in the published code. After each step the centroids move, by the features that the
    network gives its images in evaluation mode. The recipe's label smoothing is not used.

    Args:
        penalty: 0.5 in the paper for CIFAR-10; 0 leaves the second derivatives out.
    """

    name = "duq"
    unanchored_only = True

    def __init__(self, penalty: float = 0.5) -> None:
        self.penalty = between("penalty", penalty, 0, float("inf"))

    def check(self, net: Classifier) -> None:
        """Raise if the network has no RBF head."""
        _head_of(net)

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
        name, head = _head_of(step.net)
        with evaluating(step.net), torch.no_grad():
            _, found = step.net.features(step.x, [name + INPUT])
        head.move(found[name + INPUT], step.y)

    def config(self) -> dict[str, Any]:
        """The weight of the penalty."""
        return {"penalty": self.penalty}


@register
class DUQ(TrainedDetector):
    """Deterministic uncertainty quantification (van Amersfoort et al., ICML 2020): the distance to the closest class.

    In the place of its last layer the network gets one centroid per class, and learns to bring images close to their
    own and away from the others; a penalty on its gradient keeps it sensitive to changes of the image, so that new
    things do not fall on old centroids. The score is the squared distance to the closest centroid in units of the
    kernel's length scale, -log of the paper's largest kernel value and so in the same order, without its underflow.
    Use it where training anew is fine and scoring must be cheap. The second derivatives of the penalty make
    training take about three times as long; scoring costs one forward pass.

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

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        _head_of(self.net)

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
        """A copy of a network with a freshly drawn `RBFHead` in the place of its last linear layer.

        Args:
            net: A network that ends in a linear layer.
            centroid_size: Length of the centroids; by default that of the penultimate vector, as in the paper.
            length_scale: Of the kernel; 0.1 in the paper, chosen among 0.05 to 1 by validation accuracy.
            gamma: Of the exponential average that moves the centroids.
            head: The name of the last linear layer, where it is not the one registered last.
            seed: Of the new head.
        """
        network = net.network if isinstance(net, Classifier) else net
        if isinstance(net, Ensemble) or _heads(network):
            came = "an ensemble" if isinstance(net, Ensemble) else "one with an RBF head already"
            raise InputError(f"net must be a network with a linear head, got {came}; prepare single plain networks")
        name = head_name(network, head)
        if centroid_size is None:
            centroid_size = cast(nn.Linear, network.get_submodule(name)).in_features
        at_least("centroid_size", centroid_size, 1)
        between("length_scale", length_scale, 0, float("inf"), open_ends=True)
        between("gamma", gamma, 0, 1, open_ends=True)
        arguments = {"centroid_size": centroid_size, "length_scale": length_scale, "gamma": gamma, "seed": seed}
        return convert(net, "duq", head=name, **arguments)

    @classmethod
    def loss(cls, *, penalty: float = 0.5) -> DUQLoss:
        """Binary cross-entropy of the kernel values with a gradient penalty; see `DUQLoss`."""
        return DUQLoss(penalty)

    def outputs(self, x: Tensor) -> Outputs:
        """The logarithms of the kernel values, and the squared distance to the closest centroid."""
        logits = self.net(x)
        return Outputs(logits, scores.max_logit(logits))

    def config(self) -> dict[str, Any]:
        """There is nothing to configure."""
        return {}


def _heads(network: nn.Module) -> list[tuple[str, RBFHead]]:
    return [(name, module) for name, module in network.named_modules() if isinstance(module, RBFHead)]


def _head_of(net: Classifier) -> tuple[str, RBFHead]:
    """The RBF head and its name inside the network."""
    heads = _heads(net.network)
    if isinstance(net, Ensemble) or not heads:
        came = "an ensemble" if isinstance(net, Ensemble) else "one without"
        raise InputError(
            f"net must be a network with an RBF head, got {came}: make it with DUQ.prepare(net) and train it with "
            "loss=DUQ.loss()"
        )
    return heads[0]
