"""Networks by name, of this and other libraries, with the input size and normalisation that they expect."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kedge.checks import at_least, needs
from kedge.errors import InputError
from kedge.models import build, model_names
from kedge.models.base import Spec
from kedge.models.classifier import Classifier, as_classifier
from kedge.models.head import find_head
from kedge.seeds import seeded

FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, which transformers stores
WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_ema")  # under which checkpoints keep the weights
RENAMED = ((".shortcut.", ".downsample."), ("linear.", "fc."))  # from the names of other ResNets to those of kedge's


@dataclass(frozen=True)
class _Wanted:
    """What the caller of `network` wants of a library's network."""

    classes: int | None
    pretrained: bool
    channels: int | None
    size: tuple[int, int] | None


@dataclass(frozen=True)
class _Loaded:
    """A network and what its library says about its inputs."""

    network: nn.Module
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    preprocess: dict[str, Any] | None = None  # arguments of `kedge.Preprocess`
    classes: tuple[str, ...] = ()
    has_classes: bool = False  # whether the library gave the head the number of classes that was asked for
    arguments: dict[str, Any] = field(default_factory=dict)


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
    loader = _LOADERS.get(kind, _factory) if separator else _own
    sides = (size, size) if isinstance(size, int) else size
    for side in sides or ():
        at_least("size", side, 1)
    wanted = _Wanted(classes, pretrained, channels, sides)
    with seeded(seed):
        loaded = loader(rest if kind in _LOADERS and separator else str(name), wanted)
    if loaded.arguments:
        loaded.network.spec = Spec(name, loaded.arguments)  # type: ignore[assignment]
    shape = _shape(loaded, wanted)
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


def _own(name: str, wanted: _Wanted) -> _Loaded:
    if name not in model_names():
        near = get_close_matches(name, model_names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"kedge's own are {', '.join(model_names())}"
        raise InputError(
            f"network must be timm:NAME, hf:NAME, torchvision:NAME, package.module:factory or one of kedge's own; "
            f"got {name!r}: {hint}"
        )
    if wanted.pretrained:
        raise InputError(
            f"{name} has no published weights; leave out pretrained, or use a timm:, hf: or torchvision: network"
        )
    given = {"classes": wanted.classes, "channels": wanted.channels}
    return _Loaded(build(name, **{key: value for key, value in given.items() if value is not None}), has_classes=True)


def _timm(name: str, wanted: _Wanted) -> _Loaded:
    timm = needs("timm", "timm", f"timm:{name}")
    given = {"in_chans": wanted.channels, "num_classes": wanted.classes, "img_size": wanted.size}
    arguments = {key: value for key, value in given.items() if value is not None}
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise _unknown(f"timm:{name}", get_close_matches(name, timm.list_models(), n=3))

    def create() -> Any:
        return timm.create_model(name, pretrained=wanted.pretrained, **arguments)

    try:
        model = _downloaded(f"timm:{name}", create)
    except TypeError:  # most networks are built the same for every size, and take no img_size
        if arguments.pop("img_size", None) is None:
            raise
        model = _downloaded(f"timm:{name}", create)
    expected = timm.data.resolve_model_data_config(model)
    side = min(expected["input_size"][1:])
    preprocess = {
        "shape": tuple(expected["input_size"]),
        "resize": expected["interpolation"],
        "crop": side / math.floor(side / expected["crop_pct"]),  # timm rounds the scaled side down
    }
    labels = (model.pretrained_cfg or {}).get("label_names") or ()
    spec = {"num_classes": model.num_classes, **arguments}
    return _Loaded(model, expected["mean"], expected["std"], preprocess, tuple(labels), True, spec)


def _hf(name: str, wanted: _Wanted) -> _Loaded:
    transformers = needs("transformers", "transformers", f"hf:{name}")
    given = {"num_channels": wanted.channels, "num_labels": wanted.classes, "image_size": wanted.size}
    arguments = {key: value for key, value in given.items() if value is not None}
    auto = transformers.AutoModelForImageClassification
    config = _downloaded(f"hf:{name}", lambda: transformers.AutoConfig.from_pretrained(name, **arguments))
    if wanted.pretrained:
        options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = _downloaded(f"hf:{name}", lambda: auto.from_pretrained(name, **options))
        fresh = [key for key, _, shape in info["mismatched_keys"] if shape[0] != wanted.classes]
        if fresh:
            raise InputError(
                f"the weights of hf:{name} are for other channels or another size than was asked for: "
                f"{', '.join(sorted(fresh)[:5])} do not fit; leave out channels and size"
            )
    else:
        model = auto.from_config(config)
    names = () if wanted.classes is not None else tuple(config.id2label[i] for i in range(config.num_labels))
    rest: dict[str, Any] = {"classes": names, "has_classes": True, "arguments": {"config": config.to_dict()}}
    mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    try:
        processor = mixin.get_image_processor_dict(name)[0]
    except OSError:  # a folder without one
        return _Loaded(model, **rest)
    normalised = processor.get("do_normalize", True)
    mean, std = (processor.get(key) if normalised else None for key in ("image_mean", "image_std"))
    described = _of_processor(processor, int(getattr(config, "num_channels", 3)))
    return _Loaded(model, mean, std, described, **rest)


def _of_processor(processor: dict[str, Any], channels: int) -> dict[str, Any]:
    """Arguments of `kedge.Preprocess` for an image processor of transformers."""
    size = processor.get("size", 224)
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    cut = processor.get("crop_size") if processor.get("do_center_crop") else None
    cut = {"height": cut, "width": cut} if isinstance(cut, int) else cut
    edge = size.get("shortest_edge")
    target = cut or ({"height": edge, "width": edge} if edge else size)
    described: dict[str, Any] = {"shape": (channels, int(target["height"]), int(target["width"]))}
    described["resize"] = FILTERS.get(int(processor.get("resample", 2)), "bicubic")
    if edge and cut:
        described["crop"] = min(1.0, min(cut["height"], cut["width"]) / edge)
    elif edge and processor.get("crop_pct"):  # ConvNeXT's: resized to size / crop_pct, then cropped
        described["crop"] = float(processor["crop_pct"])
    elif not edge:
        described["fit"] = "stretch"
    return described


def _torchvision(name: str, wanted: _Wanted) -> _Loaded:
    models = needs("torchvision", "torchvision", f"torchvision:{name}").models
    if wanted.channels not in (None, 3):
        raise InputError(f"channels must be 3 for torchvision:{name}; got {wanted.channels}")
    if name not in models.list_models(module=models):
        raise _unknown(f"torchvision:{name}", get_close_matches(name, models.list_models(module=models), n=3))
    published = models.get_model_weights(name).DEFAULT
    transform = published.transforms()
    model = _downloaded(
        f"torchvision:{name}", lambda: models.get_model(name, weights=published if wanted.pretrained else None)
    )
    side, resized = transform.crop_size[0], transform.resize_size[0]
    preprocess = {
        "shape": (3, side, side),
        "resize": str(transform.interpolation.value),
        "crop": min(1.0, side / resized),
    }
    names = tuple(published.meta["categories"])
    return _Loaded(model, transform.mean, transform.std, preprocess, names, arguments={"num_classes": len(names)})


def _factory(name: str, wanted: _Wanted) -> _Loaded:
    net = from_factory(name)
    if isinstance(net, Classifier):
        mean, std = (net.mean.tolist(), net.std.tolist()) if net.has_statistics else (None, None)
        return _Loaded(net.network, mean, std, net.record.get("preprocess"), tuple(net.record.get("classes", ())))
    return _Loaded(net)


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


_LOADERS: dict[str, Callable[[str, _Wanted], _Loaded]] = {"timm": _timm, "hf": _hf, "torchvision": _torchvision}


def rebuilt(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The architecture that a `Spec` describes, with fresh weights; downloads nothing and imports no factory."""
    kind, _, rest = name.partition(":")
    if kind == "timm":
        return needs("timm", "timm", name).create_model(rest, pretrained=False, **arguments)  # type: ignore[no-any-return]
    if kind == "hf":
        transformers = needs("transformers", "transformers", name)
        config = dict(arguments["config"])
        config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        return transformers.AutoModelForImageClassification.from_config(config)  # type: ignore[no-any-return]
    if kind == "torchvision":
        models = needs("torchvision", "torchvision", name).models
        return models.get_model(rest, weights=None, **arguments)  # type: ignore[no-any-return]
    return build(name, **arguments)


def _shape(loaded: _Loaded, wanted: _Wanted) -> tuple[int, ...] | None:
    """The shape of one input, as far as it is known."""
    known = (loaded.preprocess or {}).get("shape")
    sides = wanted.size or (known[1:] if known else None)
    return None if sides is None else (wanted.channels or (known[0] if known else 3), *sides)


def _for_channels(values: Sequence[float] | None, channels: int | None) -> Sequence[float] | None:
    """A library's mean or deviation for another number of channels: one value for gray images, else unknown."""
    if values is None or channels is None or len(values) in (1, channels):
        return values
    return [sum(values) / len(values)] if channels == 1 else None


def _downloaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"{name} could not be loaded: {reason}. Check the name and the connection, or pass weights= with a file"
        ) from error


def _unknown(name: str, near: Sequence[str]) -> InputError:
    return InputError(f"there is no network {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def _unreadable(file: Path, error: Exception) -> InputError:
    reason = str(error).strip().split("\n")[0]
    return InputError(
        f"weights must be a safetensors file or a state dict that torch.save wrote; {file} is not: {reason}"
    )
