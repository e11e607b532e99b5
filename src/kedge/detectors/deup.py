"""Direct epistemic uncertainty prediction."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring import Anchored
from kedge.checks import at_least, finite, shape_of
from kedge.data import Preprocess
from kedge.detectors.base import Detector, Outputs
from kedge.detectors.error_predictor import ErrorPredictor, fit_predictor
from kedge.detectors.gaussians import ROUNDING, ClassStatistics, Gaussians
from kedge.detectors.registry import register
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.models.classifier import evaluating
from kedge.models.features import INPUT
from kedge.models.head import check_head, head_name


def log_density(features: Tensor, gaussians: Gaussians, shares: Tensor) -> Tensor:
    """The log-density of a mixture of class Gaussians with the classes' ``shares`` (C,): (B, D) -> (B,), in float64.

    Where the features do not vary in all directions, it is the density within those in which they do.
    """
    values = (gaussians.centre, gaussians.whitening, gaussians.means, shares)
    centre, whitening, means, shares = (value.to(features.device, torch.float64) for value in values)
    white = (features.double() - centre) @ whitening  # (B, R)
    # Not by a matrix product, whose rounding depends on the size of the batch.
    distances: Tensor = torch.cdist(white, means, compute_mode="donot_use_mm_for_euclid_dist")  # (B, C)
    scales: Tensor = torch.linalg.vector_norm(whitening, dim=0)  # one over the deviation in each direction, (R,)
    volume = scales.log().sum() - len(scales) / 2 * math.log(2 * math.pi)
    return (shares.log() - distances.square() / 2).logsumexp(dim=1) + volume


@register
class DEUP(Detector):
    """Direct epistemic uncertainty prediction (Lahlou et al., TMLR 2023): a second network that predicts the error.

    A small regressor learns the network's cross-entropy on labelled images that it was not trained on, from the
    log-density of the penultimate features under class Gaussians of the training set, the entropy of the softmax, the
    energy, and for anchored networks tau. The score is the predicted error; the aleatoric part, which the paper
    subtracts, is taken as zero. Use it to predict where the network will be wrong, if you have held-out labels: it
    learns only from errors on in-distribution images, so far from them its predictions are extrapolated. Costs one
    forward pass; `calibrate` fits the regressor on half of its images and the threshold on the other.

    Args:
        net: A classifier, anchored or not, that ends in a linear layer.
        hidden: Width of the regressor's hidden layer.
        seed: Seed of the weights that its fit starts from.
        head: The name of the network's last linear layer, where it is not the one registered last.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> labelled = [(torch.rand(3, 2, 2), i % 2) for i in range(140)]
        >>> detector = DEUP(net, hidden=4).fit(labelled[:40]).calibrate(labelled[40:])
        >>> bool((detector.score(torch.rand(5, 3, 2, 2)) > 0).all())
        True
    """

    name = "deup"
    reads = "features"
    learns_held_out = True
    options = ("hidden", "seed", "head")

    def __init__(self, net: nn.Module, *, hidden: int = 32, seed: int = 0, head: str | None = None) -> None:
        super().__init__(net)
        self.hidden, self.seed = at_least("hidden", hidden, 1), seed
        self.head = head_name(self.net.network, head)
        self.gaussians: Gaussians | None = None
        self.shares: Tensor | None = None  # of the classes that have training images, (C,)
        self.predictor: ErrorPredictor | None = None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn the density of the features, and drop a predictor that was fitted before."""
        super().fit_method(train_set, preprocess)
        statistics: ClassStatistics | None = None
        with evaluating(self.net), torch.no_grad():
            for x, y in self.inputs(train_set, preprocess):
                logits, features, _ = self._read(x)
                finite("features", features, "check the network's weights")
                if statistics is None:
                    check_head(self.net.network, self.head, logits, features)
                    statistics = ClassStatistics(logits.shape[1], features.shape[1], features.device)
                if y is None or bool((y < 0).any()):
                    raise InputError(
                        "train_set must have a label for each image, since DEUP learns the density of each class; pass "
                        "an ImageSet with labels or (image, label) pairs"
                    )
                statistics.add(features, _checked(y, logits.shape[1]))
        assert statistics is not None
        counts = statistics.counts
        if float(counts.max()) < 2:
            raise InputError(
                "train_set must have at least two images of a class, to measure how images of one class vary; got "
                f"{int(counts.sum())} images of {int((counts > 0).sum())} classes"
            )
        self.gaussians = statistics.gaussians(self._rounding)
        self.shares = counts[counts > 0] / counts.sum()
        self.predictor = None

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Fit the predictor to the network's cross-entropy on images that it was not trained on."""
        known = labels >= 0
        if not bool(known.any()):
            raise InputError("held_out must have labels, since DEUP learns from the network's errors on them")
        features, errors = [], []
        with torch.no_grad():
            for x, y in zip(images[known].split(256), labels[known].split(256), strict=True):
                logits, phi = self.describe(self.as_input(x))
                errors.append(F.cross_entropy(logits.double().cpu(), _checked(y, logits.shape[1]), reduction="none"))
                features.append(phi.cpu())
        phi, error = torch.cat(features), torch.cat(errors)
        finite("the errors of held-out images", error, "the network gives NaN or infinite logits; check its weights")
        self.predictor = fit_predictor(phi, error, hidden=self.hidden, seed=self.seed, rounding=self._rounding)

    def describe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of images, and the inputs of the predictor, (B, F), in float64."""
        assert self.gaussians is not None
        assert self.shares is not None
        logits, features, per_anchor = self._read(x)
        exact = logits.double()
        phi = [log_density(features, self.gaussians, self.shares), scores.entropy(exact), scores.energy(exact)]
        if per_anchor is not None:
            phi.append(scores.tau(per_anchor.double()))
        return logits, torch.stack(phi, dim=1)

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits and the predicted error."""
        if self.predictor is None:
            raise NotReadyError(
                "DEUP has no error predictor yet: call calibrate(held_out) with labelled images that the network was "
                "not trained on"
            )
        logits, phi = self.describe(x)
        return Outputs(logits, self.predictor(phi).to(logits.dtype))

    def state(self) -> dict[str, Tensor]:
        """The Gaussians with the classes' shares, and the predictor if there is one."""
        if self.gaussians is None or self.shares is None:
            return {}
        state = {f"density.{name}": value for name, value in vars(self.gaussians).items()} | {"shares": self.shares}
        if self.predictor is not None:
            state |= {f"predictor.{name}": value for name, value in vars(self.predictor).items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore them, if their shapes fit the network and each other."""
        width = cast(nn.Linear, self.net.network.get_submodule(self.head)).in_features
        rank, classes = state["density.whitening"].numel() // width, state["shares"].numel()
        inputs, hidden = 4 if isinstance(self.net, Anchored) else 3, self.hidden
        density = {"centre": (width,), "whitening": (width, rank), "means": (classes, rank)}
        predictor = {"features": (2, inputs), "errors": (2,), "first": (inputs + 1, hidden), "last": (hidden + 1,)}
        shapes = {"shares": (classes,)} | {f"density.{name}": shape for name, shape in density.items()}
        if "predictor.first" in state:
            shapes |= {f"predictor.{name}": shape for name, shape in predictor.items()}
        for name, shape in shapes.items():
            if state[name].shape != shape or not bool(state[name].isfinite().all()):
                raise FileFormatError(f"{name} must be {shape} finite numbers; the file has {shape_of(state[name])}")
        self.gaussians = Gaussians(*(state[f"density.{name}"] for name in density))
        self.shares = state["shares"]
        if "predictor.first" in state:
            self.predictor = ErrorPredictor(*(state[f"predictor.{name}"] for name in predictor))

    @property
    def _rounding(self) -> float:
        """The relative error of what the network computes."""
        return ROUNDING * torch.finfo(self.net.mean.dtype).eps

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits (B, C), the head's input (B, D), and the per-anchor logits (K, B, C) of an anchored network."""
        layer = self.head + INPUT
        logits, per_anchor, features = self.net.read(x, [layer])
        if features[layer].ndim != 2:
            raise InputError(f"the head {self.head!r} must take a vector per image, not {shape_of(features[layer])}")
        return logits, features[layer], per_anchor


def _checked(labels: Tensor, classes: int) -> Tensor:
    """The labels, if the network has an output for each."""
    if int(labels.max()) >= classes:
        came = f"{int(labels.min())}..{int(labels.max())}"
        raise InputError(f"labels must lie in 0..{classes - 1}, the classes of the network; got {came}")
    return labels
