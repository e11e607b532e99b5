"""The sets of a suite by name: loaded where they are, named with how to get them where they are not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kedge.data import ImageSet, Preprocess, gather, sources
from kedge.errors import NotReadyError
from kedge.seeds import mix_seed

# Files beside the public sets in the data folder, under names of their own and not of what they stand in for.
FILES = {
    "tiny-imagenet (OpenOOD)": "tin_openood_cifar10.npz",
    "street characters": "streetchars_test_32.npz",
    "traffic signs": "gtsrb_test_32.npz",
    "scenes": "intel_scenes_test_32.npz",
    "textures (10 of 47)": "dtd_part_32.npz",
    "MNIST (RGB)": "mnist_test_32rgb.npz",
}


@dataclass(frozen=True)
class Found:
    """What could be loaded, and for the rest how to get it."""

    sets: tuple[ImageSet, ...]
    missing: dict[str, str]


def find(names: Sequence[str], *, side: int, data_dir: str | Path | None, split: str | None = None) -> Found:
    """Load sets by name at the size of a network's input.

    Args:
        names: Of public sets (see ``kedge data list``), or of `FILES`.
        side: Of the input.
        data_dir: The folder of all sets; by default the variable KEDGE_DATA, or the user's cache directory.
        split: By default the one that they are tested on; of `FILES` a key such as ``"val_x"``.

    Example:
        >>> find(["svhn"], side=32, data_dir="/nowhere").missing["svhn"][:17]
        'svhn (test) is no'
    """
    sets, missing = [], {}
    for name in names:
        try:
            sets.append(load(name, side=side, data_dir=data_dir, split=split))
        except NotReadyError as error:
            missing[name] = str(error)
    return Found(tuple(sets), missing)


def load(name: str, *, side: int, data_dir: str | Path | None, split: str | None = None) -> ImageSet:
    """One set in memory, its images at the size of a network's input; see `find`."""
    if name in FILES:
        path = sources.data_folder(data_dir) / FILES[name]
        if not path.is_file():
            raise NotReadyError(f"{name} is not here: put {path.name} into {path.parent}")
        return _renamed(sources.npz(str(path), split), name)
    images = sources.load_dataset(name, split, data_dir=data_dir)
    if isinstance(images, ImageSet) and images.images.shape[2:] == (side, side):
        return images
    return gather(images, Preprocess((3, side, side)), name=images.name)


def made(n: int, name: str, *, classes: int = 4, side: int = 16, seed: int = 0) -> ImageSet:
    """Images that tell a few classes apart by where they are bright: to see that a suite runs, and for nothing else.

    Example:
        >>> made(8, "synthetic_outliers").images.shape
        torch.Size([8, 3, 16, 16])
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, *name.encode()))
    images = torch.randint(0, 128, (n, 3, side, side), generator=generator)
    labels = torch.arange(n) % classes
    band = side // classes
    for label in range(classes):
        images[labels == label, :, :, label * band : (label + 1) * band] += 120
    return ImageSet(images.to(torch.uint8), labels, name=name)


def made_ood(n: int, name: str, *, side: int = 16, seed: int = 0) -> ImageSet:
    """Images without any class: grey noise, coarser for longer names, so that sets differ.

    Example:
        >>> made_ood(2, "made noise").labels is None
        True
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, *name.encode()))
    coarse = torch.rand(n, 3, 2 + len(name) % 5, 2 + len(name) % 5, generator=generator)
    return ImageSet((torch.nn.functional.interpolate(coarse, size=(side, side)) * 255).to(torch.uint8), name=name)


def _renamed(images: ImageSet, name: str) -> ImageSet:
    return ImageSet(images.images, name=name)
