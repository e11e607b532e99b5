"""Anchors drawn from a training set, and the choice of each image's own anchors among them."""

import bisect
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.checks import one_of
from kedge.data import Preprocess, batches
from kedge.data.batches import image_and_label
from kedge.errors import InputError
from kedge.seeds import mix_seed, seeded

SAMPLINGS = ("random", "balanced", "means")


def choose(source: Any, preprocess: Preprocess, k: int, how: str, seed: int, *, at_least: int | None = None) -> Tensor:
    """Draw k images of a training set: ``"random"`` ones, ``"balanced"`` over its classes, or ``"means"`` of classes.

    Args:
        source: The training set, in any form that `kedge.data.batches` takes.
        preprocess: What the network takes.
        k: How many.
        how: ``"means"`` are means over the images of one class each, or over parts of them if there are fewer classes.
        seed: Seed of the draw.
        at_least: Accept as few as this from a smaller set; by default that is an error.

    Example:
        >>> from kedge.data import ImageSet
        >>> digits = ImageSet(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.arange(20) % 2)
        >>> choose(digits, Preprocess((1, 8, 8)), 4, "balanced", seed=0).shape
        torch.Size([4, 1, 8, 8])
    """
    one_of("anchors", how, SAMPLINGS)
    generator = torch.Generator().manual_seed(seed)
    with seeded(seed):  # a shuffled loader, or a random transform of the data set, draws from torch's own generator
        if how == "means":
            chosen = _means(source, preprocess, k, generator)
        elif (order := _order(source, how, generator)) is None:
            chosen = _reservoir(source, preprocess, k, how, generator)
        else:
            chosen = torch.stack([preprocess(image_and_label(source[int(i)])[0]) for i in order[:k]])
    needed = k if at_least is None else at_least
    if len(chosen) < needed:
        raise InputError(
            f"the training set must have at least {needed} images to draw anchors from; it has {len(chosen)}"
        )
    return chosen


def choose_per_image(x: Tensor, anchors: int, k: int, seed: int) -> Tensor:
    """K of the anchors for each image, chosen by a hash of its pixels so that no score depends on the batch: (k, B)."""
    pixels = x if x.dtype == torch.uint8 else (x * 255).round().to(torch.int32)  # 8-bit images hash alike as floats
    pixels = pixels.to(torch.int32).cpu().flatten(1)
    chosen = []
    for row in pixels:
        digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(mix_seed(seed, int.from_bytes(digest, "little")))
        chosen.append(torch.randperm(anchors, generator=generator)[:k])
    return torch.stack(chosen, dim=1)


def _means(source: Any, preprocess: Preprocess, k: int, generator: torch.Generator) -> Tensor:
    """The means of randomly drawn classes; a class that is drawn several times is divided between its means."""
    if isinstance(source, Iterator):
        raise InputError('anchors="means" reads the training set twice, which an iterator cannot be; pass a data set')
    labels = _known_labels(source)
    if labels is None:
        read = [y for _, y in batches(source, preprocess) if y is not None]
        labels = torch.cat(read) if read else torch.empty(0, dtype=torch.long)
    labels = labels[labels >= 0]
    if not len(labels):
        raise InputError('anchors="means" needs labels, and the training set has none; use "random"')
    classes = labels.unique()
    drawn = classes[torch.randperm(len(classes), generator=generator)].tolist()
    places: dict[int, list[int]] = {}
    for place in range(k):
        places.setdefault(drawn[place % len(drawn)], []).append(place)
    sums, counts = torch.zeros(k, *preprocess.shape, dtype=torch.float64), torch.zeros(k, dtype=torch.long)
    turns = {key: itertools.cycle(parts) for key, parts in places.items()}
    for x, y in batches(source, preprocess):
        taken = [] if y is None else [(row, next(turns[key])) for row, key in enumerate(y.tolist()) if key in turns]
        if taken:
            rows, into = map(torch.tensor, zip(*taken, strict=True))
            sums.index_add_(0, into, x[rows].double() / (255 if x.dtype == torch.uint8 else 1))
            counts += torch.bincount(into, minlength=k)
    if bool((counts == 0).any()):
        raise InputError(
            f"the training set must have at least {max(map(len, places.values()))} images of each class, to make {k} "
            f"means of {len(drawn)} classes; the smallest class has {int(labels.unique(return_counts=True)[1].min())}"
        )
    return (sums / counts.view(-1, *(1,) * len(preprocess.shape))).float()


def _reservoir(source: Any, preprocess: Preprocess, k: int, how: str, generator: torch.Generator) -> Tensor:
    """One pass over a stream: every image gets a random rank, and the best are kept (of each class if balanced)."""
    kept: dict[int, list[tuple[float, Tensor]]] = {}
    for x, y in batches(source, preprocess):
        if how == "balanced" and y is None:
            raise InputError('anchors="balanced" needs labels, and the training set has none; use "random"')
        ranks = torch.rand(len(x), generator=generator, dtype=torch.float64).tolist()
        keys = y.tolist() if how == "balanced" and y is not None else [0] * len(x)
        for rank, key, image in zip(ranks, keys, x, strict=True):
            bucket = kept.setdefault(key, [])
            if len(bucket) < k or rank < bucket[-1][0]:
                bisect.insort(bucket, (rank, image.clone()), key=lambda pair: pair[0])
                del bucket[k:]
    columns = itertools.zip_longest(*sorted(kept.values(), key=lambda bucket: bucket[0][0]))
    images = [pair[1] for column in columns for pair in column if pair is not None]
    return torch.stack(images[:k])


def _order(source: Any, how: str, generator: torch.Generator) -> Tensor | None:
    """Random positions in a set, of one class after the other if balanced; None for streams and unlisted labels."""
    labels = _known_labels(source) if how == "balanced" else None
    if not is_sized(source) or (how == "balanced" and labels is None):
        return None
    order = torch.randperm(len(source), generator=generator)
    if labels is None:
        return order
    seen: Counter[int] = Counter()
    turns = []
    for label in labels[order].tolist():
        turns.append(seen[label])
        seen[label] += 1
    return order[torch.argsort(torch.tensor(turns), stable=True)]


def _known_labels(source: Any) -> Tensor | None:
    """The class of each image, if a data set lists them as ``labels`` or ``targets``."""
    for name in ("labels", "targets") if is_sized(source) else ():
        labels = getattr(source, name, None)
        try:
            numbers = torch.as_tensor(labels if isinstance(labels, (Tensor, np.ndarray, Sequence)) else ())
        except (TypeError, ValueError, RuntimeError):  # strings, rows of different lengths
            continue
        if numbers.shape == (len(source),) and not (numbers.is_floating_point() or numbers.is_complex()):
            return numbers.long()
    return None


def is_sized(source: Any) -> bool:
    """Whether it has items by number."""
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (str, Mapping))
