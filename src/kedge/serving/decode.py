"""Images out of requests, within limits that hold before anything is decoded."""

import base64
import binascii
import io
from typing import Any

from PIL import Image
from torch import Tensor

from kedge.data import Preprocess
from kedge.data.decoding import open_image
from kedge.errors import InputError

Image.init()
# What browsers and cameras write. Each of Pillow's other formats is a parser more that anybody could send bytes to.
FORMATS = tuple(name for name in ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF") if name in Image.OPEN)


def from_base64(text: Any, place: int) -> bytes:
    """The bytes of an image given as base64, or as a data: address of it.

    Example:
        >>> from_base64("aGVsbG8=", 0)
        b'hello'
    """
    if not isinstance(text, str):
        raise InputError(f"images[{place}] must be base64 text; got {type(text).__name__}")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"images[{place}] must be base64: {error}") from error


def decode(data: bytes, place: int, preprocess: Preprocess, max_pixels: int) -> Tensor:
    """An image as the network takes it.

    Args:
        data: A file's bytes, in one of `FORMATS`.
        place: In the request, for errors.
        preprocess: The detector's.
        max_pixels: More are refused from the file's head, before they are decoded.
    """
    name = f"images[{place}]"
    image = open_image(io.BytesIO(data), name=name, formats=FORMATS, max_pixels=max_pixels)
    try:
        return preprocess(image)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
