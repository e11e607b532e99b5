"""What commands take: a network, by name or in a saved detector, and sets, of images or of extracted features."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kedge.cli.options import NetworkOptions
from kedge.data import Features, sources
from kedge.data.sources.entry import Images
from kedge.detectors import load
from kedge.errors import InputError, KedgeError
from kedge.io.artifact import locate
from kedge.models.classifier import Classifier
from kedge.models.named import network as named_network


def open_network(name: str, images: Any, given: NetworkOptions) -> Classifier:
    """The network of an argument NETWORK and the options that go with it.

    Without ``--classes`` a network with ``--weights`` gets as many as ``images`` has.
    """
    if locate(name).is_file():
        if stray := [f"--{option}" for option, value in vars(given).items() if value is not None]:
            raise InputError(f"{', '.join(stray)} must come without a saved detector, whose network has them: {name}")
        detector = load(name)
        if detector.preprocess is not None:
            detector.net.record.setdefault("preprocess", asdict(detector.preprocess))
        if detector.classes:
            detector.net.record.setdefault("classes", list(detector.classes))
        return detector.net
    classes = given.classes
    if given.weights is not None and classes is None:
        classes = len(images.classes) or None
    published = given.weights is None and name.split(":")[0] in ("timm", "hf", "torchvision")
    return named_network(
        name, classes=classes, pretrained=published, weights=given.weights, mean=_numbers("--mean", given.mean),
        std=_numbers("--std", given.std), size=given.size,
    )  # fmt: skip


def open_images(
    option: str, name: str, split: str | None = None, *, data_dir: Path | None = None, on_error: str = "raise"
) -> Images:
    """A set of images by name, as `kedge.data.load_dataset` takes it; errors name the option."""
    try:
        return sources.load_dataset(name, split, data_dir=data_dir, on_error=on_error)
    except KedgeError as error:
        raise type(error)(f"{option} {name}: {error}") from error


def open_set(option: str, name: str, split: str | None = None, *, data_dir: Path | None = None) -> Images | Features:
    """A set of images by name, or ``features:FOLDER`` of ``kedge extract``."""
    kind, _, folder = name.partition(":")
    if kind == "features" and folder:
        return Features.open(folder)
    return open_images(option, name, split, data_dir=data_dir)


def open_sets(given: Mapping[str, Sequence[str]], *, data_dir: Path | None = None) -> list[Any]:
    """Sets by option and name; those of equal names are named as they were given: folder:known/test is known/test."""
    sets = [(name, open_set(option, name, data_dir=data_dir)) for option, names in given.items() for name in names]
    count = Counter(images.name for _, images in sets)
    return [
        images if count[images.name] == 1 else replace(images, name=name.partition(":")[2] or name)
        for name, images in sets
    ]


def _numbers(option: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"{option} must be one number, or one per channel with commas between; got {text!r}"
        ) from error
