"""Parts of a labelled set by class: those wanted, or the two halves of which one is unknown to a network."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from kedge.data.features import Features
from kedge.data.imageset import ImageSet
from kedge.data.streamed import StreamedSet
from kedge.errors import InputError

S = TypeVar("S", ImageSet, StreamedSet, Features)


def of_classes(images: S, wanted: Sequence[int], *, name: str | None = None) -> S:
    """The images of some classes, renumbered from 0 in the order given."""
    labels = images.labels
    if labels is None:
        raise InputError(f"images must have labels to be chosen by; {images.name!r} has none")
    renumber = torch.full((max([*wanted, int(labels.max())]) + 2,), -1)  # the last one is for images without a label
    renumber[list(wanted)] = torch.arange(len(wanted))
    new = renumber[labels]
    kept = images.subset(new >= 0, name=name)
    classes = tuple(images.classes[c] for c in wanted) if images.classes else ()
    return replace(kept, labels=new[new >= 0], classes=classes)


def class_split(images: S) -> tuple[S, S]:
    """In-distribution and near out-of-distribution images out of one labelled set, by class.

    In-distribution are the classes at even positions of the sorted names, renumbered from 0; near OOD, and without
    labels, those at odd positions. A network that is trained on the former has never seen a class of the latter, though
    their images were taken and prepared alike.

    Args:
        images: Labelled images with names of the classes, or `Features` of such images.

    Example:
        >>> pets = ImageSet(torch.zeros(6, 3, 8, 8, dtype=torch.uint8), torch.arange(6) % 3)
        >>> known, near = class_split(replace(pets, classes=("cat", "pug", "ant")))
        >>> known.classes, known.labels, near.labels
        (('ant', 'pug'), tensor([1, 0, 1, 0]), None)
    """
    if len(images.classes) < 3:
        raise InputError(
            f"images must have the names of at least three classes, so that two are in-distribution; "
            f"{images.name!r} has {len(images.classes)}"
        )
    order = sorted(range(len(images.classes)), key=images.classes.__getitem__)
    known = of_classes(images, order[::2])
    near = of_classes(images, order[1::2], name=f"{images.name}, other classes")
    return known, replace(near, labels=None, classes=())
