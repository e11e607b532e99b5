"""Image sets in memory and on disk, preprocessing, and public data sets by name."""

import importlib
from typing import TYPE_CHECKING, Any

from kedge.data.batches import batches, gather, shape_of_inputs
from kedge.data.classes import class_split
from kedge.data.decoding import open_image
from kedge.data.features import Features
from kedge.data.imageset import ImageSet
from kedge.data.preprocess import Preprocess
from kedge.data.streamed import StreamedSet

if TYPE_CHECKING:
    from kedge.data import sources
    from kedge.data.sources import dataset_names, download_dataset, load_dataset
else:

    def __getattr__(name: str) -> Any:
        """Import the readers of public data sets when they are first used."""
        if name not in ("dataset_names", "download_dataset", "load_dataset", "sources"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        sources = importlib.import_module(f"{__name__}.sources")
        return sources if name == "sources" else getattr(sources, name)


__all__ = [
    "Features", "ImageSet", "Preprocess", "StreamedSet", "batches", "class_split", "dataset_names", "download_dataset",
    "gather", "load_dataset", "open_image", "shape_of_inputs", "sources",
]  # fmt: skip
