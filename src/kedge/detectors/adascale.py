"""AdaSCALE."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import between, one_of
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures
from kedge.detectors.registry import register
from kedge.detectors.shaping import top_ratio
from kedge.errors import InputError, NotReadyError


@register
class AdaSCALE(FeatureDetector):
    """Adaptive scaling (Regmi, 2025): SCALE or LTS with a percentile for each image, from how its features move.

    The share ``o`` of input values with the smallest gradients of the predicted logit moves by ``epsilon`` in the
    gradient's direction. Q, which is large for unknown images, is ``lam`` times the sum of how far the k1 largest
    features h move, plus the sum of the k2 largest ones after the move. With F the distribution of Q over held-out
    in-distribution images, the percentile is ``p = low + (1 - F(Q)) (high - low)``, and r is the sum of all positive
    features over that of those above their percentile p. AdaSCALE-A scores the energy of the logits of ``h exp(r)``,
    AdaSCALE-L of ``r^2 z``; so images that move little are scaled up most. Use it on large convolutional networks,
    where it improves on SCALE, if a gradient is affordable. Two forward passes and one backward pass; `calibrate`
    learns F on half of its images. The paper chooses the percentiles with OOD validation images; the default is its
    choice for ResNet-50. When it scores an image the published code exchanges k1 and k2; here they are the same as
    for F. https://arxiv.org/abs/2503.08023

    Args:
        net: A classifier, unanchored or anchored, that ends in a linear layer.
        scale: ``"features"`` (AdaSCALE-A) or ``"logits"`` (AdaSCALE-L).
        percentile: The lowest and the highest percentile, as shares.
        k1: The share of features whose moves are summed.
        k2: The share of features that are summed after the move.
        lam: The weight of the moves.
        o: The share of input values that move.
        epsilon: The step, in the units of the network's normalised input.
        head: See `FeatureDetector`.

    Attributes:
        shifts: Q of the held-out images, sorted, once calibrated.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> detector = AdaSCALE(net, percentile=(0.4, 0.8)).fit(torch.rand(8, 3, 2, 2))
        >>> detector.calibrate(torch.rand(80, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "adascale"
    reads_train = False  # it learns from held-out images
    reads = "gradients"
    learns_held_out = True
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"adascale-l": {"scale": "logits"}}
    options = ("scale", "percentile", "k1", "k2", "lam", "o", "epsilon", "head")
    learned = ("shifts",)
    grid: Mapping[str, Sequence[Any]] = {"percentile": ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.85), (0.85, 0.95))}

    def __init__(
        self,
        net: nn.Module,
        *,
        scale: str = "features",
        percentile: Sequence[float] = (0.8, 0.85),
        k1: float = 0.01,
        k2: float = 0.05,
        lam: float = 10.0,
        o: float = 0.05,
        epsilon: float = 0.5,
        head: str | None = None,
    ) -> None:
        super().__init__(net, head=head)
        self.scale = one_of("scale", scale, ("features", "logits"))
        if isinstance(percentile, int | float) or len(percentile) != 2 or not 0 <= percentile[0] <= percentile[1] <= 1:
            raise InputError(f"percentile must be two shares, the lower first, as (0.8, 0.85); got {percentile!r}")
        self.percentile = tuple(percentile)
        self.k1, self.k2, self.o = between("k1", k1, 0, 1), between("k2", k2, 0, 1), between("o", o, 0, 1)
        self.lam = between("lam", lam, 0, float("inf"))
        self.epsilon = between("epsilon", epsilon, 0, float("inf"))
        self.shifts: Any = None

    @property
    def takes_features(self) -> bool:
        """False, since it moves the images."""
        return False

    @property
    def cost(self) -> Cost:
        """A pass and its gradient, and a pass of the moved image."""
        return Cost(forward=2 * self.net.passes, backward=self.net.passes)

    of_features = Detector.of_features

    def fit_features(self, batches: TrainingFeatures) -> None:
        """Forget the moves of the held-out images."""
        super().fit_features(batches)
        self.shifts = None

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn how far the features of held-out images move."""
        pieces = (piece for x in images.split(256) for piece in self.pieces(self.as_input(x)))
        self.shifts = torch.cat([self._moved(piece)[2] for piece in pieces]).sort().values

    def outputs(self, x: Tensor) -> Outputs:
        """The logits of the images as they are, and the energy of the scaled ones."""
        if self.shifts is None:
            raise NotReadyError(
                "AdaSCALE does not know yet how far the features of in-distribution images move: call "
                "calibrate(held_out)"
            )
        parts = [self._moved(piece) for piece in self.pieces(x)]
        logits, features, shift = (torch.cat(values) for values in zip(*parts, strict=True))
        known = self.shifts.to(shift.device)
        rank = torch.searchsorted(known, shift, right=True) / len(known)  # F(Q), (B,)
        low, high = self.percentile
        ratio = top_ratio(features, low + (1 - rank) * (high - low))  # (B, 1)
        scaled = logits * ratio**2 if self.scale == "logits" else self.last_layer(features * ratio.exp())
        return Outputs(logits, scores.energy(scaled))

    def _moved(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, C) and features (B, d) of images, and Q (B,) of their moves."""
        std = self.net.std.view(1, -1, *(1,) * (x.ndim - 2))
        with torch.inference_mode(False), torch.enable_grad():
            start = x.clone().requires_grad_()
            logits, features = self.net.features(start.clone(), [self.layer], like=x)
            (gradient,) = torch.autograd.grad(logits.amax(dim=1).sum(), start)
        gradient = gradient * std  # of the normalised input
        moved = x + self.epsilon * std * gradient.sign() * smallest(gradient.abs(), self.o)
        with torch.no_grad():
            _, after = self.net.features(moved, [self.layer], like=x)
        h, logits = features[self.layer].detach(), logits.detach()
        return logits, h, feature_shift(h, after[self.layer], self.k1, self.k2, self.lam)


def smallest(values: Tensor, share: float) -> Tensor:
    """A mask of the smallest share of each row's values, at least one, in the shape of the values (B, ...)."""
    rows = values.flatten(1)
    index = rows.topk(max(1, int(rows.shape[1] * share)), dim=1, largest=False).indices
    return torch.zeros_like(rows).scatter(1, index, 1.0).view_as(values)


def feature_shift(before: Tensor, after: Tensor, k1: float, k2: float, lam: float) -> Tensor:
    """Q of features (B, d) before and after a move of the image, (B,)."""
    order = before.argsort(dim=1, descending=True)
    first, second = (order[:, : max(1, int(before.shape[1] * k))] for k in (k1, k2))
    moves, peaks = (after - before).abs().gather(1, first), after.relu().gather(1, second)
    return lam * moves.sum(dim=1) + peaks.sum(dim=1)
