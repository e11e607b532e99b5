"""Mahalanobis distances in the feature space of one or several layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import between, finite, one_of, shape_of
from kedge.data import Preprocess, batches
from kedge.data.leakage import fingerprints
from kedge.detectors.base import GRADIENT_ROWS, Cost, Detector, Outputs, passes
from kedge.detectors.gaussians import ROUNDING, ClassStatistics, Gaussians, squared_distances
from kedge.detectors.logistic import logistic_regression
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError
from kedge.models.classifier import evaluating
from kedge.models.head import chosen_layers

COMBINATIONS = ("equal", "logistic")


@register
class Mahalanobis(Detector):
    """Mahalanobis distance (Lee et al., NeurIPS 2018): how far the features lie from the closest class mean.

    Each class is a Gaussian in the feature space of each layer, all with one covariance, learned in one pass over the
    labelled training images; the score is the squared Mahalanobis distance to the closest class, summed over layers.
    It reads more than the logits and needs no outliers; it is strong where strange images differ early in the network,
    weaker on new classes that resemble known ones. One forward pass; with ``epsilon`` images are first moved
    towards the closest class of each layer, which costs L further forward and L backward passes for L layers. With
    ``outliers`` the layers are weighed by a logistic regression against them, as in the paper's tables; it is then
    marked as having used outliers.

    Args:
        net: Any classifier, plain or anchored.
        layers: Names of layers inside the network, ``"fc:in"`` for the input of one. Maps (B, channels, ...) are
            averaged over space. By default all stages of kedge's networks, and the input of the head of others.
        epsilon: How far to move each pixel, in units of [0, 1]; the published code chooses among 0, 0.0005, 0.001,
            0.0014, 0.002, 0.005 and 0.01 by its outliers.
        combine: ``"equal"`` sums the layers up; ``"logistic"``, the default where there are ``outliers``, learns a
            weight for each from them and from half of the images given to `calibrate`.
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
        if self.combine == "equal" and outliers is not None:
            raise InputError('outliers are of no use to combine="equal"; pass combine="logistic", or no outliers')
        self.learns_held_out = self.combine == "logistic"
        self.gaussians: dict[str, Gaussians] = {}
        self.weights: Tensor | None = None  # one for each layer, and the bias, (L + 1,)
        self._outlier_images = outliers
        self._outlier_prints: Tensor | None = None

    @property
    def cost(self) -> Cost:
        """One pass, and another forward and backward for each layer where images are moved."""
        moves = len(self.layers) if self.epsilon > 0 else 0
        return Cost(forward=(1 + moves) * passes(self.net), backward=moves * passes(self.net))

    @property
    def outliers(self) -> Tensor | None:
        """Fingerprints of the outliers that the network or the weights of the layers were learned from, or None."""
        known = [prints for prints in (super().outliers, self._outlier_prints) if prints is not None]
        return torch.cat(known) if known else None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn the class means and the shared covariance of each layer."""
        if self.combine == "logistic" and self._outlier_images is None:
            raise InputError(
                'combine="logistic" needs outliers to weigh the layers by: pass outliers= with images, or '
                'combine="equal"'
            )
        super().fit_method(train_set, preprocess)
        statistics: dict[str, ClassStatistics] = {}
        with evaluating(self.net), torch.no_grad():
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
        self.gaussians = {name: seen.gaussians(rounding) for name, seen in statistics.items()}
        self.weights = self._outlier_prints = None

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn to weigh the layers so that held-out images and outliers come apart."""
        if self._outlier_images is None or self.preprocess is None:
            raise InputError(
                "outliers must be there to weigh the layers by, and a file does not keep them: calibrate a new "
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
        """The logits of the images as they are, and their distances, summed up or weighed."""
        logits, distances = self._distances(x)
        if self.combine == "equal":
            return Outputs(logits, distances.sum(dim=1))
        if self.weights is None:
            raise NotReadyError(
                "Mahalanobis has no weights for its layers yet: call calibrate(held_out), or use "
                'combine="equal" and no outliers'
            )
        weights = self.weights.to(distances)
        return Outputs(logits, distances @ weights[:-1] + weights[-1])

    def config(self) -> dict[str, Any]:
        """Layers, epsilon and how layers are combined; the outliers themselves are not kept."""
        return {"layers": list(self.layers), "epsilon": self.epsilon, "combine": self.combine}

    def state(self) -> dict[str, Tensor]:
        """The Gaussians, and the weights of the layers with the fingerprints of what they were learned from."""
        state = {f"{name}.{key}": value for name, found in self.gaussians.items() for key, value in vars(found).items()}
        if self.weights is not None and self._outlier_prints is not None:
            state |= {"weights": self.weights, "outliers": self._outlier_prints}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the Gaussians and the weights back."""
        self.gaussians = {
            name: Gaussians(*(state[f"{name}.{key}"] for key in ("centre", "whitening", "means")))
            for name in self.layers
        }
        self.weights, self._outlier_prints = state.get("weights"), state.get("outliers")

    def _features(self, x: Tensor, like: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C) and the features (B, D) of each layer, averaged over space."""
        logits, features = self.net.features(x, self.layers, like=like)
        return logits, {name: _vectors(name, value) for name, value in features.items()}

    def _distances(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of the images, and the squared distances (B, L) of the images or, with epsilon, moved ones."""
        size = max(1, GRADIENT_ROWS // passes(self.net)) if self.epsilon > 0 else max(1, len(x))
        parts = [self._distances_of(part) for part in x.split(size)]
        return torch.cat([logits for logits, _ in parts]), torch.cat([found for _, found in parts])

    def _distances_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a few images."""
        with torch.inference_mode(False), torch.set_grad_enabled(self.epsilon > 0):
            start = x.clone().requires_grad_(self.epsilon > 0)
            # A clone goes in: a layer that works in place must not write into the images or into a leaf.
            logits, features = self._features(start.clone(), like=x)
            found = [squared_distances(features[name], self.gaussians[name]) for name in self.layers]  # L of (B,)
            if self.epsilon > 0:
                gradients = [torch.autograd.grad(d.sum(), start, retain_graph=True)[0] for d in found]
        if self.epsilon > 0:
            with torch.no_grad():
                for i, (name, gradient) in enumerate(zip(self.layers, gradients, strict=True)):
                    _, features = self._features(x - self.epsilon * gradient.sign(), like=x)
                    found[i] = squared_distances(features[name], self.gaussians[name])
        return logits.detach(), torch.stack(found, dim=1).detach()


def _vectors(name: str, features: Tensor) -> Tensor:
    """Features (B, channels, ...) averaged over space to (B, channels)."""
    if features.ndim < 2:
        raise InputError(f"layer {name!r} must give (B, channels, ...); it gives {shape_of(features)}")
    return features if features.ndim == 2 else features.flatten(2).mean(dim=2)


def _class_labels(labels: Tensor | None, classes: int) -> Tensor:
    """The labels of a batch, if each image has one that the network knows."""
    if labels is None or bool((labels < 0).any()):
        raise InputError(
            "train_set must have a label for each image, since Mahalanobis learns the mean of each class; pass an "
            "ImageSet with labels or (image, label) pairs"
        )
    if int(labels.max()) >= classes:
        raise InputError(
            f"labels must lie in 0..{classes - 1}, the classes of the network; got {int(labels.min())}.."
            f"{int(labels.max())}"
        )
    return labels
