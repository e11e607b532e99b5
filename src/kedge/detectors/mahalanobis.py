"""Mahalanobis distances in the feature space of one or several layers, and the class Gaussians that they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import between, finite, one_of, shape_of
from kedge.data import Preprocess, batches
from kedge.data.leakage import fingerprints
from kedge.detectors.base import Cost, Detector, Outputs, passes
from kedge.detectors.logistic import logistic_regression
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError
from kedge.models.head import chosen_layers

ROUNDING = 10.0  # a generous bound on the rounding error of a whole network, in units in the last place
COMBINATIONS = ("equal", "logistic")


@register
class Mahalanobis(Detector):
    """Mahalanobis distance (Lee et al., NeurIPS 2018): the distance of the features to the closest class mean.

    Each class is a Gaussian in the feature space of each layer, all with one covariance S, learned in one pass over the
    labelled training images; the score is ``min_c (z - m_c)^T S^-1 (z - m_c)``, summed over layers. It reads more than
    the logits and needs no outliers; it is strong where unknown images differ early in the network, weaker on new
    classes that resemble known ones. One forward pass; with ``epsilon`` images first move towards the closest class of
    each layer, which takes L further forward and L backward passes for L layers. With ``outliers`` a logistic
    regression against them weighs the layers, as in the paper's tables; the detector is then marked as having used
    outliers. https://arxiv.org/abs/1807.03888

    Args:
        net: Any classifier, unanchored or anchored.
        layers: Names of layers inside the network, ``"fc:in"`` for the input of one. Maps (B, channels, ...) are
            averaged over space. By default all stages of kedge's networks, and the input of the head of others.
        epsilon: The step of each pixel, in units of [0, 1]; the published code chooses among 0, 0.0005, 0.001, 0.0014,
            0.002, 0.005 and 0.01 by its outliers.
        combine: ``"equal"`` sums the layers; ``"logistic"``, the default with ``outliers``, learns a weight for each
            from them and from half of the images given to `calibrate`.
        outliers: Images of anything else, in any form that `kedge.data.batches` takes.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> labelled = [(torch.rand(3, 2, 2), i % 2) for i in range(80)]
        >>> detector = Mahalanobis(net).fit(labelled)
        >>> bool(detector.score(torch.ones(1, 3, 2, 2)) > detector.score(torch.full((1, 3, 2, 2), 0.5)))
        True
    """

    name = "mahalanobis"
    reads = "features"
    options = ("layers", "epsilon", "combine")  # the outliers themselves are not kept

    def __init__(
        self,
        net: nn.Module,
        *,
        layers: Sequence[str] | None = None,
        epsilon: float = 0.0,
        combine: str | None = None,
        outliers: Any = None,
    ) -> None:
        super().__init__(net)
        self.layers = chosen_layers(self.net.network, layers)
        self.epsilon = between("epsilon", epsilon, 0, 1)
        self.combine = one_of("combine", combine or ("equal" if outliers is None else "logistic"), COMBINATIONS)
        self.learns_held_out = self.combine == "logistic"
        if outliers is not None and not self.learns_held_out:
            raise InputError('outliers are of no use to combine="equal"; pass combine="logistic", or no outliers')
        self.gaussians: dict[str, Gaussians] = {}
        self.weights: Tensor | None = None  # one for each layer, and the bias, (L + 1,)
        self._outlier_images = outliers
        self._outlier_prints: Tensor | None = None

    @property
    def cost(self) -> Cost:
        """One pass, and with epsilon another forward and backward pass for each layer."""
        steps = len(self.layers) if self.epsilon > 0 else 0
        return Cost(forward=(1 + steps) * passes(self.net), backward=steps * passes(self.net))

    @property
    def outliers(self) -> Tensor | None:
        """Fingerprints of the outliers that the network or the weights of the layers were learned from, or None."""
        prints = [each for each in (super().outliers, self._outlier_prints) if each is not None]
        return torch.cat(prints) if prints else None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn the class means and the shared covariance of each layer."""
        if self.combine == "logistic" and self._outlier_images is None:
            raise InputError('combine="logistic" needs outliers to weigh the layers: pass outliers= with images')
        super().fit_method(train_set, preprocess)
        statistics: dict[str, ClassStatistics] = {}
        for x, y in self.inputs(train_set, preprocess):
            logits, features = self._features(x)
            labels = _class_labels(y, logits.shape[1])
            for name, value in features.items():
                if name not in statistics:
                    statistics[name] = ClassStatistics(logits.shape[1], value.shape[1], value.device)
                finite(f"the features of layer {name!r}", value, "check the network's weights")
                statistics[name].add(value, labels)
        counts = statistics[self.layers[0]].counts
        if float(counts.max()) < 2:
            raise InputError(
                f"train_set must have at least two images of a class, to see how images of one class vary; got "
                f"{int(counts.sum())} of {int((counts > 0).sum())} classes"
            )
        rounding = ROUNDING * torch.finfo(self.net.mean.dtype).eps
        self.gaussians = {name: each.gaussians(rounding) for name, each in statistics.items()}
        self.weights = self._outlier_prints = None

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn weights of the layers that separate held-out images from outliers."""
        if self._outlier_images is None or self.preprocess is None:
            raise InputError(
                "outliers are needed to weigh the layers, and a file does not keep them: calibrate a new "
                "Mahalanobis(net, outliers=images) instead"
            )
        inside = torch.cat([self._distances(self.as_input(x))[1].cpu() for x in images.split(256)])  # (N, L)
        outside, prints = [], []
        for x, _ in batches(self._outlier_images, self.preprocess):
            outside.append(self._distances(self.as_input(x))[1].cpu())
            prints.append(fingerprints(x))
        x = torch.cat([inside, *outside])
        weights, bias = logistic_regression(x, torch.arange(len(x)) >= len(inside))
        self.weights, self._outlier_prints = torch.cat([weights, bias[None]]), torch.cat(prints)

    def outputs(self, x: Tensor) -> Outputs:
        """The logits of the images as they are, and the sum or the weighted sum of their distances."""
        logits, distances = self._distances(x)
        if self.combine == "equal":
            return Outputs(logits, distances.sum(dim=1))
        if self.weights is None:
            raise NotReadyError(
                'Mahalanobis has no weights for its layers yet: call calibrate(held_out), or use combine="equal"'
            )
        weights = self.weights.to(distances)
        return Outputs(logits, distances @ weights[:-1] + weights[-1])

    def state(self) -> dict[str, Tensor]:
        """The Gaussians, and the weights of the layers with the fingerprints of their outliers."""
        state = {f"{name}.{key}": value for name, each in self.gaussians.items() for key, value in vars(each).items()}
        if self.weights is not None and self._outlier_prints is not None:
            state |= {"weights": self.weights, "outliers": self._outlier_prints}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the Gaussians and the weights."""
        keys = ("centre", "whitening", "means")
        self.gaussians = {name: Gaussians(*(state[f"{name}.{key}"] for key in keys)) for name in self.layers}
        self.weights, self._outlier_prints = state.get("weights"), state.get("outliers")

    def _features(self, x: Tensor, like: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C) and the features (B, D) of each layer, averaged over space."""
        logits, features = self.net.features(x, self.layers, like=like)
        for name, value in features.items():
            if value.ndim < 2:
                raise InputError(f"layer {name!r} must give (B, channels, ...); it gives {shape_of(value)}")
            features[name] = value.flatten(2).mean(dim=2) if value.ndim > 2 else value
        return logits, features

    def _distances(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of the images, and the squared distances (B, L) of the images or, with epsilon, moved ones."""
        parts = [self._distances_of(part) for part in (self.pieces(x) if self.epsilon > 0 else [x])]
        return torch.cat([logits for logits, _ in parts]), torch.cat([distances for _, distances in parts])

    def _distances_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.set_grad_enabled(self.epsilon > 0):
            start = x.clone().requires_grad_(self.epsilon > 0)
            # A clone goes in: a layer that works in place must not write into the images or into a leaf.
            logits, features = self._features(start.clone(), like=x)
            distances = [squared_distances(features[name], self.gaussians[name]) for name in self.layers]  # L of (B,)
            if self.epsilon > 0:
                gradients = [torch.autograd.grad(d.sum(), start, retain_graph=True)[0] for d in distances]
        if self.epsilon > 0:
            with torch.no_grad():
                for i, (name, gradient) in enumerate(zip(self.layers, gradients, strict=True)):
                    _, features = self._features(x - self.epsilon * gradient.sign(), like=x)
                    distances[i] = squared_distances(features[name], self.gaussians[name])
        return logits.detach(), torch.stack(distances, dim=1).detach()


@dataclass(frozen=True)
class Gaussians:
    """Class Gaussians with one covariance, whitened, so that distances between whitened vectors are Euclidean."""

    centre: Tensor  # the mean of all training features, (D,)
    whitening: Tensor  # W with W W^T the precision, one column for each direction in which features vary, (D, R)
    means: Tensor  # (mean of the class - centre) W, for each class that has images, (C, R)


class ClassStatistics:
    """Counts and means of classes and the scatter around them, of features that come in batches, in float64.

    Batches are merged by Chan's formula: the sums are of products of differences, never of the features themselves, so
    a large mean costs no digits.
    """

    def __init__(self, classes: int, width: int, device: torch.device | None = None) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.means = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch of features (B, D) and their classes (B,)."""
        present, index = labels.unique(return_inverse=True)  # (P,), (B,)
        features = features.double()
        new = index.bincount(minlength=len(present)).double()  # (P,)
        sums = features.new_zeros(len(present), features.shape[1]).index_add_(0, index, features)  # (P, D)
        means = sums / new[:, None]
        centred = features - means[index]  # (B, D)
        old = self.counts[present]
        moved = means - self.means[present]  # (P, D)
        self.scatter += centred.T @ centred + moved.T @ ((old * new / (old + new))[:, None] * moved)
        self.means[present] += moved * (new / (old + new))[:, None]
        self.counts[present] += new

    def gaussians(self, rounding: float) -> Gaussians:
        """The Gaussians of the classes that have images; ``rounding`` is the relative error of a feature.

        The precision is the pseudo-inverse of the covariance, without the directions that vary less than features are
        exact: dividing by that variance would make a score of the noise.
        """
        seen = self.counts > 0
        share = self.counts[seen] / self.counts.sum()  # (C,)
        centre = share @ self.means[seen]  # (D,)
        covariance = self.scatter / self.counts.sum()
        variances, directions = torch.linalg.eigh(covariance)  # (D,), (D, D)
        squares = covariance.diagonal() + share @ self.means[seen] ** 2  # the mean square of each feature, (D,)
        noise = rounding**2 * squares @ directions**2  # (D,)
        floor = len(variances) * torch.finfo(torch.float64).eps * variances[-1]  # as scipy.linalg.pinvh
        kept = variances > noise.clamp(min=floor)
        whitening = directions[:, kept] / variances[kept].sqrt()  # (D, R)
        return Gaussians(centre, whitening, (self.means[seen] - centre) @ whitening)


def squared_distances(features: Tensor, gaussians: Gaussians) -> Tensor:
    """The squared Mahalanobis distance to the closest class mean, (B, D) -> (B,), in float64."""
    kept = (gaussians.centre, gaussians.whitening, gaussians.means)
    centre, whitening, means = (value.to(features.device, torch.float64) for value in kept)
    white = (features.double() - centre) @ whitening  # (B, R)
    # |w - m|^2 without a (B, C, R) tensor; in float64, and centred, the difference of squares loses nothing that counts
    squared = white.square().sum(dim=1, keepdim=True) - 2 * white @ means.T + means.square().sum(dim=1)  # (B, C)
    return squared.clamp(min=0).amin(dim=1)


def _class_labels(labels: Tensor | None, classes: int) -> Tensor:
    """The labels of a batch, if each image has one of the network's classes."""
    if labels is None or bool((labels < 0).any()):
        raise InputError(
            "train_set must have a label for each image, since Mahalanobis learns the mean of each class; pass an "
            "ImageSet with labels or (image, label) pairs"
        )
    low, high = int(labels.min()), int(labels.max())
    if high >= classes:
        raise InputError(
            f"labels must lie in 0..{classes - 1}, the classes of the network; got {low}..{high}: number them as the "
            "network's outputs are"
        )
    return labels
