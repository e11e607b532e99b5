"""The catalogue of public data sets; the origin of each checksum is given with it.

A new data set is an entry in one of the modules below and, if its format is new, a reader ``(path, split, name) ->
ImageSet or StreamedSet``.
"""

from kedge.data.sources.entry import Source
from kedge.data.sources.imagenet_sets import IMAGENET_SETS
from kedge.data.sources.photo_sets import PHOTO_SETS
from kedge.data.sources.small_images import SMALL_IMAGES

SOURCES: dict[str, Source] = {source.name: source for source in (*SMALL_IMAGES, *PHOTO_SETS, *IMAGENET_SETS)}
