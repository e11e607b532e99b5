"""`protect`: a calibrated detector for a classifier that exists already. Nothing is trained."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from kedge import metrics
from kedge.data import ImageSet, StreamedSet, batches, gather
from kedge.detectors import Detector
from kedge.detectors.registry import make, method_of
from kedge.detectors.tuning import tune as choose_options
from kedge.errors import InputError, KedgeWarning
from kedge.models.classifier import evaluating
from kedge.models.named import network

DEFAULT_METHOD = "default"
WITHOUT_LABELS = "knn,gen"  # instead of the default, whose first part learns from each class
HELD_OUT = 0.2  # of the training images, if no others are given
FEWEST = 2  # held-out images: a half of them judges the threshold of the others
FEWEST_LEARNED = 6  # the same for methods that also learn from held-out images, as the default does


def protect(
    net: nn.Module | str,
    train_set: Any,
    held_out: Any = None,
    *,
    method: str = DEFAULT_METHOD,
    alpha: float = 0.05,
    delta: float | None = None,
    tune: Any = None,
    seed: int = 0,
    **options: Any,
) -> Detector:
    """Fit and calibrate a detector on a classifier as it is: one pass over the training images.

    ``print(detector.summary)`` says what was measured and what it cannot promise. ``detector.net.record["held_out"]``
    holds what was measured on held-out images, where half of them set the threshold and the other half was judged:
    ``images``, ``judged``, ``flagged`` (share) and ``accuracy`` (or None).

    Args:
        net: The classifier, best as a `kedge.Classifier` with its normalisation; or a name that `kedge.network` takes,
            whose published weights are then loaded.
        train_set: The images that it was trained on, or others of the same kind.
        held_out: In-distribution images that it was not trained on; by default a fifth of ``train_set`` is split off.
        method: Name of a detector, as in docs/methods.md, or several with commas between, as ``"mds++,gen"``, for their
            `Combined`. By default `Combined` as it is; of training images without labels, KNN and GEN.
        alpha: See `Detector.calibrate`.
        delta: See `Detector.calibrate`.
        tune: How to choose the options that are not given, see `kedge.tune`: ``"classes"``, ``"synthetic"``, or OOD
            images. It takes half of ``held_out``; the threshold is set on the other half.
        seed: Random seed of the splits.
        **options: Options of the detector.

    Example:
        >>> from kedge import Classifier
        >>> images = ImageSet(torch.randint(0, 256, (180, 3, 2, 2), dtype=torch.uint8))
        >>> layers = nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
        >>> net = Classifier(nn.Sequential(*layers), mean=0.5, std=0.3)
        >>> protect(net, *images.split(0.5))(torch.rand(3, 3, 2, 2)).is_ood.shape
        torch.Size([3])
    """
    method_of(method)
    if method == DEFAULT_METHOD and not _has_labels(train_set):
        method = WITHOUT_LABELS
    if isinstance(net, str):
        net = network(net, pretrained=True)
    detector = make(method, net, **options)
    if tune is not None and not isinstance(train_set if held_out is None else held_out, (ImageSet, StreamedSet)):
        raise InputError("held_out must be an ImageSet or a StreamedSet with tune=, which takes half of it")
    if held_out is None:
        if not isinstance(train_set, (ImageSet, StreamedSet)):
            raise InputError("held_out must be given, unless train_set is an ImageSet or a StreamedSet")
        if train_set.checksum in detector.trained_on:
            raise InputError(
                "held_out must be given: the network was trained on all of train_set, so none of its images can be "
                "held out; pass in-distribution images that it was not trained on"
            )
        train_set, held_out = train_set.split(1 - HELD_OUT, seed=seed)
        warnings.warn(
            f"the threshold is set on {len(held_out)} of the training images: if the network was trained on them, more "
            f"than {alpha:.0%} of new images will be flagged; pass held_out with images that it was not trained on",
            KedgeWarning,
            stacklevel=2,
        )
    if tune is not None:
        judged, held_out = held_out.split(0.5, seed=seed)
        detector = choose_options(method, net, train_set, judged, by=tune, seed=seed, **options)
    detector.fit(train_set)
    assert detector.preprocess is not None
    if not isinstance(held_out, (ImageSet, StreamedSet)):
        held_out = gather(held_out, detector.preprocess, name="held-out images")
    least = FEWEST_LEARNED if detector.learns_held_out else FEWEST
    if len(held_out) < least:
        raise InputError(
            f"held_out must have at least {least} images, since half of them judge the threshold of the others; got "
            f"{len(held_out)}"
        )
    held_out = _with_known_labels(detector, held_out)
    first, second = held_out.split(0.5, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KedgeWarning)  # the same warnings follow, about all held-out images
        detection = detector.calibrate(first, alpha=alpha, delta=delta)(second)
    record: dict[str, Any] = {"images": len(held_out), "judged": len(second)}
    record["flagged"] = float(detection.is_ood.double().mean())
    labels = second.labels
    known = None if labels is None else labels >= 0
    right = None if known is None or not bool(known.any()) else metrics.accuracy(detection.label[known], labels[known])
    detector.calibrate(held_out, alpha=alpha, delta=delta)
    detector.net.record["held_out"] = record | {"accuracy": right}
    return detector


def _has_labels(train_set: Any) -> bool:
    """Whether training images have labels, as far as that can be told without reading them."""
    if isinstance(train_set, torch.Tensor | np.ndarray):
        return False
    return not hasattr(train_set, "labels") or train_set.labels is not None


def _with_known_labels(detector: Detector, held_out: Any) -> Any:
    """The held-out images, without labels if those are not the network's classes; settles the detector's classes."""
    assert detector.preprocess is not None
    x, _ = next(batches(held_out, detector.preprocess, size=1))
    with evaluating(detector.net), torch.no_grad():
        outputs = detector.net(detector.as_input(x)).shape[1]
    own = tuple(detector.net.record.get("classes", ()))
    if len(own) == outputs and detector.classes != own:
        detector.classes = own
    elif detector.classes and len(detector.classes) != outputs:
        detector.classes = ()
    if held_out.labels is None or not held_out.classes or set(held_out.classes) <= set(detector.classes):
        return held_out
    warnings.warn(
        f"the network has {outputs} classes, which are not the {len(held_out.classes)} of the held-out images, so that "
        "no accuracy can be given; verdicts do not need it",
        KedgeWarning,
        stacklevel=3,
    )
    return replace(held_out, labels=None, classes=())
