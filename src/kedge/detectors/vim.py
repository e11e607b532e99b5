"""ViM."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, finite
from kedge.data import Preprocess
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.registry import register
from kedge.errors import InputError
from kedge.models.classifier import evaluating
from kedge.models.head import check_head, head_name

KEPT_BYTES = 2**26  # of features that are kept instead of computed again


@register
class ViM(Detector):
    """Virtual-logit matching (Wang et al., CVPR 2022): what the features hold beside the training images' main space.

    The features before the last layer are split into the space in which the training images vary most and the residual
    outside it. The residual's length, scaled so that on training images it is as large on average as the largest
    logit, is a virtual logit for "none of the classes"; the score is that logit less the logsumexp of the others, of
    which the paper's virtual softmax probability is an increasing function. Use it on networks with many more features
    than classes: it sees both what is foreign to the features and what is foreign to the classes. Costs one forward
    pass and a d x d matrix; `fit` reads a large training set twice.

    Args:
        net: A classifier, plain or anchored, that ends in a linear layer. With anchors, features and logits are means.
        dim: Of the main space; by default, as in the paper's code, 1000 of at least 2048 features, 512 of at least 768,
            otherwise half of them.
        head: The name of the last linear layer, where it is not the one registered last.

    Attributes:
        alpha: What the residual's length is multiplied by, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> net[3].bias.data += 1
        >>> ViM(net, dim=2).fit(torch.rand(50, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "vim"
    reads = "features"

    def __init__(self, net: nn.Module, *, dim: int | None = None, head: str | None = None) -> None:
        super().__init__(net)
        self.head = head_name(self.net.network, head)
        features = self._layer.in_features
        self.dim = default_dim(features) if dim is None else at_least("dim", dim, 0)
        if self.dim >= features:
            raise InputError(f"dim must be less than the {features} features, so that a residual is left; got {dim}")
        self.origin: Tensor | None = None  # (d,)
        self.residual: Tensor | None = None  # (d, d - dim), orthonormal columns
        self.alpha: float | None = None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Find the main space, then the scale of the residual: in a second pass where the features were too many."""
        super().fit_method(train_set, preprocess)
        origin = origin_of(self._layer)
        moment, first = torch.zeros(len(origin), len(origin), dtype=torch.float64, device=origin.device), True
        kept, largest = _Kept(), 0.0
        with evaluating(self.net), torch.no_grad():
            for x, _ in self.inputs(train_set, preprocess):
                logits, z = self._read(x)
                finite("features", z, "check the network's weights")
                if first:
                    check_head(self.net.network, self.head, logits, z)
                    first = False
                centred = z.double() - origin
                moment += centred.T @ centred
                largest += float(logits.double().amax(dim=1).sum())
                kept.add(z)
            residual = torch.linalg.eigh(moment).eigenvectors[:, : len(origin) - self.dim]  # of ascending eigenvalues
            norms = lengths = 0.0
            again = (self._read(x)[1] for x, _ in self.inputs(train_set, preprocess))
            for z in again if kept.features is None else kept.features:
                norms += float(residual_norm(z, origin, residual).sum())
                lengths += float((z.double() - origin).norm(dim=1).sum())
        if norms <= 1e-6 * lengths:
            raise InputError(
                f"dim must be smaller for this training set: its features leave no residual beside {self.dim} of "
                f"{len(origin)} dimensions; pass a smaller dim=, or more training images than dimensions"
            )
        if largest <= 0:
            raise InputError(
                "the network's largest logit must be positive on average over the training images, since ViM scales "
                "the residual to it, and it is not; use a method that does not need it, such as KNN"
            )
        self.origin, self.residual, self.alpha = origin, residual, largest / norms

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and the virtual logit less their logsumexp."""
        assert self.origin is not None
        assert self.residual is not None
        assert self.alpha is not None
        logits, z = self._read(x)
        self.origin, self.residual = self.origin.to(z.device), self.residual.to(z.device)
        virtual = self.alpha * residual_norm(z, self.origin, self.residual)  # (B,)
        return Outputs(logits, (virtual + scores.energy(logits.double())).to(logits.dtype))

    def config(self) -> dict[str, Any]:
        """The arguments, defaults resolved."""
        return {"dim": self.dim, "head": self.head}

    def state(self) -> dict[str, Tensor]:
        """The origin, the space of residuals and their scale."""
        if self.origin is None or self.residual is None or self.alpha is None:
            return {}
        alpha = torch.tensor(self.alpha, dtype=torch.float64)
        return {"origin": self.origin, "residual": self.residual, "alpha": alpha}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them back."""
        self.origin, self.residual, self.alpha = state["origin"], state["residual"], float(state["alpha"])

    @property
    def _layer(self) -> nn.Linear:
        return cast(nn.Linear, self.net.network.get_submodule(self.head))

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and the head's input (B, d)."""
        layer = f"{self.head}:in"
        logits, features = self.net.features(x, [layer])
        return logits, features[layer]


class _Kept:
    """Features of a first pass, as long as they take little memory; None from then on."""

    def __init__(self) -> None:
        self.features: list[Tensor] | None = []
        self.bytes = 0

    def add(self, z: Tensor) -> None:
        self.bytes += z.numel() * z.element_size()
        if self.features is not None:
            self.features.append(z)
        if self.bytes > KEPT_BYTES:
            self.features = None


def default_dim(features: int) -> int:
    """The dimension of the main space in the paper's code.

    Example:
        >>> default_dim(2048), default_dim(768), default_dim(128)
        (1000, 512, 64)
    """
    return 1000 if features >= 2048 else 512 if features >= 768 else features // 2


def origin_of(layer: nn.Linear) -> Tensor:
    """The point -pinv(W) b, in float64 (d,): features are measured from it, so that W alone makes the logits.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.data, layer.bias.data = torch.tensor([[0.0, 2.0]]), torch.tensor([6.0])
        >>> origin_of(layer)
        tensor([-0., -3.], dtype=torch.float64)
    """
    weight = layer.weight.detach().double()
    if layer.bias is None:
        return weight.new_zeros(layer.in_features)
    origin: Tensor = -(torch.linalg.pinv(weight) @ layer.bias.detach().double())
    return origin


def residual_norm(z: Tensor, origin: Tensor, residual: Tensor) -> Tensor:
    """The length of what lies outside the main space, in float64.

    Example:
        >>> residual_norm(torch.tensor([[3.0, 1.0, 2.0]]), torch.zeros(3), torch.eye(3)[:, 1:])
        tensor([2.2361], dtype=torch.float64)
    """
    norm: Tensor = ((z.double() - origin) @ residual.double()).norm(dim=1)  # (B, d) -> (B,)
    return norm
