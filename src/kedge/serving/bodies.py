"""What a client sent: its image files, out of a body that is one, a form or JSON, each within limits."""

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import Executor

from fastapi import Request

from kedge.serving.decode import from_base64
from kedge.serving.settings import Settings

INLINE = 1 << 16  # bytes; parsing more than these would hold up all other requests
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FILE = re.compile(rb"^content-disposition:[^\r\n]*;\s*filename\*?\s*=", re.IGNORECASE | re.MULTILINE)


class Refused(Exception):  # noqa: N818 -- an answer, not a fault
    """A request that gets an answer of its own."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


async def images_of(
    request: Request, settings: Settings, readers: Executor, take: Callable[[int], None]
) -> list[bytes]:
    """The image files in a request: its body itself, the parts of a form, or base64 in JSON.

    Args:
        request: As it comes in.
        settings: Its limits.
        readers: Threads for what takes long.
        take: Called with the number of bytes that came, before they are kept; raises if there is no room.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json":
        parse: Callable[[bytes], list[bytes]] = lambda body: from_json(body, settings.max_images)  # noqa: E731
    elif kind == "multipart/form-data":
        boundary = _BOUNDARY.search(given)
        if boundary is None:
            raise Refused(422, "the form cannot be read: its content-type must name a boundary of 1 to 70 characters")
        mark = (boundary[1] or boundary[2]).encode("latin-1")
        parse = lambda body: from_form(body, mark, settings.max_images)  # noqa: E731
    elif kind.startswith("image/") or kind == "application/octet-stream":
        return [await _body(request, settings, take)]
    else:
        expected = "image/*, multipart/form-data or application/json"
        raise Refused(415, f"content-type must be {expected}; got {kind[:100] or 'none'}")
    body = await _body(request, settings, take)
    if len(body) <= INLINE:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(readers, parse, body)


async def _body(request: Request, settings: Settings, take: Callable[[int], None]) -> bytes:
    """The whole body, if it is not too long and comes in time."""
    too_long = Refused(413, f"a request must have at most {settings.max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > settings.max_bytes):
        raise too_long
    held = bytearray()
    try:
        async with asyncio.timeout(settings.timeout / 2):
            async for chunk in request.stream():
                if len(held) + len(chunk) > settings.max_bytes:
                    raise too_long
                take(len(chunk))
                held += chunk
    except TimeoutError as error:
        raise Refused(408, f"the request did not arrive within {settings.timeout / 2:g} seconds") from error
    return bytes(held)


def from_json(body: bytes, max_images: int) -> list[bytes]:
    """The files in ``{"image": base64}`` or ``{"images": [base64, ...]}``.

    Example:
        >>> from_json(b'{"images": ["aGVsbG8=", "YQ=="]}', 2)
        [b'hello', b'a']
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > 2 * max_images + 16:  # base64 has none of these, a data: address one
        raise Refused(413, f"images must be at most {max_images}; the body has more values than so many need")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the body must be JSON") from error
    if not isinstance(given, dict) or len(given.keys() & {"image", "images"}) != 1:
        raise Refused(422, 'the body must be {"image": base64} or {"images": [base64, ...]}')
    images = [given["image"]] if "image" in given else given["images"]
    if not isinstance(images, list):
        raise Refused(422, f"images must be a list of base64 texts; got {type(images).__name__}")
    if len(images) > max_images:
        raise Refused(413, f"images must be at most {max_images}; got {len(images)}")
    return [from_base64(text, place) for place, text in enumerate(images)]


def from_form(body: bytes, boundary: bytes, max_images: int) -> list[bytes]:
    r"""The files in a form (RFC 7578): the content of its parts that have a filename.

    The body is whole and in memory, so it is cut at its boundaries; nothing of it is decoded as text, and the parts
    that are no files are passed over.

    Example:
        >>> head = b'Content-Disposition: form-data; name="images"; filename="a.png"'
        >>> from_form(b"--x\r\n" + head + b"\r\n\r\nhello\r\n--x--\r\n", b"x", 2)
        [b'hello']
    """
    most = 2 * max_images  # as many files, and as many fields beside them
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, most + 1)  # what stands before the first is for people
    files, ended = [], False
    for part in parts:
        if ended := part.startswith(b"--"):
            break
        head, gap, content = part.partition(b"\r\n\r\n")
        if gap and _FILE.search(head):
            files.append(content)
    if not ended and len(parts) > most:
        raise Refused(413, f"a form must have at most {most} parts")
    if len(files) > max_images:
        raise Refused(413, f"images must be at most {max_images}; got {len(files)}")
    if files and not ended:
        raise Refused(422, "the form cannot be read: it does not end with its boundary")
    return files
