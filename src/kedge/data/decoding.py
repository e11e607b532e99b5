"""Decoding of untrusted image files, within limits that are checked before a pixel is decoded."""

import io
import os
import re
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from kedge.errors import InputError
from kedge.files import regular_file

MAX_FILE = 2**31 - 1  # bytes; more than any image below Pillow's limit of pixels needs
MAX_SCANS = 100  # of a JPEG: each passes over all of its pixels, and encoders write about ten
PIECES = 10_000  # reads that any file may take; beyond it one for every PIECE bytes
PIECE = 256
PROGRAMS = ("EPS",)  # Pillow gives these to a program of their own, Ghostscript

# A marker of a JPEG between or after its scans; inside a scan, \xff is followed by 0 or by a restart marker.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_TILE = (322, 323)  # the tags of a TIFF with the width and the height of its tiles


class Pieces(io.BytesIO):
    """A file in memory that raises an error when it is read in far too many pieces.

    Pillow walks over the blocks of a file in Python, and a block can be a few bytes: a denial of service.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = PIECES + len(data) // PIECE

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes."""
        self._left -= 1
        if self._left < 0:
            raise InputError("it is made of too many pieces")
        return super().read(size)


def open_image(
    path: str | os.PathLike[str] | BinaryIO,
    *,
    name: str | None = None,
    formats: tuple[str, ...] | None = None,
    max_pixels: int | None = None,
) -> Image.Image:
    """Decode an image file, with an error that names the file.

    Its number of pixels, tile size, blocks and scans are checked before it is decoded. Formats that Pillow passes to
    other programs are refused.

    Args:
        path: A path, or an open file.
        name: Name of the file in errors.
        formats: Pillow's names of the accepted formats; by default all that it decodes itself.
        max_pixels: By default Pillow's own limit, ``Image.MAX_IMAGE_PIXELS``, which always holds.

    Example:
        >>> open_image("no such file.png")
        Traceback (most recent call last):
        kedge.errors.InputError: no such file.png cannot be read as an image: No such file or directory
    """
    if isinstance(path, (str, os.PathLike)):
        path = regular_file(path, "read as an image")
    try:
        data = _content(path)
        with Image.open(Pieces(data), formats=formats) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                size = f"{image.width} x {image.height}"
                raise _TooLargeError(f"{name or path} must have at most {max_pixels:,} pixels; got {size}")
            _check(image, data, max_pixels)
            image.load()
            return image.copy()
    except _TooLargeError as error:
        raise InputError(str(error)) from None
    except Exception as error:  # Pillow's decoders raise whatever a damaged file makes them trip over
        reason = getattr(error, "strerror", None)
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image" if formats is None else f"it is none of {', '.join(formats)}"
        raise InputError(f"{name or path} cannot be read as an image: {reason or error}") from error


class _TooLargeError(InputError):
    """An image has more pixels than the caller accepts."""


def _content(path: str | os.PathLike[str] | BinaryIO) -> bytes:
    if isinstance(path, (str, os.PathLike)):
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
    else:
        data = path.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise InputError(f"it has more than {MAX_FILE:,} bytes")
    return data


def _check(image: Image.Image, data: bytes, max_pixels: int | None) -> None:
    """Raise if decoding the image would take far more time or memory than its number of pixels suggests."""
    limit = min((n for n in (max_pixels, Image.MAX_IMAGE_PIXELS) if n is not None), default=None)
    if limit is not None and image.width * image.height > limit:  # Pillow itself only warns
        raise InputError(f"{image.width} x {image.height} pixels are more than {limit:,}: a decompression bomb?")
    if image.format in PROGRAMS:
        raise InputError(f"{image.format} files are programs, which are not run")
    if image.format in ("JPEG", "MPO") and scans(data) > MAX_SCANS:
        raise InputError(f"it has more than {MAX_SCANS} scans")
    if image.format == "TIFF":
        tile = [image.tag_v2.get(tag) for tag in _TILE]  # type: ignore[attr-defined]
        sides = [side for side in tile if isinstance(side, int)]
        if limit is not None and len(sides) == 2 and sides[0] * sides[1] > limit:
            raise InputError(f"its tiles of {sides[0]} x {sides[1]} pixels are larger than {limit:,} pixels")


def scans(data: bytes) -> int:
    """The number of scans of a JPEG, counted up to `MAX_SCANS` + 1."""
    at, count = 2, 0
    while count <= MAX_SCANS and (marker := _MARKER.search(data, at)):
        kind, at = data[marker.end() - 1], marker.end()
        if kind == 0xD9:  # the end; what follows is not part of the image
            break
        if kind not in (0x01, 0xD8):  # all others have a length
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
        count += kind == 0xDA
    return count
