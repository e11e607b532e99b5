"""Images in requests: a body that is an image, a form or JSON, within limits that hold before anything is decoded."""

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from fastapi import Request
from PIL import Image
from torch import Tensor

from kedge.data import Preprocess
from kedge.data.decoding import open_image
from kedge.errors import InputError
from kedge.serving.settings import Settings

INLINE = 1 << 16  # bytes; parsing longer bodies would hold up all other requests
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FILE = re.compile(rb"^content-disposition:[^\r\n]*;\s*filename\*?\s*=", re.IGNORECASE | re.MULTILINE)
Image.init()
# What browsers and cameras write. Every further format of Pillow is one more parser that anybody could send bytes to.
FORMATS = tuple(name for name in ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF") if name in Image.OPEN)


class Refused(Exception):  # noqa: N818 -- an answer, not a fault
    """A request that is answered with a status code of its own."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


async def images_of(request: Request, limits: Settings, readers: Executor, take: Callable[[int], None]) -> list[bytes]:
    """The image files in a request: the body itself, the parts of a form, or base64 in JSON.

    Long bodies are parsed by ``readers``; ``take`` reserves bytes before they are kept, or raises.
    """
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        return [await _body(request, limits, take)]
    if kind == "application/json":
        parse = partial(from_json, max_images=limits.max_images)
    elif kind == "multipart/form-data":
        boundary = _BOUNDARY.search(content_type)
        if boundary is None:
            raise Refused(422, "the form cannot be read: its content-type must name a boundary of 1 to 70 characters")
        mark = (boundary[1] or boundary[2]).encode("latin-1")
        parse = partial(from_form, boundary=mark, max_images=limits.max_images)
    else:
        expected = "image/*, multipart/form-data or application/json"
        raise Refused(415, f"content-type must be {expected}; got {kind[:100] or 'none'}")
    body = await _body(request, limits, take)
    if len(body) <= INLINE:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(readers, parse, body)


async def _body(request: Request, limits: Settings, take: Callable[[int], None]) -> bytes:
    """The whole body, if it is not too long and arrives in time."""
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


def from_json(body: bytes, max_images: int) -> list[bytes]:
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


def _from_base64(text: Any, place: int) -> bytes:
    """The bytes of an image given as base64, or as a data: address of it."""
    if not isinstance(text, str):
        raise InputError(f"images[{place}] must be base64 text; got {type(text).__name__}")
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except ValueError as error:
        raise InputError(f"images[{place}] must be base64: {error}") from error


def from_form(body: bytes, boundary: bytes, max_images: int) -> list[bytes]:
    """The files in a form (RFC 7578): the content of its parts that have a filename.

    The body is in memory, so it is split at its boundaries; nothing is decoded as text, and other parts are skipped.
    """
    most = 2 * max_images  # as many files, and as many other fields
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, most + 1)  # what precedes the first is for people
    images, ended = [], False
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


def decode(data: bytes, place: int, preprocess: Preprocess, max_pixels: int) -> Tensor:
    """An image file in one of `FORMATS` as the network's input; ``place`` names it in errors."""
    name = f"images[{place}]"
    image = open_image(io.BytesIO(data), name=name, formats=FORMATS, max_pixels=max_pixels)
    try:
        return preprocess(image)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
