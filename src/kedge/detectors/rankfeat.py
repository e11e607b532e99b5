"""RankFeat."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import finite
from kedge.data import Preprocess
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.registry import register
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.head import in_anchored_layer
from kedge.threads import own_thread


def remove_first_component(matrices: Tensor) -> Tensor:
    """Matrices (B, m, n) without their largest singular component, ``X - s1 u1 v1^T``.

    The singular vector of the shorter side is an eigenvector of a small Gram matrix, which is found in float64.
    """
    wide = matrices.shape[1] < matrices.shape[2]
    x = (matrices.mT if wide else matrices).double()  # (B, long, short)
    v = torch.linalg.eigh(x.mT @ x).eigenvectors[:, :, -1:]  # (B, short, 1)
    rest = x - (x @ v) @ v.mT
    result: Tensor = (rest.mT if wide else rest).to(matrices.dtype)
    return result


@register
class RankFeat(Detector):
    """RankFeat (Song, Sebe and Wang, NeurIPS 2022): the energy after the largest singular component is removed.

    The map of a layer is a matrix of channels by positions, or of tokens by features. Its largest singular component,
    which is stronger for unknown images and drives their confidence, is subtracted, the rest of the network runs on
    what is left, and the score is the energy of the logits that come out; labels come from the network as it is. Use
    it on large CNNs, for textures and scenes far from the training set; on small images, whose last map has few
    positions, it takes too much away. The paper's best variant on ImageNet averages the logits of the last two
    blocks; this is the one of a single layer. Two forward passes, which share what comes before the layer where the
    network allows it; nothing to learn. https://arxiv.org/abs/2209.08590

    Args:
        net: Any classifier, unanchored or anchored. With anchors the component is removed under each anchor.
        layer: The name of a layer inside the network that gives (B, channels, ...) or tokens (B, tokens, features); by
            default `fit` finds, by running the network, the last one with more than one position.

    Attributes:
        layer: The layer in use, once fitted.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> detector = RankFeat(net).fit(torch.rand(8, 3, 4, 4))
        >>> detector.layer, detector.score(torch.rand(5, 3, 4, 4)).shape
        ('1', torch.Size([5]))
    """

    name = "rankfeat"
    reads = "maps"
    options = ("layer",)

    def __init__(self, net: nn.Module, *, layer: str | None = None) -> None:
        super().__init__(net)
        self.layer = self._given = layer

    @property
    def cost(self) -> Cost:
        """A pass for the labels, and one without the component."""
        return Cost(forward=2 * self.net.passes)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Find the layer, or check the given one, on the first images."""
        super().fit_method(train_set, preprocess)
        for x, _ in self.inputs(train_set, preprocess):
            layer = self._given or last_map(self.net, x[:2])
            values = self.net.features(x, [layer])[1][layer]
            finite("features", values, "check the network's weights")
            if not _has_positions(as_matrices(values, _width(self.net.network))):
                raise InputError(
                    f"layer must give maps of more than one channel and position; {layer!r} gives "
                    f"{tuple(values.shape[1:])} per image: name an earlier layer, or leave it out"
                )
            self.layer = layer
            break

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and the energy of those without the component."""
        logits, changed = self._jointly(x) or (self.net(x), self._changed(x, self._without))
        return Outputs(logits, scores.energy(changed))

    def _jointly(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logits with and without the component, (B, C), in one pass: the layers after the map take both at once.

        None where they cannot: with anchors, and where a connection leads around the map, which keeps B images.
        """
        if not self.anchored:
            with suppress(RuntimeError, InputError):
                both = self._changed(x, lambda values: torch.cat([values, self._without(values)]))
                if len(both) == 2 * len(x):
                    return both[: len(x)], both[len(x) :]
        return None

    def _changed(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The logits with the layer's output changed."""
        layer = self.net.network.get_submodule(str(self.layer))
        with layer.register_forward_hook(own_thread(lambda _, inputs, output: change(output))):
            return self.net.features(x)[0]

    def _without(self, values: Tensor) -> Tensor:
        """A layer's output without its first component."""
        return remove_first_component(as_matrices(values, _width(self.net.network))).reshape(values.shape)


def as_matrices(values: Tensor, width: int | None) -> Tensor:
    """Maps as matrices (B, m, n): (B, C, H, W) is (B, C, HW), and (B, H, W, C) with C = ``width`` is (B, HW, C)."""
    if values.ndim < 3:
        return values[:, None]
    last = values.ndim > 3 and values.shape[-1] == width != values.shape[1]
    return values.flatten(1, -2) if last else values.flatten(2)


def last_map(net: Classifier, example: Tensor) -> str:
    """The name of the last layer with maps of more than one position, found by running the network."""
    calls: list[str] = []
    maps: set[str] = set()

    @own_thread
    def note(name: str, output: Any) -> None:
        calls.append(name)
        if isinstance(output, Tensor) and _has_positions(as_matrices(output, _width(net.network))):
            maps.add(name)

    with ExitStack() as hooks:
        start = own_thread(lambda *_: calls.clear())  # groups of anchors run one after the other
        hooks.enter_context(net.network.register_forward_pre_hook(start))
        for name, module in net.network.named_modules():
            if name and not in_anchored_layer(name):
                hooks.enter_context(module.register_forward_hook(lambda _m, _i, out, name=name: note(name, out)))
        net(example)
    for name in reversed(calls):
        if name in maps and calls.count(name) == 1:
            return name
    raise ArchitectureError(
        f"{type(net.network).__name__} has no layer with maps of more than one position, which RankFeat needs; use a "
        "method that reads features or logits"
    )


def _has_positions(matrices: Tensor) -> bool:
    return min(matrices.shape[1:]) > 1


def _width(network: nn.Module) -> int | None:
    """The width of the last linear layer's input."""
    return next((m.in_features for m in reversed(list(network.modules())) if isinstance(m, nn.Linear)), None)
