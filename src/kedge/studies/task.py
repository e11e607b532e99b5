"""A task of a study on features: a classifier, and what `kedge.extract` gives for its images.

A column of a study's table is a task and one of its groups of OOD sets, near or far.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

from kedge.data import Features
from kedge.models.classifier import Classifier, checksum

GROUPS = ("near", "far")


@dataclass(frozen=True)
class Task:
    """A classifier for one seed, with the features of its images; OOD sets in two groups.

    Args:
        name: Name of the task.
        seed: Of the split and of what is trained.
        network: A network that ends in a linear layer.
        train: To fit on.
        held_out: To calibrate on.
        test: Labelled test images of the known classes.
        near: Sets of other classes of the same kind of images.
        far: Sets of other kinds of images.
        shifted: The test images in other conditions, labelled.
        augmented: An augmented view of each training image, in the same order.
    """

    name: str
    seed: int
    network: Classifier
    train: Features
    held_out: Features
    test: Features
    near: tuple[Features, ...]
    far: tuple[Features, ...]
    shifted: tuple[Features, ...] = ()
    augmented: Features | None = None

    @property
    def tested(self) -> dict[str, Features]:
        """All sets that are scored, by name, the in-distribution set first."""
        return {each.name: each for each in (self.test, *self.near, *self.far, *self.shifted)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Names of the OOD sets by group."""
        return {group: tuple(each.name for each in getattr(self, group)) for group in GROUPS}

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What a result must have been made of to count for this task, as plain data."""
        parts = {"fitted": self.train, "held out": self.held_out, **self.tested}
        digests = {name: hashlib.sha256(part.prints.numpy().tobytes()).hexdigest()[:16] for name, part in parts.items()}
        return {"task": self.name, "seed": self.seed, "network": checksum(self.network), "images": digests}
