"""Copies of small data sets on the Hugging Face hub, through its own library."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from kedge.data.sources.entry import Arrays, Progress
from kedge.errors import FileFormatError, NotReadyError


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its name there, and the columns that hold image and label."""

    repository: str
    image: str = "image"
    label: str = "label"
    configuration: str | None = None
    grey: bool = False

    @property
    def title(self) -> str:
        """The copy in words."""
        return f"Hugging Face data set {self.repository}"


def fetch_hub(copy: Hub, progress: Progress | None = None) -> tuple[Arrays, tuple[str, ...]]:
    """Fetch the train and test parts, and the names of the classes; the library keeps its own cache.

    Example:
        >>> fetch_hub(Hub("someone/something"))  # doctest: +SKIP
        Traceback (most recent call last):
        kedge.errors.NotReadyError: Hugging Face data set someone/something: pip install 'kedge[hub]' to try it
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise NotReadyError(f"{copy.title}: pip install 'kedge[hub]' to try it") from error
    arrays: Arrays = {}
    names: tuple[str, ...] = ()
    for split in ("train", "test"):
        try:
            part = datasets.load_dataset(copy.repository, copy.configuration, split=split)
            total = len(part)
            features = part.features[copy.label]
        except Exception as error:  # the library's own errors are many, and change with its versions
            raise NotReadyError(f"{copy.title}: {_first_line(error)}") from error
        names = tuple(getattr(features, "names", None) or ())
        images, labels = [], []
        for number, row in enumerate(part, start=1):
            images.append(_pixels(row, copy))
            labels.append(int(row[copy.label]))
            if progress is not None and number % 500 == 0:
                progress(f"converting {copy.title}", number, total)
        if not images or len({image.shape for image in images}) != 1:
            raise FileFormatError(f"{copy.title} must hold images of one size in {split}; it does not")
        arrays[f"{split}_x"] = np.stack(images)
        arrays[f"{split}_y"] = np.array(labels, np.int64)
    return arrays, names


def _pixels(row: Mapping[str, object], copy: Hub) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    image = row.get(copy.image)
    if not isinstance(image, Image.Image):
        raise FileFormatError(f"{copy.title} must hold images under {copy.image!r}; it has {', '.join(row)}")
    return np.array(image.convert("L" if copy.grey else "RGB"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
