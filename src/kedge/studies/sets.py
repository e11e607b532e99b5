"""The sets of a suite by name, and small generated ones for the smoke scale."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kedge.data import ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.data.batches import gather_on_disk
from kedge.data.streamed import SMALL_SIDE
from kedge.errors import NotReadyError
from kedge.seeds import mix_seed

# Files beside the public sets in the data folder, under names of their own and not of the sets that they replace.
FILES = {
    "tiny-imagenet (OpenOOD)": "tin_openood_cifar10.npz",
    "street characters": "streetchars_test_32.npz",
    "traffic signs": "gtsrb_test_32.npz",
    "scenes": "intel_scenes_test_32.npz",
    "textures (10 of 47)": "dtd_part_32.npz",
    "MNIST (RGB)": "mnist_test_32rgb.npz",
}

# Those with a public source, of which they are made where the file is not there, with the same pixels: by split of the
# file, the public set's name and split. Images are stretched to 32 x 32 by Pillow's bicubic filter; grey becomes RGB.
PUBLIC: dict[str, dict[str | None, tuple[str, str]]] = {
    "tiny-imagenet (OpenOOD)": {None: ("openood", "cifar10/test_tin"), "val_x": ("openood", "cifar10/val_tin")},
    "traffic signs": {None: ("gtsrb", "test")},
    "MNIST (RGB)": {None: ("mnist", "test")},
}
PRIVATE = frozenset(FILES) - frozenset(PUBLIC)  # that only exist as reduced copies which a reader cannot get
NEAR_CIFAR10 = "tiny-imagenet (OpenOOD)"
STRETCHED = Preprocess((3, 32, 32), fit="stretch")

# The number of images of each set at its source, by split where it is not the default one.
IMAGES = {
    "cifar10": 10_000, "cifar10 train": 50_000, "cifar100": 10_000, "cifar100 train": 50_000,
    "imagenet": 50_000, "imagenet train": 1_281_167, "isun": 8_925, "lsun-crop": 10_000, "lsun-resize": 10_000,
    "lsun-test": 10_000, "tiny-imagenet-crop": 10_000, "tiny-imagenet-resize": 10_000, "places365": 36_500,
    "textures": 5_640, "svhn": 26_032,
    "tiny-imagenet (OpenOOD)": 7_793, "street characters": 6_220, "traffic signs": 12_630, "scenes": 3_000,
    "textures (10 of 47)": 1_200, "MNIST (RGB)": 10_000,
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The sets that could be loaded, and for the rest how to get them."""

    sets: tuple[ImageSet, ...]
    missing: dict[str, str]


def find(names: Sequence[str], *, side: int, data_dir: str | Path | None, split: str | None = None) -> Found:
    """Load sets by name at the size of a network's input."""
    sets, missing = [], {}
    for name in names:
        try:
            sets.append(load_set(name, side=side, data_dir=data_dir, split=split))
        except NotReadyError as error:
            missing[name] = str(error)
    return Found(tuple(sets), missing)


def far_from_cifar10(data_dir: str | Path | None) -> tuple[ImageSet, ...]:
    """The far OOD sets of CIFAR-10: those with a public source, and the private ones that are here."""
    found = find([name for name in FILES if name != NEAR_CIFAR10], side=32, data_dir=data_dir)
    if public := [hint for name, hint in found.missing.items() if name not in PRIVATE]:
        raise NotReadyError("; ".join(public))
    return found.sets


def load_set(
    name: str, *, side: int, data_dir: str | Path | None, split: str | None = None, folder: Path | None = None
) -> ImageSet:
    """One set at the size of a network's input; see `find`. With a folder large images are in a file there."""
    images = read_set(name, data_dir=data_dir, split=split)
    if isinstance(images, ImageSet) and images.images.shape[2:] == (side, side):
        return images
    return small_or_on_disk(images, Preprocess((3, side, side)), folder)


def read_set(name: str, *, data_dir: str | Path | None, split: str | None = None) -> ImageSet | StreamedSet:
    """One set as it is."""
    if name not in FILES:
        return sources.load_dataset(name, split, data_dir=data_dir)
    path = sources.data_folder(data_dir) / FILES[name]
    if path.is_file():
        return ImageSet(sources.npz(str(path), split).images, name=name)
    public, part = PUBLIC.get(name, {}).get(split, ("", ""))
    if not public:
        raise NotReadyError(f"{name} is not here: put {path.name} into {path.parent}; it has no public source")
    try:
        images = sources.load_dataset(public, part, data_dir=data_dir)
    except NotReadyError as error:
        raise NotReadyError(
            f"{name} is not here: put {path.name} into {path.parent}, or its source: {error}"
        ) from error
    if isinstance(images, ImageSet):  # grey, or RGB already
        images = replace(images, images=images.images.expand(-1, 3, -1, -1))
    return ImageSet(gather(images, STRETCHED).images, name=name)


def small_or_on_disk(
    images: ImageSet | StreamedSet, preprocess: Preprocess, folder: Path | None, *, name: str | None = None
) -> ImageSet:
    """A set in memory, or memory-mapped from a folder if its images are larger than `SMALL_SIDE`."""
    if folder is None or isinstance(images, ImageSet) or max(preprocess.shape[1:]) <= SMALL_SIDE:
        return gather(images, preprocess, name=name or images.name)
    return gather_on_disk(images, preprocess, folder, name=name or images.name)


def toy_images(n: int, name: str, *, classes: int = 4, side: int = 16, seed: int = 0) -> ImageSet:
    """Noise with a bright band for each class: enough to run a suite, and nothing to learn from."""
    generator = torch.Generator().manual_seed(mix_seed(seed, *name.encode()))
    images = torch.randint(0, 128, (n, 3, side, side), generator=generator)
    labels = torch.arange(n) % classes
    band = side // classes
    for label in range(classes):
        images[labels == label, :, :, label * band : (label + 1) * band] += 120
    return ImageSet(images.to(torch.uint8), labels, name=name)


def toy_ood(n: int, name: str, *, side: int = 16, seed: int = 0) -> ImageSet:
    """Noise without any class, coarser for longer names, so that sets differ."""
    generator = torch.Generator().manual_seed(mix_seed(seed, *name.encode()))
    coarse = torch.rand(n, 3, 2 + len(name) % 5, 2 + len(name) % 5, generator=generator)
    return ImageSet((torch.nn.functional.interpolate(coarse, size=(side, side)) * 255).to(torch.uint8), name=name)
