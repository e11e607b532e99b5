"""Photographs by name: reduced copies in the data folder, or else the official sets of the catalogue."""

from dataclasses import replace
from pathlib import Path

from kedge.data import StreamedSet, sources
from kedge.errors import NotReadyError

OFFICIAL = {  # by the name of the reduced copies
    "pets": "oxford-pets",
    "flowers": "flowers-102",
    "caltech101": "caltech-101",
    "textures": "textures",
    "imagenet-others": "imagenette-320",
}
DOGS = {"imagenette-320": "n02102040"}  # a class that pets show too, which is left out


def photos(name: str, data_dir: Path | None) -> StreamedSet:
    """A set of photographs, with a folder for each class: ``photos/NAME`` of the data folder, or the official set.

    The set's name is that of the catalogue if it is the official one.
    """
    folder = _reduced(name, data_dir)
    if folder.is_dir():
        return sources.folder(folder, name=name)
    official = OFFICIAL.get(name)
    if official is None or not sources.is_here(official, data_dir=data_dir):
        how = f"run `kedge data get {official}`, or " if official else ""
        raise NotReadyError(
            f"the photographs {name} are not here: {how}put them into {folder}, with a folder for each class"
        )
    images = sources.load_dataset(official, data_dir=data_dir)
    if not isinstance(images, StreamedSet):
        raise NotReadyError(f"{official} must hold photographs; its images are {tuple(images.images.shape[1:])}")
    if official in DOGS and images.labels is not None and DOGS[official] in images.classes:
        images = images.subset(images.labels != images.classes.index(DOGS[official]))
    return replace(images, name=official)


def used_photographs(data_dir: Path | None) -> dict[str, str]:
    """What `photos` reads for each name that is here, in words."""
    words = {}
    for name, official in OFFICIAL.items():
        if _reduced(name, data_dir).is_dir():
            words[name] = f"reduced copies, photos/{name}"
        elif sources.is_here(official, data_dir=data_dir):
            words[name] = f"the official set, {official}"
    return words


def photographs_in_words(data_dir: Path | None) -> str:
    """The same as a line below tables; empty without photographs."""
    used = used_photographs(data_dir)
    return f"Photographs: {'; '.join(f'{name}: {what}' for name, what in used.items())}." if used else ""


def _reduced(name: str, data_dir: Path | None) -> Path:
    return sources.data_folder(data_dir) / "photos" / name
