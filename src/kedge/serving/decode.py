"""Images out of requests, within limits that hold before anything is decoded."""

import base64
import binascii
import io
from typing import Any

from PIL import Image
from torch import Tensor

from kedge.data import Preprocess
from kedge.data.preprocess import open_image
from kedge.errors import InputError


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
        data: A file's bytes.
        place: In the request, for errors.
        preprocess: The detector's.
        max_pixels: More are refused from the file's head, before they are decoded.
    """
    name = f"images[{place}]"
    try:
        with Image.open(io.BytesIO(data)) as head:
            width, height = head.size
    except Exception as error:  # whatever a damaged file makes Pillow trip over
        raise InputError(f"{name} cannot be read as an image") from error
    if width * height > max_pixels:
        raise InputError(f"{name} must have at most {max_pixels:,} pixels; got {width} x {height}")
    return preprocess(open_image(io.BytesIO(data), name=name))
