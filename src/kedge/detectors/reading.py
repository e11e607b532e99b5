"""A pass with a detector over images, or over features that were extracted from them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kedge.checks import all_finite, at_least, finite
from kedge.data import Preprocess, batches
from kedge.data.features import Features
from kedge.data.labels import UNKNOWN
from kedge.data.leakage import fingerprints
from kedge.detectors.outputs import Outputs
from kedge.errors import InputError
from kedge.models.classifier import Classifier, checksum, evaluating

if TYPE_CHECKING:
    from kedge.detectors.base import Detector

_Part = tuple[Outputs, Tensor, Tensor | None, Tensor]  # outputs, which images are bad, labels, fingerprints


def outputs_of(
    detector: "Detector",
    images: Any,
    batch_size: int | None,
    progress: Callable[[int], None] | None = None,
    *,
    held_out: bool = False,
) -> tuple[Outputs, Tensor, Tensor]:
    """Outputs and labels of images, on the CPU; of held-out ones, fingerprints too, and NaN pixels are an error."""
    preprocess = detector._check_fitted()
    size = preprocess.batch_size if batch_size is None else at_least("batch_size", batch_size, 1)
    outs: list[Outputs] = []
    vectors = as_inputs(detector.net, images) is not images
    extracted = isinstance(images, Features) and not vectors
    logits = images.logits if extracted else None  # those that the outputs will keep
    labels: list[Tensor] = []
    prints = [torch.empty(0, 16, dtype=torch.uint8)]
    label = None if progress is not None else "calibrating" if held_out else "scoring"
    read = _of_features if extracted else _of_vectors if vectors else _of_images
    with evaluating(detector.net), torch.no_grad():
        for out, bad, y, marks in read(detector, images, preprocess, size, held_out, label):
            for name, values in (("scores", out.score), ("logits", out.logits)):
                finite(name, values, "the network gives NaN or infinite logits here; check its weights")
            out = out.without(bad)
            outs.append(out if logits is None else replace(out, logits=out.logits.new_empty(0)))
            labels.append(torch.full((len(bad),), UNKNOWN) if y is None else y.cpu())
            prints.append(marks)
            if progress is not None:
                progress(sum(map(len, labels)))
    out = Outputs.joined(outs)
    return out if logits is None else replace(out, logits=logits), torch.cat(labels), torch.cat(prints)


def as_inputs(net: Classifier, images: Any) -> Any:
    """Features as inputs, if the network is a head on such features; anything else as it is."""
    source = net.record.get("features")
    if source is None or not isinstance(images, Features):
        return images
    if images.network != source["network"]:
        raise InputError(
            f"features must be of the network that the head was trained behind; {images.name!r} was extracted from "
            "another, or from this one before its weights changed: extract them again"
        )
    return images.as_inputs()


def check_features(detector: "Detector", features: Features) -> None:
    """Raise if the method does not take features, or these are of another network."""
    if not detector.takes_features:
        raise no_features(detector)
    if features.network != checksum(detector.net):
        raise InputError(
            f"features must be those of the detector's network; {features.name!r} was extracted from another, or "
            "from this one before its weights or anchors changed: extract them again"
        )


def no_features(detector: "Detector") -> InputError:
    """The error of a method that reads more of the network than logits and last features."""
    return InputError(
        f"{type(detector).__name__} reads more of the network than logits and last features; pass the images themselves"
    )


def _of_images(
    detector: "Detector", images: Any, preprocess: Preprocess, size: int, held_out: bool, label: str | None
) -> Iterator[_Part]:
    for x, y in batches(images, preprocess, size=size, nan=not held_out, label=label):
        bad = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        if not all_finite(x):
            bad, x = ~x.isfinite().flatten(1).all(dim=1), x.nan_to_num(0.0, 0.0, 0.0)
        out = detector.outputs(detector.as_input(x))
        yield out, bad, y, fingerprints(x) if held_out else torch.empty(0, 16, dtype=torch.uint8)


def _of_features(
    detector: "Detector", features: Features, preprocess: Preprocess, size: int, *_: Any
) -> Iterator[_Part]:
    check_features(detector, features)
    if features.preprocess != preprocess:
        raise InputError(
            f"features must be of images preprocessed as the detector's are, by {preprocess}; {features.name!r} "
            f"has {features.preprocess}"
        )
    done, labels = 0, features.labels
    for out in detector.of_extracted(features, max(size, 1024)):
        rows = slice(done, done + len(out.score))
        done = rows.stop
        bad = torch.zeros(len(out.score), dtype=torch.bool)
        yield out, bad, None if labels is None else labels[rows], features.prints[rows]


def _of_vectors(
    detector: "Detector", features: Features, _preprocess: Preprocess, size: int, *_: Any
) -> Iterator[_Part]:
    for part, prints in features.batches(size, detector.net.mean.device):
        bad = torch.zeros(len(prints), dtype=torch.bool)
        yield detector.outputs(detector.as_input(part.features)), bad, part.labels, prints
