"""Labels of one set as the classes of another: numbers follow names, since every folder counts from 0."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.errors import KedgeWarning

UNKNOWN = -1


def names_beside(source: Any, known: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes of a set, or of a loader's set, if any; those that are not ``known`` are told.

    Example:
        >>> names_beside(torch.zeros(3), ("cat", "dog"))
        ()
    """
    names = tuple(map(str, getattr(getattr(source, "dataset", source), "classes", None) or ()))
    strange = [name for name in names if known and name not in known]
    if strange:
        warnings.warn(
            f"the images have classes that the detector does not know, such as {', '.join(strange[:3])}, so these "
            f"labels are not used; name the classes as the detector does: {', '.join(known[:5])}, ...",
            KedgeWarning,
            stacklevel=3,
        )
    return names


def renumbered(labels: Tensor, names: Sequence[str], known: Sequence[str]) -> Tensor:
    """Labels (N,) into ``names`` as labels into ``known``; -1 for a class that is not among them.

    Where either has no names, numbers are all there is, and they stay.

    Example:
        >>> renumbered(torch.tensor([0, 1, 2]), ("cat", "dog", "yeti"), ("bird", "cat", "dog"))
        tensor([ 1,  2, -1])
    """
    if not names or not known or tuple(names) == tuple(known):
        return labels
    places = {name: number for number, name in enumerate(known)}
    table = torch.tensor([*(places.get(name, UNKNOWN) for name in names), UNKNOWN])
    inside = (labels >= 0) & (labels < len(names))
    return table[torch.where(inside, labels, len(names))]
