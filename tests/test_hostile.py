"""Files and requests made by hand to do harm; those drawn at random are in `fuzzing`."""

import asyncio
import contextlib
import ctypes
import gc
import io
import json
import logging
import math
import os
import select
import socket
import struct
import threading
import time
import tracemalloc
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fuzzing.images import PHOTO, SEEDS, SIDE, pixels
from fuzzing.requests import ask, check_answer, form, hostile_request
from helpers import encoded as file
from helpers import served, service_process, small_amp
from kedge.data import Preprocess, decoding, open_image
from kedge.errors import InputError
from kedge.scoring import read_rows, score_files
from kedge.serving import Busy, Settings, create_app
from kedge.serving.bodies import FORMATS, LARGE, Refused, decode, from_form, from_json
from kedge.serving.server import Sparing

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of what it finds in damaged files

RULE = Preprocess((3, SIDE, SIDE))
PIXELS = 50_000_000


# --- cut files --------------------------------------------------------------------------------------------------------


def decode_or_refuse(data) -> bool:
    try:
        image = decode(data, 0, RULE, PIXELS)
    except InputError as error:
        assert str(error).startswith("images[0]")  # noqa: PT017
        assert "object at 0x" not in str(error)  # noqa: PT017
        return False
    assert image.shape == (3, SIDE, SIDE)
    assert image.dtype == torch.uint8
    return True


def test_a_file_cut_anywhere_is_an_image_or_an_error_and_half_an_image_is_no_image():
    for name, whole in SEEDS.items():
        for end in np.unique(np.linspace(0, len(whole) - 1, 40).astype(int)):
            decode_or_refuse(whole[:end])
        if name in ("jpeg", "jpeg, progressive", "png", "gif", "webp"):
            assert not decode_or_refuse(whole[: len(whole) // 2]), name


# --- odd images, whose pixels are known without decoding them ---------------------------------------------------------


def grey(values):
    return np.repeat(values[..., None], 3, axis=2)


def on_white(values, alpha):
    share = alpha[..., None] / 255
    return np.round(values * share + 255 * (1 - share))


COLOUR, GREY, ALPHA = pixels(1), pixels(2, (SIDE, SIDE)), pixels(3, (SIDE, SIDE))
FEW = pixels(4, (SIDE, SIDE), 4)
PALETTE, ALPHAS = pixels(5, (4, 3)), np.array([0, 90, 180, 255], np.uint8)


def with_palette(**options):
    image = Image.fromarray(FEW)
    image.putpalette(PALETTE.tobytes())
    return file(image, "PNG", **options)


def turned(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file(Image.fromarray(COLOUR), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


def tiff(*tags, behind=64) -> bytes:
    """A grey TIFF of 8 x 8 with one directory, which leads to itself."""
    base = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 273: 300, 277: 1, 278: 8, 279: 64} | dict(tags)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(base.items()))
    head = b"II*\0" + struct.pack("<IH", 8, len(base)) + entries + struct.pack("<I", 8)
    return head.ljust(300, b"\0") + b"\x2a" * behind


LATER = {"save_all": True, "append_images": [Image.new("RGB", (SIDE, SIDE), "red")] * 2}
ODD = {
    "1 bit": (file(Image.fromarray(GREY > 127), "PNG"), grey(np.where(GREY > 127, 255, 0))),
    "grey and alpha": (file(Image.fromarray(np.dstack([GREY, ALPHA])), "PNG"), on_white(grey(GREY), ALPHA)),
    "colour and alpha": (file(Image.fromarray(np.dstack([COLOUR, ALPHA])), "PNG"), on_white(COLOUR, ALPHA)),
    "a palette with one transparent colour": (
        with_palette(transparency=1),
        np.where(FEW[..., None] == 1, 255, PALETTE[FEW]),
    ),
    "a palette with alphas": (with_palette(transparency=bytes(ALPHAS)), on_white(PALETTE[FEW], ALPHAS[FEW])),
    "16 bits, png": (file(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"), grey(GREY)),
    "16 bits, tiff": (file(Image.fromarray(GREY.astype(np.uint16) * 257), "TIFF"), grey(GREY)),
    "floating point": (file(Image.fromarray(GREY.astype(np.float32)), "TIFF"), grey(GREY)),
    "no colour in cmyk": (file(Image.new("CMYK", (SIDE, SIDE)), "JPEG", quality=100), np.full((SIDE, SIDE, 3), 255)),
    "animated png": (file(Image.fromarray(COLOUR), "PNG", **LATER), COLOUR),
    "animated webp": (file(Image.fromarray(COLOUR), "WEBP", lossless=True, **LATER), COLOUR),
    "animated gif": (file(Image.fromarray(GREY), "GIF", **LATER), grey(GREY)),
    "png upside down": (turned("PNG", 3), COLOUR[::-1, ::-1]),
    "webp on its side": (turned("WEBP", 6), np.rot90(COLOUR, -1)),
    "tiff mirrored": (turned("TIFF", 2), COLOUR[:, ::-1]),
    "a tiff whose directory leads to itself": (tiff(), np.full((SIDE, SIDE, 3), 42)),
    "a png that is a zip, too": (file(Image.fromarray(COLOUR), "PNG") + b"PK\x05\x06" + bytes(18), COLOUR),
    "a png with a page behind it": (file(Image.fromarray(COLOUR), "PNG") + b"<script>alert(1)</script>", COLOUR),
}


def test_an_odd_image_has_its_own_pixels_on_white_whatever_the_ending_of_its_file(tmp_path):
    for name, (data, expected) in ODD.items():
        (tmp_path / "photo.jpg").write_bytes(data)
        for image in (decode(data, 0, RULE, PIXELS), RULE(tmp_path / "photo.jpg")):
            difference = np.abs(image.permute(1, 2, 0).numpy() - np.asarray(expected, float))
            assert difference.max() <= ("alpha" in name), name  # where Pillow rounds the other way


# --- files that are not images ----------------------------------------------------------------------------------------


ZIP = io.BytesIO()
with zipfile.ZipFile(ZIP, "w") as archive:
    archive.writestr("a.png", SEEDS["png"])
PAGES = (b"<img src=x onerror=alert(1)>", b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"></svg>')
PROGRAMS = (b"#!/bin/sh\nrm -rf /\n", b"GIF89a<?php system($_GET[0]); ?>", b"\x80\x04cos\nsystem\n(S'true'\ntR.")
OTHER_FORMATS = [file(PHOTO, kind) for kind in ("PDF", "EPS", "ICO", "JPEG2000", "PPM")]
NOT_IMAGES = [b"", b"\x89", bytes(1000), b"no image", b"\x7fELF" + bytes(100), ZIP.getvalue()]
NOT_IMAGES += [*PAGES, *PROGRAMS, *OTHER_FORMATS]


def test_what_is_not_an_image_is_refused_and_never_given_to_another_program(tmp_path, monkeypatch):
    for data in NOT_IMAGES:
        with pytest.raises(InputError, match=r"^images\[0\] cannot be read as an image"):
            decode(data, 0, RULE, PIXELS)
    with pytest.raises(InputError, match=f"it is none of {', '.join(FORMATS)}"):
        decode(b"text", 0, RULE, PIXELS)
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("Pillow ran Ghostscript"))
    (tmp_path / "photo.png").write_bytes(file(PHOTO, "EPS"))
    with pytest.raises(InputError, match=r"photo\.png cannot be read as an image: EPS files are programs"):
        RULE(tmp_path / "photo.png")


def test_an_image_without_pixels_or_with_pixels_that_are_no_numbers_is_refused():
    with pytest.raises(InputError, match="an image must have pixels; got one of 0 x 5"):
        RULE(Image.new("RGB", (0, 5)))
    holes = np.zeros((5, 5), np.float32)
    holes[2, 2] = math.nan
    with pytest.raises(InputError, match=r"images\[3\]: .*some are NaN"):
        decode(file(Image.fromarray(holes), "TIFF"), 3, RULE, PIXELS)


# --- bombs: small files that would cost much --------------------------------------------------------------------------


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, raw=bytes(100), extra=b"", bits=8, colours=0):
    head = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    body = chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


JPEG, GIF, SCANS, MANY = SEEDS["jpeg"], SEEDS["gif"], SEEDS["jpeg, progressive"], 100_000
LAST_SCAN = SCANS[SCANS.rindex(b"\xff\xda") : -2]
GIF_COLORS = 13 + 3 * 2 ** ((GIF[10] & 7) + 1)
BOMBS = {
    "png of 2 billion a side": (png(2**31 - 1, 2**31 - 1), "pixels"),
    "png of 60,000 a side": (png(60_000, 60_000), "pixels"),
    "png just above the limit": (png(50_000_001, 1), "at most 50,000,000 pixels; got 50000001 x 1"),
    "gif of 65,535 a side": (GIF[:6] + struct.pack("<HH", 65_535, 65_535) + GIF[10:], "pixels"),
    "bmp of 2 billion a side": (
        SEEDS["bmp"][:18] + struct.pack("<ii", 2**31 - 1, 2**31 - 1) + SEEDS["bmp"][26:],
        "pixels",
    ),
    "tiff of 4 billion a side": (tiff((256, 2**32 - 1), (257, 2**32 - 1)), "pixels"),
    "tiff with enormous tiles": (tiff((259, 5), (322, 40_000), (323, 40_000), (324, 300), (325, 64)), "tiles of 40000"),
    "jpeg of many scans": (SCANS[:-2] + LAST_SCAN * 20_000 + SCANS[-2:], "more than 100 scans"),
    "jpeg of many segments": (JPEG[:2] + b"\xff\xe5\0\2" * MANY + JPEG[2:], "too many pieces"),
    "jpeg of many comments": (JPEG[:2] + b"\xff\xfe\0\2" * MANY + JPEG[2:], "too many pieces"),
    "png of many chunks": (png(8, 8, extra=chunk(b"abCd", b"") * MANY), "too many pieces"),
    "png of long texts": (png(8, 8, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7)))), "too large"),
    "png with a long profile": (png(8, 8, extra=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**7)))), "too large"),
    "gif of many comments": (GIF[:GIF_COLORS] + b"\x21\xfe\x01a\0" * MANY + GIF[GIF_COLORS:], "too many pieces"),
}


def test_a_bomb_is_refused_for_what_it_declares():
    for name, (data, reason) in BOMBS.items():
        started = time.thread_time()
        with pytest.raises(InputError, match=reason):
            decode(data, 0, RULE, PIXELS)
        assert time.thread_time() - started < 1, name  # seconds of this thread; without the limits, up to minutes


def test_ordinary_files_are_far_from_the_limits():
    large = Image.effect_noise((1500, 1000), 80).convert("RGB")
    for kind, options in (("PNG", {"compress_level": 1}), ("JPEG", {"progressive": True}), ("TIFF", {}), ("BMP", {})):
        data = file(large, kind, **options)
        assert decode(data, 0, RULE, PIXELS).shape == (3, SIDE, SIDE)
        reader = decoding.Pieces(data)
        allowed = reader._left
        with Image.open(reader) as image:
            image.load()
        assert allowed - reader._left < allowed / 10
        assert decoding.scans(data) < decoding.MAX_SCANS / 5 or kind != "JPEG"
    film = b"\xff\xda\0\4ab" * 1000  # cameras append films to their photographs
    assert decoding.scans(JPEG + film) == decoding.scans(JPEG) == 1
    assert decode(JPEG + film, 0, RULE, PIXELS).shape == (3, SIDE, SIDE)


def test_wide_pixels_are_narrowed_a_part_at_a_time():
    """In floating point all at once they would take 24 bytes a pixel and more."""
    side = 3000
    image = open_image(io.BytesIO(png(side, side, bytes((2 * side + 1) * side), bits=16)))
    tracemalloc.start()
    RULE(image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * side * side


def test_a_filter_on_warnings_is_not_changed_by_threads_that_read():
    """`warnings.catch_warnings` is not for threads: one that ends late puts back what another has changed."""
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(decode_or_refuse, [SEEDS["png"]] * 200))
    assert warnings.filters == before


# --- hostile files among those to be scored ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def detector():
    return small_amp(side=SIDE)


def test_a_name_that_is_not_valid_text_is_escaped(detector, tmp_path):
    detector.save(tmp_path / "detector.kedge")
    folder = tmp_path / "images"
    folder.mkdir()
    (Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.png"))).write_bytes(SEEDS["png"])
    for kind in ("parquet", "csv", "jsonl"):
        out = score_files(tmp_path / "detector.kedge", [str(folder)], tmp_path / f"rows.{kind}")
        (row,) = read_rows(out, kind)
        assert row["name"].endswith("caf\\xe9.png")
        assert row["score"] is not None


# --- requests straight into the application ---------------------------------------------------------------------------


def with_app(detector, work, **limits):
    """Run ``work(app)`` beside a service that was started; afterwards none of its threads is left."""
    others = set(threading.enumerate())

    async def main():
        app = create_app(detector, Settings(**{"timeout": 600} | limits))  # however busy the machine is
        async with app.router.lifespan_context(app):
            return await work(app)

    result = asyncio.run(main())
    assert set(threading.enumerate()) <= others
    return result


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


async def fuzz(app, cases, rng, at_once=8):
    """Send hostile requests, a few at a time; return how many had each status."""
    counts: dict[int, int] = {}
    for _ in range(0, cases, at_once):
        requests = [hostile_request(rng) for _ in range(at_once)]
        answers = await asyncio.gather(*(ask(app, **one) for one in requests))
        for one, (status, _, content) in zip(requests, answers, strict=True):
            check_answer(one, status, content)
            counts[status] = counts.get(status, 0) + 1
    return counts


async def good_answer(app):
    status, _, content = await ask(app, SEEDS["png"])
    assert status == 200
    return json.loads(content)["results"][0]["score"]


def test_every_hostile_request_is_answered_or_refused_and_the_next_good_one_is_answered(detector):
    cases = 400

    async def work(app):
        before = await good_answer(app)
        counts = await fuzz(app, cases, np.random.default_rng(5))
        service = app.state.service
        assert (service.bytes.taken, service.places.taken, service.batcher.queued) == (0, 0, 0)
        assert await good_answer(app) == pytest.approx(before, rel=1e-4)
        return counts

    counts = with_app(detector, work)
    assert counts.keys() >= {200, 400, 404, 405, 415, 422, 499}
    assert 0.1 < counts[200] / cases < 0.9


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns; the eighth number is that of bytes in use."""

    _fields_ = tuple((f"field{number}", ctypes.c_size_t) for number in range(10))


def in_use() -> int:
    """Bytes that C code has allocated. Resident memory would count what glibc keeps of memory that was freed."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    return mallinfo().field7


@pytest.mark.parametrize(
    ("memory", "seed", "warm_up", "cases", "limit"),
    [
        (allocated, 7, 300, 400, 400 * 250),  # only counts of a request stay
        pytest.param(in_use, 6, 2000, 20_000, 2_000_000, marks=pytest.mark.slow),  # a leak of bodies: 27 MB
    ],
)
def test_what_was_answered_is_forgotten(detector, caplog, memory, seed, warm_up, cases, limit):
    async def work(app):
        caplog.set_level(logging.CRITICAL)  # pytest would keep what is logged
        rng = np.random.default_rng(seed)
        if memory is allocated:
            tracemalloc.start()
        await fuzz(app, warm_up, rng)
        before = memory()
        await fuzz(app, cases, rng)
        after = memory()
        tracemalloc.stop()
        return after - before

    assert with_app(detector, work) < limit


def test_large_bodies_of_nothing_are_refused_at_once_and_in_a_thread(detector):
    size = 1_000_000
    bodies = {
        b"[" * size: 413,
        b"[" + b"1," * (size // 2) + b"1]": 413,
        b'{"images":[' + b'"",' * (size // 3) + b'""]}': 413,
        b"9" * size: 422,
        b'{"image":"' + b"=" * size + b'"}': 200,  # a row with an error
        b'{"image":"' + b"A" * size + b'%"}': 200,
        b'{"a":' * (size // 5): 413,
    }

    async def work(app):
        for body, code in bodies.items():
            waiting = asyncio.create_task(ask(app, body, kind="application/json"))
            assert await good_answer(app)
            assert (await waiting)[0] == code

    with_app(detector, work)


def test_json_of_far_more_values_than_images_is_refused_before_it_is_parsed(monkeypatch):
    data_addresses = ["data:image/png;base64,aGVsbG8="] * 64
    assert from_json(json.dumps({"images": data_addresses}, indent=1).encode(), 64) == [b"hello"] * 64
    monkeypatch.setattr("kedge.serving.bodies.json.loads", lambda body: pytest.fail("it was parsed"))
    for values in (b"{},", b"[],", b"0,", b'"",', b"[", b'{"a":'):
        with pytest.raises(Refused, match="more values") as refused:
            from_json(b'{"images":[' + values * 1000, 64)
        assert refused.value.code == 413
    monkeypatch.undo()
    with pytest.raises(Refused, match="must be JSON"):
        from_json(b"[" * 100_000, 100_000)  # deeper than Python recurses


def test_the_files_of_a_form():
    field = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nfield\r\n"
    for body, boundary, expected in [
        (form([b"a", b"b\r\n", b""]), b"x", [b"a", b"b\r\n", b""]),
        (b"for people\r\n" + form([b"a"]) + b"and more", b"x", [b"a"]),
        (form([b" --x\r\n--y\r\n\r\n"]), b"x", [b" --x\r\n--y\r\n\r\n"]),
        (form([b"a"], b"=_()+,-./:?"), b"=_()+,-./:?", [b"a"]),
        (field + form([b"a"]), b"x", [b"a"]),
        (b"--x\r\nCONTENT-DISPOSITION: form-data; filename*=UTF-8''a\r\n\r\na\r\n--x--", b"x", [b"a"]),
        (b"", b"x", []),
        (b"nothing", b"x", []),
        (b"--x--", b"x", []),
        (b"--x\r\n\r\n\r\n--x--", b"x", []),
        (b"--y\r\nContent-Disposition: form-data; filename=a\r\n\r\na\r\n--y--", b"x", []),
    ]:
        assert from_form(body, boundary, 3) == expected
    for body, code in [
        (form([b"a"] * 4), 413),
        (field * 100_000, 413),
        (b"\r\n--x" * 200_000, 413),
        (form([b"a"])[:-8], 422),
    ]:
        with pytest.raises(Refused) as refused:
            from_form(body, b"x", 3)
        assert refused.value.code == code


def test_bodies_that_fill_the_memory_for_them_wait_outside(detector):
    async def work(app):
        never = asyncio.create_task(ask(app, bytes(900), end="never"))
        await until(lambda: app.state.service.bytes.taken == 900)
        status, headers, content = await ask(app, bytes(200))
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert b"fill the memory" in content
        never.cancel()
        await asyncio.gather(never, return_exceptions=True)
        assert (await ask(app, bytes(200)))[0] == 400

    with_app(detector, work, max_bytes=1000, max_held=1000)


def test_no_more_images_are_decoded_than_may_wait(detector, monkeypatch):
    go = threading.Event()

    def slow(*arguments):
        assert go.wait(60)
        return decode(*arguments)

    monkeypatch.setattr("kedge.serving.service.decode", slow)

    async def work(app):
        first = asyncio.create_task(ask(app, form([SEEDS["png"]] * 3), kind="multipart/form-data; boundary=x"))
        await until(lambda: app.state.service.places.taken == 3)
        assert (await ask(app, SEEDS["png"], method="GET", path="/readyz"))[0] == 200
        assert (await ask(app, form([SEEDS["png"]] * 2), kind="multipart/form-data; boundary=x"))[0] == 503
        second = asyncio.create_task(ask(app, SEEDS["png"]))
        await until(lambda: app.state.service.places.taken == 4)
        assert (await ask(app, SEEDS["png"], method="GET", path="/readyz"))[0] == 503
        go.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]

    with_app(detector, work, max_images=4, max_queue=4)


def test_a_large_jpeg_is_decoded_reduced_and_nearly_the_same(monkeypatch):
    rule, rng, decoded = Preprocess((3, 224, 224)), np.random.default_rng(8), []
    for options in ({}, {"progressive": True}):
        flat = file(Image.new("RGB", (7000, 7000), "teal"), "JPEG", **options)
        started = time.thread_time()
        assert decode(flat, 0, rule, PIXELS, decoded.append).float().std(dim=(1, 2)).max() == 0
        assert time.thread_time() - started < 1
    # The coefficients of a progressive JPEG take memory at full size, so that these count.
    assert decoded == [875 * 875, 7000 * 7000]
    blurred = Image.fromarray(rng.integers(0, 256, (100, 120, 3)).astype(np.uint8)).resize((2400, 2000))
    data = file(blurred, "JPEG", quality=90)
    reduced = decode(data, 0, rule, PIXELS, decoded.append).int()
    monkeypatch.setattr("kedge.serving.bodies.LARGE", 10**9)
    whole = decode(data, 0, rule, PIXELS, decoded.append).int()
    assert decoded[2:] == [1200 * 1000, 2400 * 2000]
    assert (reduced - whole).abs().float().mean() < 0.5
    assert (reduced - whole).abs().max() <= 4


def test_a_large_jpeg_of_many_scans_is_refused_as_is_what_exceeds_the_pixels_of_a_request(detector):
    flat = file(Image.new("L", (7000, 7000)), "JPEG", progressive=True)
    last = flat[flat.rindex(b"\xff\xda") : -2]
    with pytest.raises(InputError, match="scans of 7000 x 7000 pixels are too many"):
        decode(flat[:-2] + last * 30 + flat[-2:], 0, RULE, PIXELS)

    async def work(app):
        parts = [file(Image.new("L", (100, 100)), "PNG")] * 3
        _, _, content = await ask(app, form(parts), kind="multipart/form-data; boundary=x")
        return [row["error"] for row in json.loads(content)["results"]]

    first, second, third = with_app(detector, work, max_pixels=10_000, max_request_pixels=20_000)
    assert first is second is None
    assert "at most 20,000 pixels together" in third


def test_large_images_and_long_requests_hold_up_no_others(detector, monkeypatch):
    go, begun, order = threading.Event(), threading.Event(), []

    def slow(data, place, preprocess, most, accept):
        if accept.args != (LARGE,):  # in the thread for large images
            begun.set()
            assert go.wait(60)
        order.append(len(data))
        time.sleep(0.01)
        return decode(data, place, preprocess, most, accept)

    monkeypatch.setattr("kedge.serving.service.decode", slow)

    async def work(app):
        large = [asyncio.create_task(ask(app, png(2500, 2000, bytes(2501 * 2000)))) for _ in range(3)]
        await until(begun.is_set)
        await asyncio.sleep(0.1)
        many = asyncio.create_task(ask(app, form([SEEDS["gif"]] * 64), kind="multipart/form-data; boundary=x"))
        await until(lambda: len(order) > 5)
        await good_answer(app)
        assert order.index(len(SEEDS["png"])) < 40  # among the 64 of the other request
        go.set()
        assert [(await task)[0] for task in (many, *large)] == [200] * 4

    with_app(detector, work)


def test_a_full_queue_is_noticed_before_a_body_is_read_or_parsed(detector, monkeypatch):
    read = []
    monkeypatch.setattr("kedge.serving.bodies.json.loads", lambda body: pytest.fail("it was parsed"))

    async def work(app):
        places = app.state.service.places
        with places.share() as take:

            async def body_of(*_):  # meanwhile others fill the queue
                read.append(take(places.most))
                return b"{}"

            monkeypatch.setattr("kedge.serving.service.body_of", body_of)
            return [(await ask(app, kind="application/json"))[0] for _ in range(2)]

    assert with_app(detector, work) == [503, 503]
    assert len(read) == 1


def test_what_would_not_be_answered_in_time_is_refused_at_once(detector):
    async def work(app):
        runs = app.state.service.batcher.runs
        runs[:] = [lambda images, run=run: time.sleep(0.1) or run(images) for run in runs]
        tasks = []
        for _ in range(80):  # at four times the capacity
            tasks.append(asyncio.create_task(ask(app, SEEDS["png"])))
            await asyncio.sleep(0.025 / len(runs))
        return {(await task)[0] for task in tasks}

    assert with_app(detector, work, timeout=2, max_batch=1) == {200, 503}


# --- connections ------------------------------------------------------------------------------------------------------


def connected(port, first=b"", buffer=None) -> socket.socket:
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(300)
    connection.connect(("127.0.0.1", port))
    connection.sendall(first)
    return connection


def everything(connection) -> bytes:
    """What arrives until the other side closes."""
    received = b""
    with connection, contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            received += more
    return received


def head(length, *more) -> bytes:
    lines = ["POST /v1/score HTTP/1.1", "Host: a", "Content-Type: image/png", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def healthy(port) -> bool:
    return everything(connected(port, b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")).endswith(
        b'"alive"}'
    )


def post(port, body=SEEDS["png"]) -> bytes:
    return everything(connected(port, head(len(body), "Connection: close") + body))


def answered(port) -> bool:
    """Whether a good request gets an answer, though a busy machine may let the time of some pass."""
    return any(post(port).startswith(b"HTTP/1.1 200") for _ in range(10))


def test_bodies_that_trickle_in_get_408_and_hold_up_nobody(detector):
    with served(detector, timeout=8) as port:
        slow = [connected(port, head(1000) + b"x") for _ in range(20)]
        assert post(port).startswith(b"HTTP/1.1 200")
        assert select.select(slow, [], [], 0)[0] == []  # none of them has an answer yet
        for drop in range(40):
            if select.select(slow, [], [], 0.2)[0]:
                break
            for one in slow:
                one.sendall(bytes([drop]))
        answers = [everything(one) for one in slow]  # until the service closes, which does not wait for the body
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
        assert b"did not arrive within 4 seconds" in answers[0]
        assert post(port).startswith(b"HTTP/1.1 200")


def test_the_oldest_idle_connection_makes_room_and_one_at_work_is_never_cut(detector, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert go.wait(60)
        return decode(*arguments)

    monkeypatch.setattr("kedge.serving.service.decode", slow)
    with served(detector, max_connections=8) as port:
        at_work = connected(port, head(len(SEEDS["png"]), "Connection: close") + SEEDS["png"])
        assert begun.wait(60)
        idle = [connected(port, b"GET /healthz HT") for _ in range(60)]
        for old in idle[:50]:
            assert everything(old) == b""
        assert healthy(port)
        go.set()
        assert everything(at_work).startswith(b"HTTP/1.1 200")
        assert post(port).startswith(b"HTTP/1.1 200")
        for one in idle[50:]:
            one.close()


@pytest.mark.parametrize("answer", [b"413", b"503"])
def test_an_answer_to_a_large_body_arrives_though_the_connection_is_closed_behind_it(detector, monkeypatch, answer):
    async def busy(*_):
        raise Busy("full")

    if answer == b"503":
        monkeypatch.setattr("kedge.serving.service.body_of", busy)
    with served(detector) as port, connected(port, head(30_000_000, "Connection: close")) as sender:
        sender.sendall(bytes(30_000_000))  # all of it, before anything is read
        received = sender.recv(65536)
        while more := sender.recv(65536):  # a reset would raise an error
            received += more
    assert received.startswith(b"HTTP/1.1 " + answer)
    assert b"detail" in received


def test_a_body_that_never_ends_is_read_for_a_bounded_time(detector, monkeypatch):
    monkeypatch.setattr("kedge.serving.guard.LINGER", 0.2)
    with served(detector) as port:
        started = time.monotonic()
        with connected(port, head(10**12) + b"a") as endless:
            assert endless.recv(12) == b"HTTP/1.1 413"
        assert time.monotonic() - started < 10
        waiting = connected(port, head(10**12, "Expect: 100-continue", "Connection: close"))
        assert everything(waiting).startswith(b"HTTP/1.1 413")  # and never 100


def test_idle_deaf_and_slow_clients_neither_exhaust_the_descriptors_nor_fill_the_log(detector, tmp_path):
    """In a process that may open 200 files; clients that do not read are sent answers until their buffers are full."""
    unread = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 200
    with (
        service_process(detector, tmp_path, "--timeout", "6", files=200) as (process, port, log),
        contextlib.ExitStack() as attackers,
    ):
        descriptors = Path(f"/proc/{process.pid}/fd")
        assert answered(port)
        before = len(list(descriptors.iterdir()))
        for first in (b"", unread, head(1000) + b"x", b"not HTTP\r\n\r\n"):
            for _ in range(200):
                attackers.enter_context(connected(port, first, buffer=1000))
            assert healthy(port)
            assert len(list(descriptors.iterdir())) < 200
            assert answered(port)
        deadline = time.monotonic() + 60
        while len(list(descriptors.iterdir())) > before:  # all are cut, though they are open at the other end
            assert time.monotonic() < deadline
            assert healthy(port)
            time.sleep(0.2)
        chatty = tiff((259, 5), *((tag, 1) for tag in range(60_000, 61_000)))
        for tag in range(60_000, 61_000):  # of no known type: libtiff writes 280 bytes to stderr for each
            chatty = chatty.replace(struct.pack("<HH", tag, 4), struct.pack("<HH", tag, 0))
        assert post(port, chatty).startswith(b"HTTP/1.1 400")
        assert answered(port)
        assert log.stat().st_size < 10_000


def test_a_statement_logs_a_few_lines_a_minute_and_then_how_many_were_left_out(monkeypatch):
    clock = iter([*range(1000), 3000, 3001])
    monkeypatch.setattr("kedge.serving.server.time.monotonic", lambda: next(clock) / 20)
    sparing, passed = Sparing(), []
    for number in range(1002):
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 7, "line %d", (number,), None)
        if sparing.filter(record):
            passed.append(record.getMessage())
    assert passed[:10] == [f"line {number}" for number in range(10)]
    assert passed[10:] == ["line 1000 (990 more like it before)", "line 1001"]


def test_connections_that_nothing_comes_of_are_closed(detector):
    with served(detector, timeout=2) as port:
        begun = [b"", b"P", b"POST /v1/score HTTP/1.1\r\nHost:", head(10)[:-2]]
        begun.append(head(len(SEEDS["png"])) + SEEDS["png"] + b"GET /healthz HT")  # a second one that does not end
        heard = [everything(one) for one in [connected(port, first) for first in begun]]
        assert [answer[:12] for answer in heard] == [b""] * 4 + [b"HTTP/1.1 200"]
        assert post(port).startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def hostile_port(detector):
    with served(detector) as port:
        yield port


def test_what_is_not_http_is_refused_and_what_nearly_is_gets_an_answer(hostile_port):
    post_head = b"POST /v1/score HTTP/1.1\r\nHost: a\r\n"
    wrong = [
        bytes(range(256)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),  # as https begins
        post_head + b"Content-Length: -1\r\n\r\n",
        post_head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        post_head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        post_head + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        post_head + b"A" + b"b" * 100_000,
        b"GET /healthz HTTP/1.1\r\nHost a\r\n\r\n",
        b"GET\r\n\r\n",
    ]
    odd = [b"GET / HTTP/9.9\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n"]
    for sent in wrong + odd:
        sender = connected(hostile_port, sent)
        sender.shutdown(socket.SHUT_WR)
        answer = everything(sender)
        assert answer[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 2" if sent in odd else b""), sent[:80]
        assert b"Traceback" not in answer
        assert post(hostile_port).startswith(b"HTTP/1.1 200")


def test_a_connection_that_is_half_closed_or_reset_leaves_the_others_alone(hostile_port, caplog):
    body = SEEDS["png"]
    for first in (head(len(body)) + body, head(len(body)) + body[:9], head(5)[:20], b""):
        half = connected(hostile_port, first)
        half.shutdown(socket.SHUT_WR)
        assert everything(half)[:12] in (b"", b"HTTP/1.1 200", b"HTTP/1.1 400")
        gone = connected(hostile_port, first)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close it with a reset
        gone.close()
    assert post(hostile_port).startswith(b"HTTP/1.1 200")
    assert "no answer to" not in caplog.text
