"""Networks by name, of this and other libraries, with the input size and normalisation that they expect."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.errors import InputError
from kedge.models import build, model_names
from kedge.models.base import Spec
from kedge.models.classifier import Classifier, as_classifier
from kedge.models.head import find_head
from kedge.models.libraries import LIBRARIES, LibraryNetwork, Requested
from kedge.seeds import seeded

WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_ema")  # under which checkpoints keep the weights
RENAMED = ((".shortcut.", ".downsample."), ("linear.", "fc."))  # from the names of other ResNets to those of kedge's


def network(
    name: str,
    *,
    classes: int | None = None,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    fresh_head: bool = False,
    seed: int = 0,
) -> Classifier:
    """A network by name, ready for `kedge.anchor`, `kedge.train` and every detector.

    Args:
        name: ``"timm:resnet50"``, ``"hf:microsoft/resnet-50"`` or a folder (transformers), ``"torchvision:resnet50"``,
            ``"package.module:factory"`` (a function that returns a network), or one of `kedge.models.model_names`.
        classes: Number of classes; where the network has another, its head is replaced by a fresh one.
        pretrained: Whether to load the weights that the library publishes; the library downloads them.
        weights: A file with the network's weights: safetensors, or a state dict saved by torch.
        mean: Normalisation of images in [0, 1]; by default what the library gives for the network.
        std: The same for the deviation.
        size: Height and width of the inputs, or one number for both; by default what the library gives.
        channels: Channels of the inputs, where the network can be built for other than 3.
        fresh_head: Whether to train on: where ``weights`` are of another number of classes, the head stays fresh, which
            is an error otherwise.
        seed: Random seed of fresh weights.

    Example:
        >>> network("compact", classes=5)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """
    if classes is not None:
        at_least("classes", classes, 2)
    kind, separator, rest = str(name).partition(":")
    sides = (size, size) if isinstance(size, int) else size
    for side in sides or ():
        at_least("size", side, 1)
    requested = Requested(classes, pretrained, channels, sides)
    with seeded(seed):
        if separator and kind in LIBRARIES:
            loaded = LIBRARIES[kind].load(rest, requested)
        else:
            loaded = (_factory if separator else _own)(str(name), requested)
    if loaded.arguments:
        loaded.network.spec = Spec(name, loaded.arguments)  # type: ignore[assignment]
    shape = _shape(loaded, requested)
    if mean is None and std is None:
        mean, std = (_for_channels(values, channels) for values in (loaded.mean, loaded.std))
    net = as_classifier(loaded.network)
    if mean is not None or std is not None:
        net.set_statistics(0.0 if mean is None else mean, 1.0 if std is None else std)
    if weights is not None:
        replaced = classes is not None and not loaded.has_classes
        load_weights(net.network, weights, skip_head=replaced or fresh_head)
    if classes is not None and not loaded.has_classes:
        if shape is None:
            raise InputError(f"size must be given to replace the head of {name}, whose input size is unknown")
        replace_head(net, classes, torch.zeros(2, *shape), seed=seed)
    if shape is not None:
        net.record["preprocess"] = {"background": "white", **(loaded.preprocess or {}), "shape": shape}
    if loaded.classes and classes in (None, len(loaded.classes)):
        net.record["classes"] = list(loaded.classes)
    return net.eval()


def load_weights(net: nn.Module, path: str | os.PathLike[str], *, skip_head: bool = False) -> None:
    """Load a state dict into a network; safetensors, or a file of torch.save that is read without running its code.

    Args:
        net: The network.
        path: The file; weights under ``"state_dict"`` or ``"model"`` and names that begin with ``"module."`` are found,
            and so are the names of OpenOOD's ResNets.
        skip_head: Whether weights for another number of classes are left out, for a head that is replaced or trained.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"weights must be a file; {file} is not one")
    try:
        if file.suffix == ".safetensors":
            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files fail in many ways
        raise _unreadable(file, error) from error
    state = next(
        (state[key] for key in WRAPPERS if isinstance(state, dict) and isinstance(state.get(key), dict)), state
    )
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"weights must be a state dict, names and tensors; {file} holds a {type(state).__name__}")
    own = net.state_dict()
    state = {_own_name(key.removeprefix("module."), own): value for key, value in state.items()}
    other = [key for key in own if key in state and state[key].shape != own[key].shape]
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]  # old files lack it
    extra = [key for key in state if key not in own]
    heads = [key for key in other if state[key].ndim and state[key].shape[1:] == own[key].shape[1:]]
    if missing or extra or other != (heads if skip_head else []):
        shapes = [f"{key} {tuple(state[key].shape)} for {tuple(own[key].shape)}" for key in other]
        parts = {"missing": missing, "not in the network": extra, "of another shape": shapes}
        listed = "; ".join(f"{len(keys)} {what}: {', '.join(keys[:5])}" for what, keys in parts.items() if keys)
        counts = {state[key].shape[0] for key in heads}  # of classes, if only the last layer differs
        if len(counts) == 1 and not missing and not extra and other == heads:
            listed += (
                f". If the network in the file has {min(counts)} classes, say so: classes={min(counts)}, --classes"
            )
        raise InputError(f"weights must be those of a {type(net).__name__}; {file} does not fit it: {listed}")
    net.load_state_dict({**own, **state, **{key: own[key] for key in other}})


def _own_name(key: str, own: Mapping[str, Tensor]) -> str:
    """A name in a file as the network has it."""
    names = [key, *(key.replace(theirs, ours) for theirs, ours in RENAMED)]
    return next((name for name in names if name in own), key)


def replace_head(net: Classifier, classes: int, example: Tensor, *, seed: int = 0) -> None:
    """Give a network a fresh last linear layer for another number of classes, in place.

    Args:
        net: The network.
        classes: Number of classes.
        example: A batch of images, with which the layer that gives the logits is found.
        seed: Random seed of its weights.
    """
    name = find_head(net, example)
    old = net.network.get_submodule(name)
    assert isinstance(old, nn.Linear)
    with seeded(seed):
        fresh = nn.Linear(old.in_features, classes, bias=old.bias is not None).to(old.weight)
    net.network.set_submodule(name, fresh)


def _own(name: str, requested: Requested) -> LibraryNetwork:
    if name not in model_names():
        near = get_close_matches(name, model_names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"kedge's own are {', '.join(model_names())}"
        raise InputError(
            f"network must be timm:NAME, hf:NAME, torchvision:NAME, package.module:factory or one of kedge's own; "
            f"got {name!r}: {hint}"
        )
    if requested.pretrained:
        raise InputError(
            f"{name} has no published weights; leave out pretrained, or use a timm:, hf: or torchvision: network"
        )
    given = {"classes": requested.classes, "channels": requested.channels}
    return LibraryNetwork(
        build(name, **{key: value for key, value in given.items() if value is not None}), has_classes=True
    )


def _factory(name: str, requested: Requested) -> LibraryNetwork:
    net = from_factory(name)
    if isinstance(net, Classifier):
        mean, std = (net.mean.tolist(), net.std.tolist()) if net.has_statistics else (None, None)
        return LibraryNetwork(
            net.network, mean, std, net.record.get("preprocess"), tuple(net.record.get("classes", ()))
        )
    return LibraryNetwork(net)


def from_factory(name: str, argument: str = "network") -> nn.Module:
    """The network that a function of the user's own code returns, by its name ``"package.module:factory"``."""
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # a file of one's own, next to which the command is run
        sys.path.append(str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{argument} must be package.module:factory, a function to import; {name!r} is not: {error}"
        ) from error
    net = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not isinstance(net, nn.Module):
        raise InputError(f"{name} must return a torch.nn.Module; it returned a {type(net).__name__}")
    return net


def rebuilt(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The architecture that a `Spec` describes, with fresh weights; downloads nothing and imports no factory."""
    kind, _, rest = name.partition(":")
    return LIBRARIES[kind].rebuild(rest, arguments) if kind in LIBRARIES else build(name, **arguments)


def _shape(loaded: LibraryNetwork, requested: Requested) -> tuple[int, ...] | None:
    """The shape of one input, as far as it is known."""
    known = (loaded.preprocess or {}).get("shape")
    sides = requested.size or (known[1:] if known else None)
    return None if sides is None else (requested.channels or (known[0] if known else 3), *sides)


def _for_channels(values: Sequence[float] | None, channels: int | None) -> Sequence[float] | None:
    """A library's mean or deviation for another number of channels: one value for gray images, else unknown."""
    if values is None or channels is None or len(values) in (1, channels):
        return values
    return [sum(values) / len(values)] if channels == 1 else None


def _unreadable(file: Path, error: Exception) -> InputError:
    reason = str(error).strip().split("\n")[0]
    return InputError(
        f"weights must be a safetensors file or a state dict that torch.save wrote; {file} is not: {reason}"
    )
