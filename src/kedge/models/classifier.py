"""Classifier: a network that takes images in [0, 1] and normalises them itself."""

import contextlib
import hashlib
import inspect
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kedge.checks import layout_hint
from kedge.errors import InputError, KedgeError
from kedge.models.base import Network
from kedge.models.features import read_features
from kedge.pixels import to_unit

# Modules that are in evaluation mode for a while: their modes before, and how many blocks use them.
_MODES: dict[nn.Module, bool] = {}
_USERS: Counter[nn.Module] = Counter()
_MODES_LOCK = threading.Lock()
_OF_SIZES = ("size", "shape", "match", "channels")  # words in what torch and timm say about inputs that do not fit
_CHECKSUMS: dict[nn.Module, str] = {}  # of the networks of `unchanged` blocks


class Classifier(nn.Module):
    """Any network, with what it expects: images in [0, 1] (or uint8) go in, logits (B, C) come out.

    The normalisation lives here, as buffers, so that it is saved with the weights and no image can be normalised
    differently from another. Without ``mean`` and ``std`` the network sees the images as they are.

    Args:
        network: Takes (B, D, ...) and returns logits (B, C) or an object with ``.logits``.
        mean: One value, or one per channel, of images in [0, 1].
        std: The same for the standard deviation.
        preprocess: The `kedge.Preprocess` of its evaluation: size, filter and crop. By default detectors take the size
            of the images that they are fitted on.
        classes: Names of the classes, in the order of the logits.

    Example:
        >>> net = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), mean=0.5, std=0.25)
        >>> net(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4, 2])
    """

    mean: Tensor
    std: Tensor
    outliers: Tensor | None
    # Buffers whose shape depends on the data, so a state dict may bring them in another shape.
    flexible_buffers: tuple[str, ...] = ("mean", "std", "outliers")
    shown: ClassVar[set[str]] = {  # by tab completion
        "network", "mean", "std", "record", "features", "set_statistics", "round_weights",
        "train", "eval", "to", "parameters", "state_dict", "load_state_dict",
    }  # fmt: skip
    bare = False  # whether kedge wrapped a network of which no normalisation is known; see `as_classifier`

    def __init__(
        self,
        network: nn.Module,
        *,
        mean: Any = None,
        std: Any = None,
        preprocess: Any = None,
        classes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        _check_one_input(network)
        self.network = network
        like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
        self.register_buffer("mean", torch.zeros(1, dtype=like.dtype, device=like.device))
        self.register_buffer("std", torch.ones_like(self.mean))
        self.register_buffer("outliers", None)  # fingerprints of the outliers that it was trained with
        self.has_statistics = False
        self.record: dict[str, Any] = {}  # how the network was trained, as plain data
        if preprocess is not None:
            self.record["preprocess"] = asdict(preprocess)
        if classes:
            self.record["classes"] = [str(name) for name in classes]
        if mean is not None or std is not None:
            self.set_statistics(0.0 if mean is None else mean, 1.0 if std is None else std)

    @property
    def passes(self) -> float:
        """Forward passes through the network for each image; a fraction where a part of it runs more than once."""
        return 1

    def set_statistics(self, mean: float | Sequence[float] | Tensor, std: float | Sequence[float] | Tensor) -> None:
        """Set the normalisation: one value, or one per channel."""
        dtype, device = self.mean.dtype, self.mean.device
        values = [torch.as_tensor(v, dtype=dtype, device=device).detach().flatten().clone() for v in (mean, std)]
        sizes = [v.numel() for v in values]
        if 0 in sizes or len({1, *sizes}) > 2:
            raise InputError(f"mean and std must have one value or one per channel, got {sizes[0]} and {sizes[1]}")
        if not (torch.isfinite(torch.cat(values)).all() and (values[1] > 0).all()):
            raise InputError(f"mean must be finite and std positive, got mean={mean} and std={std}")
        self.mean, self.std = values
        self.has_statistics = True

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{type(self).__name__}({type(self.network).__name__}, {count:,} parameters)"

    def __dir__(self) -> list[str]:
        return sorted(self.shown)

    def round_weights(self) -> Self:
        """Round the weights, in place, to half precision, so that a saved file is half as large.

        The network still computes in its own precision. Call it before `Detector.calibrate`: scores change a little.
        """
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(weight.half())
        return self

    def normalise(self, x: Tensor) -> Tensor:
        """Bring uint8 to [0, 1], subtract the mean and divide by the deviation."""
        if x.dtype == torch.uint8:
            x = to_unit(x, self.mean.dtype)
        for name, value in (("mean", self.mean), ("std", self.std)):
            if value.numel() > 1 and (x.ndim < 2 or x.shape[1] != value.numel()):
                raise InputError(
                    f"x must be (B, {value.numel()}, ...) to match the {value.numel()} values of {name}, "
                    f"got {tuple(x.shape)}; {layout_hint(x.shape, value.numel())}"
                )
        if not self.has_statistics:
            return x.clone()  # a layer that works in place must not change the caller's images
        per_channel = (1, -1) + (1,) * (x.ndim - 2)
        return (x - self.mean.view(per_channel)) / self.std.view(per_channel)

    def as_input(self, x: Tensor) -> Tensor:
        """A batch as the network takes it: on its device, in its precision, in [0, 1]."""
        return to_unit(x.to(self.mean.device), self.mean.dtype)

    def forward(self, x: Tensor, *, raw: bool = False) -> Any:
        """Logits (B, C) of images (B, D, ...); with ``raw`` the network's own output instead."""
        with _fitting(self.network, x):
            output = self.network(self.normalise(x))
        return output if raw else logits_of(output)

    def features(
        self, x: Tensor, layers: Sequence[str] = (), *, like: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C) and the outputs of the named layers of the network, in one pass; see `read_features`.

        Args:
            x: Images (B, D, ...).
            layers: Names of layers inside ``network``; ``"fc:in"`` for the input of one.
            like: For networks whose anchors depend on the image: the images to choose anchors by, where ``x`` is a
                perturbed version of them.
        """
        with _fitting(self.network, x):
            output, features = read_features(self.network, self.normalise(x), layers)
        return logits_of(output), features

    def read(self, x: Tensor, layers: Sequence[str] = ()) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Logits (B, C), those under each anchor (K, B, C) if it has any, and what the named layers give."""
        logits, features = self.features(x, layers) if layers else (self(x), {})
        return logits, None, features

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in self.flexible_buffers:
            loaded = state_dict.get(prefix + name)
            if loaded is not None:
                like = getattr(self, name)
                like = self.mean if like is None else like
                dtype = like.dtype if loaded.is_floating_point() else loaded.dtype
                setattr(self, name, torch.empty(loaded.shape, dtype=dtype, device=like.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        # A network saved without statistics brings 0 and 1, and may be given some later.
        self.has_statistics = self.has_statistics or bool((self.mean != 0).any() or (self.std != 1).any())


def as_classifier(net: nn.Module) -> Classifier:
    """The network itself if it is a `Classifier`, or one around it; ``bare`` if a normalisation may be missing."""
    if isinstance(net, Classifier):
        return net
    wrapped = Classifier(net)
    leaves = [module for module in net.modules() if next(module.children(), None) is None]
    own = isinstance(leaves[0], _BatchNorm) or any("Normali" in type(module).__name__ for module in leaves)
    wrapped.bare = not (own or isinstance(net, Network))
    return wrapped


def checksum(net: Classifier) -> str:
    """The sha256 of a network's weights, buffers and normalisation."""
    if net in _CHECKSUMS:
        return _CHECKSUMS[net]
    digest = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_one_input(network: nn.Module) -> None:
    """Raise an `InputError` if a network needs more than images."""
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):  # compiled code may have no signature
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
    if len(needed) > 1:
        raise InputError(
            f"the network must take one input, images (B, D, H, W); {type(network).__name__} takes {', '.join(needed)}"
            ": wrap it in a module that takes images and gives it the others"
        )


@contextlib.contextmanager
def _fitting(network: nn.Module, x: Tensor) -> Iterator[None]:
    """Turn the many errors about inputs that are too small, or of another size, into an `InputError`."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, (KedgeError, torch.OutOfMemoryError)) or not any(word in reason for word in _OF_SIZES):
            raise
        raise InputError(
            f"{type(network).__name__} cannot take inputs of shape {tuple(x.shape[1:])}: {reason}. Give it images of "
            "the size that it is made for (size=, --size)"
        ) from error


@contextlib.contextmanager
def unchanged(net: Classifier) -> Iterator[None]:
    """Promise that the network's weights stay as they are inside the block, so that `checksum` reads them once."""
    known = net in _CHECKSUMS  # in a block around this one
    _CHECKSUMS[net] = checksum(net)
    try:
        yield
    finally:
        if not known:
            del _CHECKSUMS[net]


def logits_of(output: Any) -> Tensor:
    """The logits in a network's output: a tensor, or the ``.logits`` of an output object."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        came = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise InputError(
            f"the network must return logits (B, C), or an object with them as .logits; got {came}; "
            "wrap it in a module that returns the logits"
        )
    return logits


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode inside the block, and each of its modules back as it was afterwards.

    A network already in evaluation mode is left alone, so single modules kept in training mode stay so. Modules are
    counted one by one, since several detectors may share a network: of all threads that use a module, the last one to
    leave puts it back.
    """
    with _MODES_LOCK:
        modules = list(network.modules()) if network.training or network in _MODES else []
        for module in modules:
            _MODES.setdefault(module, module.training)
            _USERS[module] += 1
        if any(module.training for module in modules):
            network.eval()
    try:
        yield
    finally:
        with _MODES_LOCK:
            for module in modules:
                _USERS[module] -= 1
                if _USERS[module] == 0:
                    del _USERS[module]
                    module.training = _MODES.pop(module)
