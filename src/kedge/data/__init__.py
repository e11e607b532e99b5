"""Image sets in memory and on disk, preprocessing, and public data sets by name."""

from typing import TYPE_CHECKING

import lazy_loader

from kedge.data.batches import batches, choose, gather, shape_of_inputs
from kedge.data.decoding import open_image
from kedge.data.imageset import ImageSet
from kedge.data.preprocess import Preprocess
from kedge.data.streamed import StreamedSet

if TYPE_CHECKING:
    from kedge.data import sources
    from kedge.data.sources import dataset_names, download_dataset, load_dataset

# The readers of public data sets are imported when they are first used.
_LAZY = ["dataset_names", "download_dataset", "load_dataset"]
__getattr__, _, _ = lazy_loader.attach(__name__, ["sources"], {"sources": _LAZY})

__all__ = [
    "ImageSet",
    "Preprocess",
    "StreamedSet",
    "batches",
    "choose",
    "dataset_names",
    "download_dataset",
    "gather",
    "load_dataset",
    "open_image",
    "shape_of_inputs",
    "sources",
]
