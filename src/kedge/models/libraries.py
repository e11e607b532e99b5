"""Networks of timm, transformers and torchvision, with what these libraries say about their inputs."""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from kedge.checks import needs
from kedge.errors import InputError

FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, which transformers stores


@dataclass(frozen=True)
class Requested:
    """What the caller of `network` wants of a library's network."""

    classes: int | None
    pretrained: bool
    channels: int | None
    size: tuple[int, int] | None


@dataclass(frozen=True)
class LibraryNetwork:
    """A network and what its library says about its inputs."""

    network: nn.Module
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    preprocess: dict[str, Any] | None = None  # arguments of `kedge.Preprocess`
    classes: tuple[str, ...] = ()
    has_classes: bool = False  # whether the library gave the head the number of classes that was asked for
    arguments: dict[str, Any] = field(default_factory=dict)


def _timm(name: str, requested: Requested) -> LibraryNetwork:
    timm = needs("timm", "timm", f"timm:{name}")
    given = {"in_chans": requested.channels, "num_classes": requested.classes, "img_size": requested.size}
    arguments = {key: value for key, value in given.items() if value is not None}
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise _unknown(f"timm:{name}", get_close_matches(name, timm.list_models(), n=3))

    def create() -> Any:
        return timm.create_model(name, pretrained=requested.pretrained, **arguments)

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
    return LibraryNetwork(model, expected["mean"], expected["std"], preprocess, tuple(labels), True, spec)


def _hf(name: str, requested: Requested) -> LibraryNetwork:
    transformers = needs("transformers", "transformers", f"hf:{name}")
    given = {"num_channels": requested.channels, "num_labels": requested.classes, "image_size": requested.size}
    arguments = {key: value for key, value in given.items() if value is not None}
    auto = transformers.AutoModelForImageClassification
    config = _downloaded(f"hf:{name}", lambda: transformers.AutoConfig.from_pretrained(name, **arguments))
    if requested.pretrained:
        options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = _downloaded(f"hf:{name}", lambda: auto.from_pretrained(name, **options))
        fresh = [key for key, _, shape in info["mismatched_keys"] if shape[0] != requested.classes]
        if fresh:
            raise InputError(
                f"the weights of hf:{name} are for other channels or another size than was asked for: "
                f"{', '.join(sorted(fresh)[:5])} do not fit; leave out channels and size"
            )
    else:
        model = auto.from_config(config)
    names = () if requested.classes is not None else tuple(config.id2label[i] for i in range(config.num_labels))
    rest: dict[str, Any] = {"classes": names, "has_classes": True, "arguments": {"config": config.to_dict()}}
    mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    try:
        processor = mixin.get_image_processor_dict(name)[0]
    except OSError:  # a folder without one
        return LibraryNetwork(model, **rest)
    normalised = processor.get("do_normalize", True)
    mean, std = (processor.get(key) if normalised else None for key in ("image_mean", "image_std"))
    described = _of_processor(processor, int(getattr(config, "num_channels", 3)))
    return LibraryNetwork(model, mean, std, described, **rest)


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


def _torchvision(name: str, requested: Requested) -> LibraryNetwork:
    models = needs("torchvision", "torchvision", f"torchvision:{name}").models
    if requested.channels not in (None, 3):
        raise InputError(f"channels must be 3 for torchvision:{name}; got {requested.channels}")
    if name not in models.list_models(module=models):
        raise _unknown(f"torchvision:{name}", get_close_matches(name, models.list_models(module=models), n=3))
    published = models.get_model_weights(name).DEFAULT
    transform = published.transforms()
    model = _downloaded(
        f"torchvision:{name}", lambda: models.get_model(name, weights=published if requested.pretrained else None)
    )
    side, resized = transform.crop_size[0], transform.resize_size[0]
    preprocess = {
        "shape": (3, side, side),
        "resize": str(transform.interpolation.value),
        "crop": min(1.0, side / resized),
    }
    names = tuple(published.meta["categories"])
    return LibraryNetwork(
        model, transform.mean, transform.std, preprocess, names, arguments={"num_classes": len(names)}
    )


def _rebuilt_timm(name: str, arguments: dict[str, Any]) -> Any:
    return needs("timm", "timm", f"timm:{name}").create_model(name, pretrained=False, **arguments)


def _rebuilt_hf(name: str, arguments: dict[str, Any]) -> Any:
    transformers = needs("transformers", "transformers", f"hf:{name}")
    config = dict(arguments["config"])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return transformers.AutoModelForImageClassification.from_config(config)


def _rebuilt_torchvision(name: str, arguments: dict[str, Any]) -> Any:
    models = needs("torchvision", "torchvision", f"torchvision:{name}").models
    return models.get_model(name, weights=None, **arguments)


@dataclass(frozen=True)
class Library:
    """How networks of a library are loaded by name, and rebuilt with fresh weights from the arguments of a `Spec`."""

    load: Callable[[str, Requested], LibraryNetwork]
    rebuild: Callable[[str, dict[str, Any]], nn.Module]


LIBRARIES = {
    "timm": Library(_timm, _rebuilt_timm),
    "hf": Library(_hf, _rebuilt_hf),
    "torchvision": Library(_torchvision, _rebuilt_torchvision),
}


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
