"""Matching the labels of two sets by the names of their classes, since every image folder counts from 0."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.errors import KedgeWarning

UNKNOWN = -1


def class_names(source: Any, classes: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes of a set or a loader's set, if any; warns of names that are not among ``classes``."""
    names = tuple(map(str, getattr(getattr(source, "dataset", source), "classes", None) or ()))
    unknown = [name for name in names if classes and name not in classes]
    if unknown:
        warnings.warn(
            f"the images have classes that the detector does not know, such as {', '.join(unknown[:3])}, so these "
            f"labels are not used; name the classes as the detector does: {', '.join(classes[:5])}, ...",
            KedgeWarning,
            stacklevel=3,
        )
    return names


def renumbered(labels: Tensor, names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Labels (N,) into ``names`` as labels into ``classes``; -1 for a class that is not among them.

    Labels stay as they are if either has no names.

    Example:
        >>> renumbered(torch.tensor([0, 1, 2]), ("cat", "dog", "yeti"), ("bird", "cat", "dog"))
        tensor([ 1,  2, -1])
    """
    if not names or not classes or tuple(names) == tuple(classes):
        return labels
    places = {name: number for number, name in enumerate(classes)}
    table = torch.tensor([*(places.get(name, UNKNOWN) for name in names), UNKNOWN])
    inside = (labels >= 0) & (labels < len(names))
    return table[torch.where(inside, labels, len(names))]
