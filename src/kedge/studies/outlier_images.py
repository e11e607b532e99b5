"""Images that are not digits, for the demo: letters, textures, shapes, and altered digits."""

import string

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from kedge.data import ImageSet

SIDE = 28


def letters(n: int, *, seed: int = 0) -> ImageSet:
    """Capital and small letters in Pillow's default font, centered and as large as MNIST's digits."""
    rng = np.random.default_rng(seed)
    # Without letters that look like a digit.
    alphabet = [c for c in string.ascii_letters if c not in "OoIilSsZzBbgqQDGJTY"]
    images = []
    for _ in range(n):
        font = ImageFont.load_default(size=float(rng.uniform(20, 27)))
        letter = str(rng.choice(alphabet))
        canvas = Image.new("L", (2 * SIDE, 2 * SIDE))
        ImageDraw.Draw(canvas).text((SIDE, SIDE), letter, fill=255, font=font, anchor="mm")
        turned = canvas.rotate(float(rng.uniform(-15, 15)), Image.Resampling.BICUBIC)
        left, top, right, bottom = turned.getbbox() or (0, 0, SIDE, SIDE)
        corner = ((left + right - SIDE) // 2, (top + bottom - SIDE) // 2)
        image = turned.crop((*corner, corner[0] + SIDE, corner[1] + SIDE))
        images.append(np.asarray(image.filter(ImageFilter.GaussianBlur(0.5))))
    return ImageSet.from_arrays(np.stack(images), name="letters")


def inverted(data: ImageSet) -> ImageSet:
    """The images with black and white swapped."""
    return ImageSet(255 - data.images, name="inverted")


def noised(data: ImageSet, *, sigma: float = 96.0, seed: int = 0) -> ImageSet:
    """The images under heavy Gaussian noise."""
    noise = torch.randn(data.images.shape, generator=torch.Generator().manual_seed(seed)) * sigma
    return ImageSet((data.images + noise).round().clamp(0, 255).to(torch.uint8), name="noised")


def textures(n: int, *, seed: int = 0) -> ImageSet:
    """Stripes, checks and clouds: images without an object."""
    generator = torch.Generator().manual_seed(seed)
    makers = (_stripes, _checks, _clouds)
    images = torch.stack([makers[i % len(makers)](generator) for i in range(n)])  # (N, H, W) in [0, 1]
    return ImageSet((images * 255).round().to(torch.uint8)[:, None], name="textures")


def shapes(n: int, *, seed: int = 0) -> ImageSet:
    """Outlines of polygons, ellipses and arcs: strokes that form no digit, as outliers for training."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(n):
        canvas = Image.new("L", (2 * SIDE, 2 * SIDE))  # drawn at twice the size, so that scaling down smooths the lines
        draw, width = ImageDraw.Draw(canvas), int(rng.integers(3, 7))
        for _ in range(int(rng.integers(2, 5))):
            corners = rng.uniform(8, 2 * SIDE - 8, (int(rng.integers(3, 6)), 2))
            low, high = corners.min(axis=0), corners.max(axis=0)
            kind = int(rng.integers(3))
            if kind == 0:
                draw.line([*map(tuple, corners), tuple(corners[0])], fill=255, width=width, joint="curve")
            elif kind == 1:
                draw.ellipse([*low, *high], outline=255, width=width)
            else:
                start = float(rng.uniform(0, 360))
                draw.arc([*low, *high], start, start + float(rng.uniform(60, 300)), fill=255, width=width)
        images.append(np.asarray(canvas.resize((SIDE, SIDE), Image.Resampling.BOX)))
    return ImageSet.from_arrays(np.stack(images), name="shapes")


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=generator))


def _stripes(generator: torch.Generator) -> Tensor:
    angle, period = _uniform(0, np.pi, generator), _uniform(3, 12, generator)
    phase = _uniform(0, 2 * np.pi, generator)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return 0.5 + 0.5 * torch.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period + phase)


def _checks(generator: torch.Generator) -> Tensor:
    side, shift = _uniform(3, 8, generator), _uniform(0, 8, generator)
    steps = ((torch.arange(SIDE) + shift) / side).floor()
    return (steps[:, None] + steps[None, :]) % 2


def _clouds(generator: torch.Generator) -> Tensor:
    coarse = torch.rand(1, 1, 7, 7, generator=generator)
    cloud = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=True)[0, 0]
    return ((cloud - cloud.min()) / (cloud.max() - cloud.min())).clamp(0, 1)
