"""kedge's detectors in pytorch-ood's loops, and pytorch-ood's detectors behind kedge's verbs."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from kedge.checks import shape_of
from kedge.data import Preprocess, batches
from kedge.data.batches import Batch, image_and_label
from kedge.detectors import Cost, Detector, Outputs
from kedge.errors import InputError
from kedge.seeds import seeded

API = "pytorch_ood.api"  # looked up among the loaded modules, never imported
GRADIENTS = "GradientDetector"  # the base of pytorch-ood's detectors that need gradients to score
BATCH = 256


def pytorch_ood(detector: Any, *, net: nn.Module | None = None) -> Any:
    """Adapt a kedge detector to pytorch-ood, or a pytorch-ood detector to kedge.

    In both libraries a larger score is further out of distribution, so scores pass unchanged. Written for pytorch-ood
    0.4, which need not be installed to adapt a kedge detector.

    Args:
        detector: A kedge detector: the result has `fit`, `predict` and the rest of pytorch-ood's protocol. Or an
            instance of a pytorch-ood detector: the result is a kedge `Detector` with every verb but `save`.
        net: For pytorch-ood detectors that have an encoder only: the network whose logits give the labels. By default
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
        kind = f"the class {detector.__name__}" if isinstance(detector, type) else type(detector).__name__
        raise InputError(f"detector must be an instance with fit and predict, of kedge or of pytorch-ood; got {kind}")
    net = getattr(detector, "model", None) if net is None else net
    if not isinstance(net, nn.Module):
        raise InputError(
            f"net must be given for {type(detector).__name__}, whose model is {shape_of(net)}: the network, as a "
            "torch.nn.Module, whose logits give the labels"
        )
    return FromPytorchOOD(net, detector)


class ForPytorchOOD:
    """A kedge detector with the protocol of ``pytorch_ood.api.Detector``; made by `pytorch_ood`.

    `fit` leaves out images with negative labels, which are pytorch-ood's outliers. A method that learns from held-out
    images, such as `TemperatureScaling`, does so in ``.detector.calibrate``. pytorch-ood's benchmarks accept it if
    pytorch-ood was imported first.
    """

    info: ClassVar[None] = None
    hyperparameter_space: dict[str, list[Any]]

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.hyperparameter_space = {}
        if API in sys.modules:  # its benchmarks check for an instance of its own base class
            sys.modules[API].Detector.register(ForPytorchOOD)

    @property
    def requires_fit(self) -> bool:
        """Whether `fit` must be called before scoring."""
        return self.detector.preprocess is None

    @property
    def device(self) -> torch.device:
        """The network's device."""
        return self.detector.net.mean.device

    def to(self, device: str | torch.device) -> Self:
        """Move the network."""
        self.detector.net.to(device)
        return self

    def fit(self, data_loader: Any) -> Self:
        """Fit the detector on batches (images in [0, 1], labels), leaving out images with negative labels."""
        self.detector.fit(_loader(lambda: map(image_and_label, data_loader), "data_loader"))
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Scores (B,) of images (B, D, H, W) in [0, 1], on their device; larger is further out of distribution."""
        return self.detector.score(x, batch_size=max(1, len(x))).to(x.device)

    __call__ = predict

    def fit_features(self, x: Tensor, y: Tensor | None = None) -> Self:
        """Raise: a kedge detector reads the layers of its network itself."""
        raise InputError(f"{type(self.detector).__name__} does not take features; call fit(data_loader) and predict(x)")

    predict_features = fit_features

    def get_hyperparameters(self) -> dict[str, Any]:
        """None: a kedge detector gets its options when it is built."""
        return {}

    def set_hyperparameters(self, **values: Any) -> Self:
        """Raise if a value is given: a kedge detector gets its options when it is built."""
        if values:
            kind = type(self.detector).__name__
            raise InputError(f"{kind} takes {sorted(values)} when it is built, not later; build another {kind}")
        return self


class FromPytorchOOD(Detector):
    """A pytorch-ood detector behind kedge's verbs, all but `save`; made by `pytorch_ood`.

    It draws from torch's generator, seeded alike for every batch and restored afterwards. Its scores may depend on the
    batch.
    """

    name = "pytorch_ood"

    def __init__(self, net: nn.Module, peer: Any) -> None:
        super().__init__(net)
        self.peer = peer
        self._needs_gradients = any(kind.__name__ == GRADIENTS for kind in type(peer).__mro__)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Set the anchors of an anchored network that has none, then fit the detector if it requires that."""
        super().fit_method(train_set, preprocess)
        if not getattr(self.peer, "requires_fit", False):
            return

        def inputs() -> Iterator[Batch]:
            for x, y in batches(train_set, preprocess, size=BATCH):
                # pytorch-ood takes a negative label for an outlier; in kedge it means that there is none.
                labels = torch.full((len(x),), -1) if y is None else y
                yield self.as_input(x), labels.to(self.net.mean.device)

        def count() -> int:
            try:
                return len(train_set) if isinstance(train_set, DataLoader) else math.ceil(len(train_set) / BATCH)
            except TypeError:  # a stream, which has no length of its own
                return sum(1 for _ in inputs())

        with torch.enable_grad(), seeded(0), _unchanged(self.net):
            self.peer.fit(_loader(inputs, "train_set", count))

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and the detector's scores."""
        logits, kind = self.net(x), type(self.peer).__name__
        drawn = [(net, net.batches_seen) for net in self.anchored]
        with torch.set_grad_enabled(self._needs_gradients), seeded(0), _unchanged(self.net):
            score = torch.as_tensor(self.peer.predict(x)).detach().to(x.device)
        if score.shape != (len(x),):
            raise InputError(f"{kind} must give one score per image, ({len(x)},); it gives {shape_of(score)}")
        if any(net.batches_seen != before for net, before in drawn):
            for net, before in drawn:
                net.batches_seen = before
            raise InputError(
                f"{kind} puts the anchored network in training mode, where its anchors are drawn from the batch; use "
                "it with an unanchored network, or a method of kedge's own"
            )
        return Outputs(logits, score)

    @property
    def cost(self) -> Cost:
        """A pass for the labels and one for the scores, two and a backward pass with gradients; it may take more."""
        once = self.net.passes
        return Cost(3 * once, once) if self._needs_gradients else Cost(2 * once)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raise: a kedge file runs no code, and this detector is code of another library."""
        raise InputError(
            f"{type(self.peer).__name__} cannot be saved: only kedge's own detectors can; save its network with one of "
            "them, as kedge.MSP(net).fit(train_set).save(path), and build it again"
        )


@contextlib.contextmanager
def _unchanged(net: nn.Module) -> Iterator[None]:
    """Put a network's modes, buffers and gradients back after the block."""
    modes = [(module, module.training) for module in net.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = None  # a backward pass would add to existing gradients
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter, gradient, flag in gradients:
            parameter.grad = gradient
            parameter.requires_grad_(flag)


@dataclass(eq=False)
class _Labelled(IterableDataset[Batch]):
    """Batches without the images whose labels are negative; can be read several times."""

    read: Callable[[], Iterator[tuple[Any, Any]]]
    name: str
    count: Callable[[], int] | None

    def __iter__(self) -> Iterator[Any]:
        empty = True
        for x, y in self.read():
            if y is not None and (not isinstance(y, Tensor) or y.shape != (len(x),)):
                raise InputError(f"{self.name} must give a label per image, ({len(x)},); it gives {shape_of(y)}")
            batch: Any = (x,) if y is None else (x[y >= 0], y[y >= 0])
            if len(batch[0]):
                empty = False
                yield batch
        if empty:
            raise InputError(
                f"{self.name} must hold images with labels of 0 and above; it holds none: pytorch-ood's detectors "
                "leave out images with negative labels, which are outliers"
            )

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("a stream has no length")
        return self.count()


def _loader(read: Callable[[], Any], name: str, count: Callable[[], int] | None = None) -> DataLoader[Batch]:
    """Batches as a data loader; with a generator of its own, so that torch's stays as it is."""
    return DataLoader(_Labelled(read, name, count), batch_size=None, generator=torch.Generator())
