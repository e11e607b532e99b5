"""Image files."""

import binascii

import numpy as np
import torch
from PIL import Image

from fuzzing.damage import any_of, damaged
from fuzzing.engine import Cases, target
from helpers import encoded
from kedge.data import Preprocess
from kedge.serving.bodies import FORMATS, decode

SIDE, PIXELS = 12, 4_000_000
RULE = Preprocess((3, SIDE, SIDE))


def pixels(seed=0, shape=(SIDE, SIDE, 3), top=256, kind=np.uint8):
    return np.random.default_rng(seed).integers(0, top, shape).astype(kind)


PHOTO = Image.fromarray(pixels(0, (14, 17, 3)))
WIDE = Image.fromarray(pixels(0, (14, 17), 65536, np.uint16))
FRAMES = {"save_all": True, "append_images": [PHOTO.rotate(90), PHOTO.rotate(180)]}
SEEDS = {kind: encoded(PHOTO, kind) for kind in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ico")}
SEEDS |= {f"{kind}, animated": encoded(PHOTO, kind, **FRAMES) for kind in ("png", "gif", "webp", "mpo")}
SEEDS |= {f"png, {mode}": encoded(PHOTO.convert(mode), "PNG") for mode in ("1", "LA", "RGBA")}
SEEDS |= {f"jpeg, {mode}": encoded(PHOTO.convert(mode), "JPEG") for mode in ("CMYK", "L")}
SEEDS |= {f"16 bits, {kind}": encoded(WIDE, kind) for kind in ("png", "tiff")}
SEEDS |= {f"tiff, {name}": encoded(PHOTO, "TIFF", compression=name) for name in ("tiff_lzw", "jpeg", "tiff_deflate")}
SEEDS |= {
    "png, palette": encoded(PHOTO.quantize(16), "PNG", transparency=3),
    "png, palette of alphas": encoded(PHOTO.quantize(16), "PNG", transparency=bytes(range(16))),
    "jpeg, progressive": encoded(PHOTO, "JPEG", progressive=True),
    "bmp, palette": encoded(PHOTO.quantize(16), "BMP"),
    "webp, lossless": encoded(PHOTO, "WEBP", lossless=True),
    "tiff, fax": encoded(PHOTO.convert("1"), "TIFF", compression="group4"),
    "tiff, floating point": encoded(Image.fromarray(pixels(0, (14, 17), kind=np.float32)), "TIFF"),
    "tiff, 32 bits": encoded(Image.fromarray(pixels(0, (14, 17), 1 << 30, np.int32)), "TIFF"),
}
SEEDS |= {"avif": encoded(PHOTO, "AVIF")} if "AVIF" in FORMATS else {}
FILES = tuple(SEEDS.values())


def damaged_image(rng) -> bytes:
    data = damaged(rng, any_of(rng, FILES), FILES)
    if data.startswith(FILES[0][:8]) and rng.random() < 0.5:  # a PNG, whose checksums would stop it
        data, at = bytearray(data), 8
        while at + 12 <= len(data):
            end = at + 8 + int.from_bytes(data[at : at + 4], "big")
            data[end : end + 4] = binascii.crc32(data[at + 4 : end]).to_bytes(4, "big") if end + 4 <= len(data) else b""
            at = end + 4
    return bytes(data)


@target("image")
def image_cases(home) -> Cases:
    def case(rng, folder):
        image = decode(damaged_image(rng), 0, RULE, PIXELS)
        assert image.shape == (3, SIDE, SIDE)
        assert image.dtype == torch.uint8
        return True

    yield case
