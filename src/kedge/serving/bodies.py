"""Images in requests: a body that is an image, a form or JSON, within limits that hold before anything is decoded."""

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Request
from PIL import Image
from torch import Tensor

from kedge.data import Preprocess
from kedge.data.decoding import open_image, scans
from kedge.errors import InputError
from kedge.serving.settings import Settings

LARGE = 4_000_000  # pixels; JPEGs above it are decoded reduced, to GAP times the network's input at least
GAP = 3
PASSES = 1_000_000_000  # pixels times scans of a JPEG: 20 scans of the largest image, and encoders write about ten
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FILE = re.compile(rb"^content-disposition:[^\r\n]*;\s*filename\*?\s*=", re.IGNORECASE | re.MULTILINE)
Image.init()
# What browsers and cameras write. Every further format of Pillow is one more parser that anybody could send bytes to.
FORMATS = tuple(name for name in ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF") if name in Image.OPEN)
Files = list[bytes | InputError]  # an error stands for an image that is not base64


class Refused(Exception):  # noqa: N818 -- an answer, not a fault
    """A request that is answered with a status code of its own."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


class LargeError(Exception):
    """An image has more pixels than one call of `decode` may decode."""


def parser_of(content_type: str, max_images: int) -> Callable[[bytes], Files] | None:
    """The function that finds the image files in a body of this type, JSON or a form; None if the body is an image."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        return None
    if kind == "application/json":
        return partial(from_json, max_images=max_images)
    if kind != "multipart/form-data":
        expected = "image/*, multipart/form-data or application/json"
        raise Refused(415, f"content-type must be {expected}; got {kind[:100] or 'none'}")
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise Refused(422, "the form cannot be read: its content-type must name a boundary of 1 to 70 characters")
    return partial(from_form, boundary=(boundary[1] or boundary[2]).encode("latin-1"), max_images=max_images)


async def body_of(request: Request, limits: Settings, take: Callable[[int], None]) -> bytes:
    """The whole body, if it is not too long and arrives in time; ``take`` reserves bytes before they are kept."""
    too_long = Refused(413, f"a request must have at most {limits.max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limits.max_bytes):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.timeout / 2):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limits.max_bytes:
                    raise too_long
                take(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise Refused(408, f"the request did not arrive within {limits.timeout / 2:g} seconds") from error
    return bytes(body)


def from_json(body: bytes, max_images: int) -> Files:
    """The files in ``{"image": base64}`` or ``{"images": [base64, ...]}``.

    Example:
        >>> from_json(b'{"images": ["aGVsbG8=", "YQ=="]}', 2)
        [b'hello', b'a']
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > 2 * max_images + 16:  # base64 has none of these, a data: address one
        raise Refused(413, f"images must be at most {max_images}; the body has more values than these need")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the body must be JSON") from error
    if not isinstance(content, dict) or len(content.keys() & {"image", "images"}) != 1:
        raise Refused(422, 'the body must be {"image": base64} or {"images": [base64, ...]}')
    images = [content["image"]] if "image" in content else content["images"]
    if not isinstance(images, list):
        raise Refused(422, f"images must be a list of base64 texts; got {type(images).__name__}")
    if len(images) > max_images:
        raise Refused(413, f"images must be at most {max_images}; got {len(images)}")
    return [_from_base64(text, place) for place, text in enumerate(images)]


def _from_base64(text: Any, place: int) -> bytes | InputError:
    """The bytes of an image given as base64, or as a data: address of it; otherwise an error that names it."""
    if not isinstance(text, str):
        return InputError(f"images[{place}] must be base64 text; got {type(text).__name__}")
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except ValueError as error:
        return InputError(f"images[{place}] must be base64: {error}")


def from_form(body: bytes, boundary: bytes, max_images: int) -> Files:
    """The files in a form (RFC 7578): the content of its parts that have a filename.

    The body is in memory, so it is split at its boundaries; nothing is decoded as text, and other parts are skipped.
    """
    most = 2 * max_images  # as many files, and as many other fields
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, most + 1)  # what precedes the first is for people
    images: Files = []
    ended = False
    for part in parts:
        if ended := part.startswith(b"--"):
            break
        head, gap, content = part.partition(b"\r\n\r\n")
        if gap and _FILE.search(head):
            images.append(content)
    if not ended and len(parts) > most:
        raise Refused(413, f"a form must have at most {most} parts")
    if len(images) > max_images:
        raise Refused(413, f"images must be at most {max_images}; got {len(images)}")
    if images and not ended:
        raise Refused(422, "the form cannot be read: it does not end with its boundary")
    return images


def decode(
    data: bytes,
    place: int,
    preprocess: Preprocess,
    max_pixels: int,
    accept: Callable[[int], None] = lambda pixels: None,
) -> Tensor:
    """An image file in one of `FORMATS` as the network's input.

    A JPEG of more than `LARGE` pixels is decoded at a half, a quarter or an eighth of its size, but at least at `GAP`
    times the network's input. On photographs that changes the result by less than 0.5 of 255 levels on average.

    Args:
        data: The file.
        place: Its place in the request, for errors.
        preprocess: The network's.
        max_pixels: Pixels that the file may declare.
        accept: Called with the number of pixels that are about to be decoded; may raise `LargeError` or `InputError`.
    """
    name = f"images[{place}]"

    def before(image: Image.Image) -> None:
        pixels = image.width * image.height
        if pixels > LARGE and image.format in ("JPEG", "MPO"):
            if (passes := scans(data)) * pixels > PASSES:
                raise InputError(f"{passes} scans of {image.width} x {image.height} pixels are too many")
            side = GAP * max(preprocess.shape)
            image.draft(None, (side, side))
        # The coefficients of a progressive JPEG are kept in memory at full size, whatever it is reduced to.
        accept(pixels if image.info.get("progressive") else image.width * image.height)

    try:
        image = open_image(io.BytesIO(data), name=name, formats=FORMATS, max_pixels=max_pixels, before=before)
    except InputError as error:
        if isinstance(error.__cause__, LargeError):
            raise error.__cause__ from None
        raise
    try:
        return preprocess(image)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
