"""Photographs of known things in other conditions: blurred, dimmed, compressed, rotated."""

import io
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter

from kedge.checks import one_of
from kedge.data import ImageSet

BLUR, DIM, QUALITY, DEGREES = 1.5, 0.4, 10, 15  # at 160 pixels: standard deviation, factor, of JPEG, angle
MARGIN = 3  # pixels beside the corners, over which the filters reach


def _compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return Image.open(file).convert("RGB")


def _rotated(image: Image.Image) -> Image.Image:
    """Turned, and the largest part of the same shape without corners, scaled up again."""
    turned = image.rotate(DEGREES, Image.Resampling.BICUBIC)
    angle = math.radians(DEGREES)
    short, long = sorted(image.size)
    kept = short / (short * math.cos(angle) + long * math.sin(angle))
    left, top = (side * (1 - kept) / 2 + MARGIN for side in image.size)
    box = (left, top, image.width - left, image.height - top)
    return turned.resize(image.size, Image.Resampling.BICUBIC, box=box)


SHIFTS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(BLUR)),
    "dimmed": lambda image: ImageEnhance.Brightness(image).enhance(DIM),
    "compressed": _compressed,
    "rotated": _rotated,
}


def shifted_images(images: ImageSet, name: str) -> ImageSet:
    """RGB images under one of `SHIFTS`, with their labels.

    Example:
        >>> white = ImageSet(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8), name="white")
        >>> shifted_images(white, "dimmed").images.unique()
        tensor([102], dtype=torch.uint8)
    """
    change = SHIFTS[one_of("name", name, tuple(SHIFTS))]
    arrays = (np.asarray(change(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images.images)
    shifted = torch.stack([torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays])
    return replace(images, images=shifted, name=f"{images.name}, {name}")
