"""kedge's detectors in pytorch-ood's loops, and pytorch-ood's detectors behind kedge's verbs."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from kedge.checks import shape_of
from kedge.data import Preprocess, batches
from kedge.data.batches import Batch, image_and_label
from kedge.detectors import Cost, Detector, Outputs
from kedge.detectors.base import passes
from kedge.errors import InputError
from kedge.seeds import seeded

API = "pytorch_ood.api"  # looked up among the modules that are loaded, never imported
GRADIENTS = "GradientDetector"  # the base of those of its detectors that need gradients to score
BATCH = 256


@overload
def pytorch_ood(detector: Detector) -> "ForPytorchOOD": ...
@overload
def pytorch_ood(detector: Any, *, net: nn.Module | None = None) -> "FromPytorchOOD": ...
def pytorch_ood(detector: Any, *, net: nn.Module | None = None) -> "ForPytorchOOD | FromPytorchOOD":
    """Turn a kedge detector into one for pytorch-ood, or a pytorch-ood detector into one for kedge.

    In both libraries a larger score is further out of distribution, so scores pass as they are. Written for
    pytorch-ood 0.4, which need not be installed to turn a kedge detector.

    Args:
        detector: A detector of kedge: the result has `fit`, `predict` and whatever else pytorch-ood asks of a detector.
            Or an instance of pytorch-ood's: the result is a kedge `Detector` with every verb but `save`.
        net: For pytorch-ood detectors that know an encoder only: the network whose logits give the labels. By default
            the detector's own ``model``. It takes images in [0, 1], as a kedge `Classifier` or `Anchored` does.

    Example:
        >>> from kedge import MSP
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> loader = DataLoader([(torch.rand(3, 2, 2), i % 2) for i in range(8)], batch_size=4)
        >>> pytorch_ood(MSP(net)).fit(loader).predict(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """
    if isinstance(detector, Detector):
        if net is not None:
            raise InputError(f"net must not be given: {type(detector).__name__} has a network of its own")
        return ForPytorchOOD(detector)
    if isinstance(detector, type) or not all(callable(getattr(detector, name, None)) for name in ("fit", "predict")):
        came = f"the class {detector.__name__}" if isinstance(detector, type) else type(detector).__name__
        raise InputError(f"detector must be an instance with fit and predict, of kedge or of pytorch-ood; got {came}")
    net = getattr(detector, "model", None) if net is None else net
    if not isinstance(net, nn.Module):
        raise InputError(
            f"net must be given for {type(detector).__name__}, whose model is {shape_of(net)}: the network, as a "
            "torch.nn.Module, whose logits give the labels"
        )
    return FromPytorchOOD(net, detector)


class ForPytorchOOD:
    """A kedge detector with the protocol of ``pytorch_ood.api.Detector``; made by `pytorch_ood`.

    `fit` takes loaders of (image, label) batches and leaves out images with negative labels, which are pytorch-ood's
    outliers. A method that learns from held-out images, as `TemperatureScaling` does, does so in
    ``.detector.calibrate``. A detector that is fitted already can predict straight away. pytorch-ood's benchmarks take
    it where pytorch-ood was imported before it was made.

    Attributes:
        detector: The kedge detector.
    """

    info: ClassVar[None] = None
    hyperparameter_space: dict[str, list[Any]]

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.hyperparameter_space = {}
        if API in sys.modules:  # its benchmarks ask for an instance of its own base class
            sys.modules[API].Detector.register(ForPytorchOOD)

    @property
    def requires_fit(self) -> bool:
        """Whether `fit` must be called before scoring."""
        return self.detector.preprocess is None

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.detector.net.mean.device

    def to(self, device: str | torch.device) -> Self:
        """Move the network."""
        self.detector.net.to(device)
        return self

    def fit(self, data_loader: Any) -> Self:
        """Fit the detector on batches (images in [0, 1], labels), leaving out images with negative labels."""
        known = _Known(lambda: map(image_and_label, data_loader), "data_loader")
        self.detector.fit(_loader(known))
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Scores (B,) of images (B, D, H, W) in [0, 1], on their device; larger is further out of distribution."""
        return self.detector.score(x, batch_size=max(1, len(x))).to(x.device)

    def __call__(self, x: Tensor) -> Tensor:
        """The same as `predict`."""
        return self.predict(x)

    def fit_features(self, x: Tensor, y: Tensor) -> Self:
        """Fit on features, for methods that can."""
        self._own("fit_features", "fit(data_loader)")(x, y)
        return self

    def predict_features(self, x: Tensor) -> Tensor:
        """Scores of features, for methods that can."""
        scores: Tensor = self._own("predict_features", "predict(x)")(x)
        return scores

    def get_hyperparameters(self) -> dict[str, Any]:
        """None: a kedge detector takes its choices when it is built."""
        return {}

    def set_hyperparameters(self, **values: Any) -> Self:
        """Raise if a value is given: a kedge detector takes its choices when it is built."""
        if values:
            kind = type(self.detector).__name__
            raise InputError(f"{kind} takes {sorted(values)} when it is built, not later; build another {kind}")
        return self

    def _own(self, name: str, instead: str) -> Callable[..., Any]:
        method = getattr(self.detector, name, None)
        if not callable(method):
            kind = type(self.detector).__name__
            raise InputError(f"{kind} has no {name}: it reads the layers of its network itself; call {instead}")
        found: Callable[..., Any] = method
        return found


class FromPytorchOOD(Detector):
    """A pytorch-ood detector behind kedge's verbs, all but `save`; made by `pytorch_ood`.

    `fit` fits it where it says that it needs to be, on the training images with their labels. Whatever it draws from
    torch's generator is drawn from the same seed for every batch, and the generator put back. Its scores are its own,
    also where they depend on the batch.

    Args:
        net: The network whose logits give the labels.
        peer: The detector.
    """

    name = "pytorch_ood"

    def __init__(self, net: nn.Module, peer: Any) -> None:
        super().__init__(net)
        self.peer = peer
        self._needs_gradients = any(kind.__name__ == GRADIENTS for kind in type(peer).__mro__)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Set the anchors of an anchored network that has none, then fit the detector where it needs it."""
        super().fit_method(train_set, preprocess)
        if not getattr(self.peer, "requires_fit", False):
            return

        def inputs() -> Iterator[Batch]:
            for x, y in batches(train_set, preprocess, size=BATCH):
                # pytorch-ood takes a negative label for an outlier; to kedge it means that there is none.
                labels = torch.full((len(x),), -1) if y is None else y
                yield self.as_input(x), labels.to(self.net.mean.device)

        def count() -> int:
            try:
                return len(train_set) if isinstance(train_set, DataLoader) else math.ceil(len(train_set) / BATCH)
            except TypeError:  # a stream, which has no length of its own
                return sum(1 for _ in inputs())

        with torch.enable_grad(), seeded(0):
            self.peer.fit(_loader(_Known(inputs, "train_set", count)))

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and the detector's scores."""
        logits = self.net(x)
        drawn = [(net, net.batches_seen) for net in self.anchored]
        parameters = [(parameter, parameter.grad) for parameter in self.net.parameters()]
        for parameter, _ in parameters:
            parameter.grad = None  # a backward pass would add to what is there
        try:
            with torch.set_grad_enabled(self._needs_gradients), seeded(0):
                score = torch.as_tensor(self.peer.predict(x)).detach().to(x.device)
        finally:
            for parameter, gradient in parameters:
                parameter.grad = gradient
        kind = type(self.peer).__name__
        if score.shape != (len(x),):
            raise InputError(f"{kind} must give one score per image, ({len(x)},); it gives {shape_of(score)}")
        if any(net.batches_seen != before for net, before in drawn):
            for net, before in drawn:
                net.batches_seen = before
            raise InputError(
                f"{kind} puts the anchored network in training mode, where its anchors are drawn from the batch; use "
                "it with a plain network, or a method of kedge's own"
            )
        return Outputs(logits, score)

    @property
    def cost(self) -> Cost:
        """A pass for the labels and one for the scores, two and back where they need gradients; it may take more."""
        once = passes(self.net)
        return Cost(3 * once, once) if self._needs_gradients else Cost(2 * once)

    def config(self) -> dict[str, Any]:
        """Nothing that could be saved."""
        return {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raise: a kedge file runs no code, and this detector is code of another library."""
        raise InputError(
            f"{type(self.peer).__name__} cannot be saved: only kedge's own detectors can; save its network with one of "
            "them, as kedge.MSP(net).fit(train_set).save(path), and build it again"
        )


class _Known(IterableDataset[Batch]):
    """Batches without the images whose labels are negative, as often as they are asked for."""

    def __init__(
        self, read: Callable[[], Iterator[tuple[Any, Any]]], name: str, count: Callable[[], int] | None = None
    ) -> None:
        self._read, self._name, self._count = read, name, count

    def __iter__(self) -> Iterator[Any]:
        empty = True
        for x, y in self._read():
            if y is None:
                batch: Any = (x,)
            elif not isinstance(y, Tensor) or y.shape != (len(x),):
                raise InputError(f"{self._name} must give a label per image, ({len(x)},); it gives {shape_of(y)}")
            else:
                batch = (x[y >= 0], y[y >= 0])
            if len(batch[0]):
                empty = False
                yield batch
        if empty:
            raise InputError(
                f"{self._name} must hold images with labels of 0 and above; it holds none: a negative label is an "
                "outlier's, which pytorch-ood's detectors leave out"
            )

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("a stream has no length")
        return self._count()


def _loader(batches: _Known) -> DataLoader[Batch]:
    """Batches as a data loader; its generator is its own, so that torch's is left alone."""
    return DataLoader(batches, batch_size=None, generator=torch.Generator())
