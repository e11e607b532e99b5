"""Mahalanobis distances in the feature space of one or several layers: Mahalanobis, MDS, RMDS, MDS++ and RMDS++."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.checks import between, finite, one_of, shape_of
from kedge.data import Preprocess, batches
from kedge.data.leakage import fingerprints
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.features import FeatureDetector, TrainingFeatures, check_class_labels
from kedge.detectors.gaussians import ROUNDING, ClassStatistics, Gaussians, squared_distances
from kedge.detectors.logistic import logistic_regression
from kedge.detectors.registry import register
from kedge.errors import InputError, NotReadyError
from kedge.models.classifier import Classifier
from kedge.models.head import chosen_layers

COMBINATIONS = ("equal", "logistic")
LAST = "last"
OAS = "oas"
BACKGROUND = "background"  # in the names of saved tensors


@register
class Mahalanobis(FeatureDetector):
    """Mahalanobis distance (Lee et al., NeurIPS 2018): the distance of the features to the closest class mean.

    Each class is a Gaussian in the feature space of each layer, all with one covariance S, learned in one pass over the
    labelled training images; the score is ``min_c (z - m_c)^T S^-1 (z - m_c)``, summed over layers. It reads more than
    the logits and needs no outliers. Use it where unknown images differ early in the network; it is weaker on new
    classes that resemble known ones. One forward pass; with ``epsilon`` images first move towards the closest class of
    each layer, which takes L further forward and L backward passes for L layers. With ``outliers`` a logistic
    regression against them weighs the layers, as in the paper's tables; the detector is then marked as having used
    outliers. https://arxiv.org/abs/1807.03888

    Variants by name, all of the last layer: ``"mds"``, its distance alone; ``"rmds"`` (Ren et al., 2021), ``relative``,
    better on new classes that resemble known ones, https://arxiv.org/abs/2106.09022; ``"mds++"`` and ``"rmds++"``
    (Mueller and Hein, ICML 2025), of features scaled to length 1, which suit pretrained transformers,
    https://arxiv.org/abs/2505.18032. They shrink the covariance, so that fewer images than features will do.

    Args:
        net: Any classifier, unanchored or anchored.
        layers: Names of layers inside the network, ``"fc:in"`` for the input of one; or ``"last"``, the input of the
            last linear layer, which `fit` finds and `kedge.extract` stores. Maps (B, channels, ...) are averaged over
            space. By default all stages of kedge's networks, and ``"last"`` of others.
        epsilon: The step of each pixel, in units of [0, 1]; the published code chooses among 0, 0.0005, 0.001, 0.0014,
            0.002, 0.005 and 0.01 by its outliers.
        combine: ``"equal"`` sums the layers; ``"logistic"``, the default with ``outliers``, learns a weight for each
            from them and from half of the images given to `calibrate`.
        outliers: Images of anything else, in any form that `kedge.data.batches` takes.
        normalize: Whether to divide features by their L2 norm.
        relative: Whether to subtract the distance to one Gaussian of all training images.
        shrinkage: The share s in ``(1 - s) S + s trace(S)/d I``, which replaces S; 0 takes the pseudo-inverse of S.
            ``"oas"`` chooses s by the number of images and by S (Chen et al., 2010): 5 images a class need much and 500
            little. By default 0 as in the first paper, and ``"oas"`` with ``normalize`` or ``relative``. With
            ``relative``, the covariance of all images gets the same s and trace(S) as that of the classes: with less,
            an image that differs where training images hardly vary would seem known.
        head: See `FeatureDetector`; for ``layers="last"``.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> labelled = [(torch.rand(3, 2, 2), i % 2) for i in range(80)]
        >>> detector = Mahalanobis(net).fit(labelled)
        >>> bool(detector.score(torch.ones(1, 3, 2, 2)) > detector.score(torch.full((1, 3, 2, 2), 0.5)))
        True
    """

    name = "mahalanobis"
    # the outliers themselves are not kept
    options = ("layers:given_layers", "epsilon", "combine", "normalize", "relative", "shrinkage", "head")
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mds": {"layers": LAST, "shrinkage": OAS},
        "rmds": {"layers": LAST, "relative": True},
        "mds++": {"layers": LAST, "normalize": True},
        "rmds++": {"layers": LAST, "normalize": True, "relative": True},
    }
    needs_labels = True

    def __init__(
        self,
        net: nn.Module,
        *,
        layers: Sequence[str] | str | None = None,
        epsilon: float = 0.0,
        combine: str | None = None,
        outliers: Any = None,
        normalize: bool = False,
        relative: bool = False,
        shrinkage: float | str | None = None,
        head: str | None = None,
    ) -> None:
        inside = net.network if isinstance(net, Classifier) else net
        if layers is None:
            layers = getattr(inside, "feature_layers", LAST)
        self.given_layers = layers if layers == LAST else chosen_layers(inside, layers)
        super().__init__(net, head=head, layer=None if layers == LAST else self.given_layers[0])
        self.grid = {"shrinkage": (0.0, 0.01, 0.1, 0.3, OAS)}
        if self.given_layers != LAST:
            self.grid["layers"] = (self.given_layers, *((name,) for name in self.given_layers))
        self.epsilon = between("epsilon", epsilon, 0, 1)
        self.combine = one_of("combine", combine or ("equal" if outliers is None else "logistic"), COMBINATIONS)
        self.normalize, self.relative = normalize, relative
        if shrinkage is None:
            shrinkage = OAS if normalize or relative else 0.0
        self.shrinkage = one_of("shrinkage", shrinkage, [OAS]) if isinstance(shrinkage, str) else shrinkage
        if not isinstance(shrinkage, str):
            between("shrinkage", shrinkage, 0, 1)
        self.learns_held_out = self.combine == "logistic"
        if outliers is not None and not self.learns_held_out:
            raise InputError('outliers are of no use to combine="equal"; pass combine="logistic", or no outliers')
        self.gaussians: dict[str, Gaussians] = {}  # of each layer
        self.background: dict[str, Gaussians] = {}  # one Gaussian of all classes, of each layer, if relative
        self.weights: Tensor | None = None  # one for each layer, and the bias, (L + 1,)
        self._outlier_images = outliers
        self._outlier_prints: Tensor | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are read."""
        return (self.layer,) if self.given_layers == LAST else tuple(self.given_layers)

    @property
    def takes_features(self) -> bool:
        """Whether it reads only the input of the last linear layer, of images as they are."""
        return super().takes_features and self.epsilon == 0 and not self.learns_held_out

    @property
    def cost(self) -> Cost:
        """One pass, and with epsilon another forward and backward pass for each layer."""
        steps = len(self.layers) if self.epsilon > 0 else 0
        return Cost(forward=(1 + steps) * self.net.passes, backward=steps * self.net.passes)

    @property
    def outliers(self) -> Tensor | None:
        """Fingerprints of the outliers that the network or the weights of the layers were learned from, or None."""
        prints = [each for each in (super().outliers, self._outlier_prints) if each is not None]
        return torch.cat(prints) if prints else None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn the class means and the shared covariance of each layer."""
        if self.combine == "logistic" and self._outlier_images is None:
            raise InputError('combine="logistic" needs outliers to weigh the layers: pass outliers= with images')
        Detector.fit_method(self, train_set, preprocess)
        statistics: dict[str, ClassStatistics] = {}
        for classes, features, labels in self._training_features(train_set, preprocess):
            for name, value in features.items():
                if name not in statistics:
                    statistics[name] = ClassStatistics(classes, value.shape[1], value.device)
                statistics[name].add(self._scaled(value), labels)
        counts = statistics[self.layers[0]].counts
        if float(counts.max()) < 2:
            raise InputError(
                f"train_set must have at least two images of a class, to see how images of one class vary; got "
                f"{int(counts.sum())} of {int((counts > 0).sum())} classes"
            )
        rounding = ROUNDING * torch.finfo(self.net.mean.dtype).eps
        shrunk = {name: each.shrinkage(self.shrinkage) for name, each in statistics.items()}
        self.gaussians = {name: each.gaussians(rounding, shrunk[name]) for name, each in statistics.items()}
        if self.relative:
            every = {name: each.merged() for name, each in statistics.items()}
            self.background = {name: each.gaussians(rounding, shrunk[name]) for name, each in every.items()}
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

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The logits and the distance of last features (B, d)."""
        return Outputs(logits, self._distance(self.layers[0], features))

    def state(self) -> dict[str, Tensor]:
        """The Gaussians, and the weights of the layers with the fingerprints of their outliers."""
        parts = {**self.gaussians, **{f"{name}.{BACKGROUND}": each for name, each in self.background.items()}}
        state = {f"{name}.{key}": value for name, each in parts.items() for key, value in vars(each).items()}
        if self.weights is not None and self._outlier_prints is not None:
            state |= {"weights": self.weights, "outliers": self._outlier_prints}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the Gaussians and the weights."""
        keys = ("centre", "whitening", "means")

        def read(name: str) -> Gaussians:
            return Gaussians(*(state[f"{name}.{key}"] for key in keys))

        self.gaussians = {name: read(name) for name in self.layers}
        self.background = {name: read(f"{name}.{BACKGROUND}") for name in self.layers if self.relative}
        self.weights, self._outlier_prints = state.get("weights"), state.get("outliers")

    def _training_features(
        self, train_set: Any, preprocess: Preprocess
    ) -> Iterator[tuple[int, dict[str, Tensor], Tensor]]:
        """The number of classes, the features of each layer and the labels, batch by batch, checked."""
        if self.given_layers == LAST:
            for batch in TrainingFeatures(self, train_set, preprocess):
                assert batch.labels is not None
                yield batch.logits.shape[1], {self.layer: batch.features}, batch.labels
            return
        for x, y in self.inputs(train_set, preprocess):
            logits, features = self._features(x)
            for name, value in features.items():
                finite(f"the features of layer {name!r}", value, "check the network's weights")
            yield logits.shape[1], features, check_class_labels(self, y, logits.shape[1])

    def _scaled(self, features: Tensor) -> Tensor:
        return F.normalize(features.double(), dim=1) if self.normalize else features

    def _distance(self, layer: str, features: Tensor) -> Tensor:
        """The squared distance (B,) of a layer's features (B, D) to the closest class, in float64."""
        z = self._scaled(features)
        distance = squared_distances(z, self.gaussians[layer])
        return distance - squared_distances(z, self.background[layer]) if self.relative else distance

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
            distances = [self._distance(name, features[name]) for name in self.layers]  # L of (B,)
            if self.epsilon > 0:
                gradients = [torch.autograd.grad(d.sum(), start, retain_graph=True)[0] for d in distances]
        if self.epsilon > 0:
            with torch.no_grad():
                for i, (name, gradient) in enumerate(zip(self.layers, gradients, strict=True)):
                    _, features = self._features(x - self.epsilon * gradient.sign(), like=x)
                    distances[i] = self._distance(name, features[name])
        return logits.detach(), torch.stack(distances, dim=1).detach()
