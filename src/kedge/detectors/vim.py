"""ViM."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least
from kedge.detectors.base import Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.errors import InputError


@register
class ViM(FeatureDetector):
    """Virtual-logit matching (Wang et al., CVPR 2022): the features outside the training images' principal space.

    The features before the last layer are split into the principal space of the training images and the residual
    r outside it. Its norm times alpha, which makes it as large on average over the training images as the largest
    logit, is a virtual logit for "none of the classes"; the score is ``alpha ||r|| - logsumexp(logits)``, of which the
    paper's virtual softmax probability is an increasing function. Use it on networks with many more features than
    classes: it uses both what is unusual in the features and what is unusual in the logits. One forward pass and a
    d x d matrix; `fit` reads a large training set twice. ``"residual"`` names the variant whose score is ``||r||``
    alone. https://arxiv.org/abs/2203.10807

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer. With anchors, features and logits are
            means.
        dim: Dimensions of the principal space; by default, as in the paper's code, 1000 of at least 2048 features, 512
            of at least 768, otherwise half of them; at most half as many as there are training images.
        residual_only: Whether to score the residual's norm alone, without the logits.
        head: See `FeatureDetector`.

    Attributes:
        alpha: The factor of the residual's norm, once fitted; 1 with ``residual_only``.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> net[3].bias.data += 1
        >>> ViM(net, dim=2).fit(torch.rand(50, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "vim"
    options = ("dim:given", "residual_only", "head")
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"residual": {"residual_only": True}}
    learned = ("origin", "residual", "alpha")
    grid: Mapping[str, Sequence[Any]] = {"dim": (8, 16, 32, 64, 128, 256, 512, 1000)}
    reads_twice = True

    def __init__(
        self, net: nn.Module, *, dim: int | None = None, residual_only: bool = False, head: str | None = None
    ) -> None:
        super().__init__(net, head=head)
        self.given = dim if dim is None else at_least("dim", dim, 0)
        self.residual_only = residual_only
        self.origin: Any = None  # (d,)
        self.residual: Any = None  # (d, d - dim), orthonormal columns
        self.alpha: Any = None

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Find the principal space, then alpha."""
        origin: Any = None
        moment: Any = 0.0
        largest, n = 0.0, 0
        for logits, z, _ in batches:
            if origin is None:
                origin = origin_of(self.last_layer)
            centred = z.double() - origin
            moment += centred.T @ centred
            largest += float(logits.double().amax(dim=1).sum())
            n += len(z)
        dim = min(default_dim(len(origin)), n // 2) if self.given is None else self.given
        if dim >= len(origin):
            raise InputError(f"dim must be less than the {len(origin)} features, so that a residual is left; got {dim}")
        residual = torch.linalg.eigh(moment).eigenvectors[:, : len(origin) - dim]  # of ascending eigenvalues
        norms = lengths = 0.0
        for _, z, _ in batches:
            norms += float(residual_norm(z, origin, residual).sum())
            lengths += float((z.double() - origin).norm(dim=1).sum())
        if norms <= 1e-6 * lengths:
            raise InputError(
                f"dim must be smaller for this training set: its features leave no residual outside {dim} of "
                f"{len(origin)} dimensions; pass a smaller dim=, or more training images than dimensions"
            )
        if largest <= 0 and not self.residual_only:
            raise InputError(
                "the network's largest logit must be positive on average over the training images, since ViM scales "
                "the residual to it; use a method that does not need it, such as KNN"
            )
        self.origin, self.residual = origin, residual
        self.alpha = 1.0 if self.residual_only else largest / norms

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits, and the virtual logit minus their logsumexp, or alone."""
        origin, residual = self.origin.to(features.device), self.residual.to(features.device)
        virtual = self.alpha * residual_norm(features, origin, residual)  # (B,)
        score = virtual if self.residual_only else virtual + scores.energy(logits.double())
        return Outputs(logits, score.to(logits.dtype))


def default_dim(features: int) -> int:
    """The dimension of the principal space in the paper's code."""
    return 1000 if features >= 2048 else 512 if features >= 768 else features // 2


def origin_of(layer: nn.Linear) -> Tensor:
    """The point -pinv(W) b, in float64 (d,): relative to it, logits are ``W z`` without a bias."""
    weight = layer.weight.detach().double()
    if layer.bias is None:
        return weight.new_zeros(layer.in_features)
    return cast(Tensor, -(torch.linalg.pinv(weight) @ layer.bias.detach().double()))


def residual_norm(z: Tensor, origin: Tensor, residual: Tensor) -> Tensor:
    """The norm of what lies outside the principal space, (B, d) -> (B,), in float64."""
    return cast(Tensor, ((z.double() - origin) @ residual.double()).norm(dim=1))
