"""Gram matrices: correlations between channels, compared with their range for the predicted class.

As in the authors' code, the row sums of each Gram matrix are compared, taken before the root, and the bounds are those
of the predicted class, in training too. Their code also divides an image's deviations by its largest softmax
probability, which is not part of the formula and not done here, and each layer's deviation by its mean over a tenth of
the test images; ``normalise=True`` takes the mean over held-out images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import at_least, finite, shape_of
from kedge.data import Preprocess
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError
from kedge.models.head import chosen_layers

POWERS = tuple(range(1, 11))
BOUND_FLOOR = 1e-6  # smallest divisor of a deviation, where a bound is zero; from the published code
EXPECTED_FLOOR = 1e-7  # added to a layer's expected deviation, which may be zero; from the published code
CHUNK = 2**17  # numbers worked on at a time: few enough to stay in a processor's cache over all powers


def gram_sums(features: Tensor, powers: Sequence[int] = POWERS) -> Tensor:
    """The row sums of F^p (F^p)^T for each power p, then their signed p-th root: (B, C, ...) -> (B, P, C).

    One value per channel, so that bounds take memory linear in the channels. A row sum is F^p times the sum of F^p over
    channels, so the Gram matrix is never formed.
    """
    if features.ndim < 2:
        raise InputError(f"features must be (B, channels, ...), got {shape_of(features)}")
    maps = features.flatten(2) if features.ndim > 2 else features[:, :, None]  # (B, C, HW)
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
    size = max(1, CHUNK // max(1, maps[0].numel()))
    return torch.cat([_gram_sums(part, powers) for part in maps.split(size)])


def _gram_sums(maps: Tensor, powers: Sequence[int]) -> Tensor:  # (B, C, HW) -> (B, P, C)
    """As `gram_sums`, with each row's largest term scaled to one.

    With t the largest |F| at a pixel, the row sum of channel c is the sum over pixels of (F_c t)^p s, where s is the
    sum of (F / t)^p over channels; with h the largest |F_c t| of the channel, it is h^p times the sum of
    (F_c t / h)^p s. All that is raised to a power lies in [-1, 1], and only terms too small to count vanish.
    """
    tiny = torch.finfo(maps.dtype).tiny
    t = maps.abs().amax(dim=1, keepdim=True).clamp(min=tiny)  # (B, 1, HW)
    products = maps * t
    h = products.abs().amax(dim=2, keepdim=True).clamp(min=tiny)  # (B, C, 1)
    a, b = maps / t, products / h  # (B, C, HW)
    a_p, b_p = a.clone(), b.clone()
    sums = []
    for p in range(1, max(powers) + 1):
        if p > 1:
            a_p, b_p = a_p.mul_(a), b_p.mul_(b)
        if p in powers:
            rows = torch.bmm(b_p, a_p.sum(dim=1)[:, :, None])[:, :, 0]  # (B, C)
            sums.append(rows.sign() * rows.abs() ** (1 / p) * h[:, :, 0])
    return torch.stack(sums, dim=1)


def gram_deviation(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """How far values lie outside their bounds, relative to the bound, summed up: (B, P, C) -> (B,)."""
    below = (lower - values).clamp(min=0) / lower.abs().clamp(min=BOUND_FLOOR)
    above = (values - upper).clamp(min=0) / upper.abs().clamp(min=BOUND_FLOOR)
    return (below + above).sum(dim=(1, 2))


@register
class Gram(Detector):
    """Gram matrices (Sastry and Oore, ICML 2020): whether channels correlate as they do for the predicted class.

    For each layer, and for feature maps F raised to each power p, the row sums of ``F^p (F^p)^T`` are compared with the
    smallest and largest among the training images of the predicted class (of all classes, if no training image was
    predicted as that one); the score is how far they lie outside, relative to the bound, summed over all. It learns in
    one pass, and needs neither labels nor outliers. Use it on images that are far from the training set in texture; it
    is weak on new classes that resemble known ones. One forward pass, and a fraction of one for the powers; the bounds
    take two numbers for each class, layer, power and channel. https://arxiv.org/abs/1912.12510

    Args:
        net: Any classifier, unanchored or anchored.
        layers: Names of layers inside the network, ``"fc:in"`` for the input of one, that give (B, channels, ...). By
            default all stages of kedge's networks, and the input of the head of others.
        powers: The powers p; high ones emphasise the strongest responses.
        normalise: Divide each layer's deviation by its mean over half of the images given to `calibrate`, so that
            layers count alike.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> images = torch.rand(50, 3, 4, 4)
        >>> detector = Gram(net, layers=["1"]).fit(images)
        >>> detector.score(images).max().item()
        0.0
    """

    name = "gram"
    reads = "maps"
    options = ("layers", "powers", "normalise")
    grid: Mapping[str, Sequence[Any]] = {"powers": ((1,), (1, 2, 3), (1, 2, 3, 4, 5)), "normalise": (False, True)}

    def __init__(
        self,
        net: nn.Module,
        *,
        layers: Sequence[str] | None = None,
        powers: Sequence[int] = POWERS,
        normalise: bool = False,
    ) -> None:
        super().__init__(net)
        self.layers = chosen_layers(self.net.network, layers)
        if isinstance(powers, int) or len(powers) == 0:
            raise InputError(f"powers must be a sequence of whole numbers, such as range(1, 11); got {powers!r}")
        self.powers = tuple(sorted({at_least("powers", p, 1) for p in powers}))
        self.normalise = self.learns_held_out = bool(normalise)
        self.bounds: dict[str, tuple[Tensor, Tensor]] = {}  # smallest and largest of each class, (classes, P, C)
        self.expected: Tensor | None = None  # each layer's mean deviation on held-out images, (L,)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn the bounds of each predicted class."""
        super().fit_method(train_set, preprocess)
        bounds: dict[str, tuple[Tensor, Tensor]] = {}
        for x, _ in self.inputs(train_set, preprocess):
            logits, features = self.net.features(x, self.layers)
            for name, value in features.items():
                sums = gram_sums(value, self.powers)  # (B, P, C)
                finite(f"the Gram sums of layer {name!r}", sums, "check the network's weights")
                if name not in bounds:
                    unseen = sums.new_full((logits.shape[1], *sums.shape[1:]), torch.inf)
                    bounds[name] = unseen, -unseen
                index = logits.argmax(dim=1)[:, None, None].expand_as(sums)
                bounds[name][0].scatter_reduce_(0, index, sums, "amin")
                bounds[name][1].scatter_reduce_(0, index, sums, "amax")
        for lower, upper in bounds.values():
            never = lower.isinf()  # a class without training images
            lower.copy_(torch.where(never, lower.amin(dim=0), lower))
            upper.copy_(torch.where(never, upper.amax(dim=0), upper))
        self.bounds, self.expected = bounds, None

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn how far each layer deviates on images that the bounds were not learned from."""
        deviations = [self._deviations(self.as_input(x))[1].double() for x in images.split(256)]  # of (B, L)
        self.expected = torch.cat(deviations).mean(dim=0)

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and the deviation from the bounds of the class that they predict."""
        if self.normalise and self.expected is None:
            raise NotReadyError("Gram has no expected deviations yet: call calibrate(held_out), or use normalise=False")
        logits, deviations = self._deviations(x)
        if self.expected is not None:
            deviations = deviations / (self.expected + EXPECTED_FLOOR).to(deviations)
        return Outputs(logits, deviations.sum(dim=1))

    def state(self) -> dict[str, Tensor]:
        """The bounds, and the expected deviations."""
        state = {f"{name}.lower": lower for name, (lower, _) in self.bounds.items()}
        state |= {f"{name}.upper": upper for name, (_, upper) in self.bounds.items()}
        return state if self.expected is None else state | {"expected": self.expected}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the bounds and the expected deviations."""
        self.bounds = {name: (state[f"{name}.lower"], state[f"{name}.upper"]) for name in self.layers}
        if any(lower.ndim != 3 or lower.shape != upper.shape for lower, upper in self.bounds.values()):
            raise InputError("the bounds of Gram must be (classes, powers, channels), the lower as the upper ones")
        self.expected = state.get("expected")

    def _deviations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and the deviation of each layer, (B, L)."""
        logits, features = self.net.features(x, self.layers)
        predicted = logits.argmax(dim=1)
        deviations = []
        for name in self.layers:
            lower, upper = (bound.to(x.device)[predicted] for bound in self.bounds[name])  # (B, P, C)
            deviations.append(gram_deviation(gram_sums(features[name], self.powers), lower, upper))
        return logits, torch.stack(deviations, dim=1)
