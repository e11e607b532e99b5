"""Images: sets of them, and the way from whatever a user has to what a network takes."""

from kedge.data import sources
from kedge.data.batches import batches, gather, shape_of_inputs
from kedge.data.decoding import open_image
from kedge.data.imageset import ImageSet
from kedge.data.preprocess import Preprocess
from kedge.data.sources import StreamedSet

__all__ = [
    "ImageSet",
    "Preprocess",
    "StreamedSet",
    "batches",
    "gather",
    "open_image",
    "shape_of_inputs",
    "sources",
]
