"""Decoding of untrusted image files, within limits that are checked before a pixel is decoded."""

import io
import math
import os
import re
from collections.abc import Callable
from typing import BinaryIO, cast

from PIL import Image, UnidentifiedImageError

from kedge.errors import InputError
from kedge.files import regular_file

MAX_FILE = 2**28  # bytes; an uncompressed image at Pillow's limit of pixels has as many
MAX_SCANS = 100  # of a JPEG: each passes over all of its pixels, and encoders write about ten
PIECES = 10_000  # reads that any file may take; beyond it one for every PIECE bytes
PIECE = 256
PROGRAMS = ("EPS",)  # Pillow gives these to a program of their own, Ghostscript

# A marker of a JPEG between or after its scans; inside a scan, \xff is followed by 0 or by a restart marker.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_WINDOW = 2**16  # bytes
_TILE = (322, 323)  # the tags of a TIFF with the width and the height of its tiles


class Pieces:
    """A file that is read as Pillow requests it, with an error when that takes far too many pieces.

    Pillow walks over the blocks of a file in Python, and a block can be a few bytes: a denial of service.
    """

    def __init__(self, file: bytes | BinaryIO) -> None:
        self._file = io.BytesIO(file) if isinstance(file, bytes) else file
        self.seek, self.tell, self.readline = self._file.seek, self._file.tell, self._file.readline
        size = self.seek(0, os.SEEK_END)
        self.seek(0)
        if size > MAX_FILE:
            raise InputError(f"it has more than {MAX_FILE:,} bytes")
        self._left = PIECES + size // PIECE

    def read(self, size: int = -1, /) -> bytes:
        """Read up to ``size`` bytes."""
        self._left -= 1
        if self._left < 0:
            raise InputError("it is made of too many pieces")
        return self._file.read(size)


def open_image(
    path: str | os.PathLike[str] | BinaryIO,
    *,
    name: str | None = None,
    formats: tuple[str, ...] | None = None,
    max_pixels: int | None = None,
    before: Callable[[Image.Image], None] | None = None,
) -> Image.Image:
    """Decode an image file, with an error that names the file.

    Its size, format, number of pixels, tile size, blocks and scans are checked before it is decoded; of a file in
    another format only the header is read. Formats that Pillow passes to other programs are refused.

    Args:
        path: The path of a regular file, or an open file.
        name: Name of the file in errors.
        formats: Pillow's names of the accepted formats; by default all that it decodes itself.
        max_pixels: By default Pillow's own limit, ``Image.MAX_IMAGE_PIXELS``, which always holds.
        before: Called with the image before its pixels are decoded; an error that it raises refuses the image.

    Example:
        >>> open_image("no such file.png")
        Traceback (most recent call last):
        kedge.errors.InputError: no such file.png cannot be read as an image: No such file or directory
    """
    if isinstance(path, (str, os.PathLike)):
        with regular_file(path, "read as an image").open("rb") as file:
            return open_image(file, name=name or str(path), formats=formats, max_pixels=max_pixels, before=before)
    try:
        with Image.open(cast(BinaryIO, Pieces(path)), formats=formats) as image:
            _check(image, path, max_pixels)
            if before is not None:
                before(image)
            image.load()
            return image.copy()
    except Exception as error:  # Pillow's decoders raise whatever a damaged file makes them trip over
        reason = getattr(error, "strerror", None)
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image" if formats is None else f"it is none of {', '.join(formats)}"
        raise InputError(f"{name or path} cannot be read as an image: {reason or error}") from error


def _check(image: Image.Image, file: BinaryIO, max_pixels: int | None) -> None:
    """Raise if decoding the image would take far more time or memory than its number of pixels suggests."""
    limit = min((n for n in (max_pixels, Image.MAX_IMAGE_PIXELS) if n is not None), default=math.inf)
    if image.width * image.height > limit:  # Pillow itself only warns
        size = f"{image.width} x {image.height}"
        raise InputError(f"it must have at most {limit:,} pixels; got {size}")
    if image.format in PROGRAMS:
        raise InputError(f"{image.format} files are programs, which are not run")
    if image.format in ("JPEG", "MPO") and scans(file) > MAX_SCANS:
        raise InputError(f"it has more than {MAX_SCANS} scans")
    if image.format == "TIFF":
        tile = [image.tag_v2.get(tag) for tag in _TILE]  # type: ignore[attr-defined]
        sides = [side for side in tile if isinstance(side, int)]
        if len(sides) == 2 and math.prod(sides) > limit:
            raise InputError(f"its tiles of {sides[0]} x {sides[1]} pixels are larger than {limit:,} pixels")


def scans(file: bytes | BinaryIO) -> int:
    """The number of scans of a JPEG, counted up to `MAX_SCANS` + 1; a window of the file is read at a time."""
    stream = io.BytesIO(file) if isinstance(file, bytes) else file
    start, window, at, count = 0, b"", 2, 0  # the window's position, and where the search goes on
    while count <= MAX_SCANS:
        marker = _MARKER.search(window, at - start)
        if marker is None or len(window) < marker.end() + 2:  # its length is not in the window
            at = max(at, start + len(window) - 1) if marker is None else start + marker.start()
            stream.seek(at)
            start, window = at, stream.read(_WINDOW)
            if len(window) < 4:
                break
            continue
        kind, at = window[marker.end() - 1], start + marker.end()
        if kind == 0xD9:  # the end; what follows is not part of the image
            break
        if kind not in (0x01, 0xD8):  # all others have a length
            at += max(2, int.from_bytes(window[at - start : at - start + 2], "big"))
        count += kind == 0xDA
    return count
