"""The corruptions of ImageNet-C and CIFAR-10-C that the studies use, at the published strengths."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kedge.checks import at_least, needs, one_of, shape_of
from kedge.data.imageset import ImageSet
from kedge.data.mapped import mapped_pixels
from kedge.errors import InputError
from kedge.progress import progress_bar

Pixels = NDArray[np.uint8]
SEVERITIES = (1, 2, 3, 4, 5)
LARGEST_CIFAR = 64  # pixels; larger images get the strengths of ImageNet-C
SAVED_QUALITY = 85  # of every JPEG file of ImageNet-C


def _gaussian_noise(x: Pixels, rng: np.random.Generator, sigma: float) -> Pixels:
    return _pixels(x / 255 + rng.normal(scale=sigma, size=x.shape))


def _gaussian_blur(x: Pixels, rng: np.random.Generator, sigma: float) -> Pixels:
    ndimage = needs("scipy", "corruptions", "this corruption").ndimage
    return _pixels(ndimage.gaussian_filter(x / 255, (sigma, sigma, 0), mode="nearest", truncate=4.0))


def _brightness(x: Pixels, rng: np.random.Generator, shift: float) -> Pixels:
    """Raise V of HSV. With H and S fixed every channel keeps its ratio to V, the largest one; black becomes grey."""
    y = x / 255
    value = y.max(axis=2, keepdims=True)
    saturation = np.divide(value - y, value, out=np.zeros_like(y), where=value > 0)  # of each channel
    return _pixels((1 - saturation) * np.clip(value + shift, 0, 1))


# Hendrycks and Dietterich (ICLR 2019), from their scripts make_cifar_c.py and make_imagenet_c.py: the function of one
# image (H, W, D), and its argument at severities 1 to 5, on 32 x 32 and on 224 x 224 pixels.
CORRUPTIONS: dict[str, tuple[Callable[..., Pixels], tuple[float, ...], tuple[float, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "gaussian_blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1), (1, 2, 3, 4, 6)),
}


def corrupt(images: ImageSet, name: str, severity: int, *, seed: int = 0, folder: Path | None = None) -> ImageSet:
    """Corrupt every image as CIFAR-10-C does or, above 64 pixels, as ImageNet-C does, which saves each as JPEG.

    Args:
        images: The clean images, grey or RGB. Labels and classes are kept.
        name: One of ``CORRUPTIONS``; ``gaussian_blur`` needs SciPy: ``pip install 'kedge[corruptions]'``.
        severity: 1 to 5.
        seed: An image's random draws are fixed by the seed, the name, the severity and the image's index (and NumPy's
            version), not by the images beside it.
        folder: Where to write the pixels, to be memory-mapped; by default they are kept in memory.

    Example:
        >>> clean = ImageSet(torch.full((2, 3, 32, 32), 128, dtype=torch.uint8), name="grey")
        >>> noisy = corrupt(clean, "gaussian_noise", 5)
        >>> noisy.name, round(noisy.images.float().std().item() / 255, 2)
        ('grey gaussian_noise 5', 0.1)
    """
    if not isinstance(images, ImageSet) or images.images.shape[1] not in (1, 3):
        got = images.images if isinstance(images, ImageSet) else images
        raise InputError(f"images must be an ImageSet of 1 or 3 channels; got {shape_of(got)}")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise InputError(f"severity must be a whole number from 1 to 5; got {severity!r}")
    function, *strengths = CORRUPTIONS[one_of("name", name, tuple(CORRUPTIONS))]
    large = max(images.images.shape[2:]) > LARGEST_CIFAR
    key = (at_least("seed", seed, 0), severity, *name.encode())
    title = f"{images.name} {name} {severity}"

    def parts() -> Iterator[Tensor]:
        with progress_bar(title, len(images)) as update:
            for index, image in enumerate(images.images):
                x = image.permute(1, 2, 0).contiguous().cpu().numpy()  # (H, W, D), the layout of image files
                x = function(x, np.random.default_rng((index, *key)), strengths[large][severity - 1])
                x = _through_jpeg(x) if large else x
                yield torch.from_numpy(x.transpose(2, 0, 1).copy())[None]  # (1, D, H, W)
                update(index + 1)

    if folder is None:
        corrupted = torch.empty_like(images.images, memory_format=torch.contiguous_format)
        for index, part in enumerate(parts()):
            corrupted[index] = part[0]
    else:
        identity = [images.checksum, name, severity, seed]
        corrupted = mapped_pixels(folder, title, identity, tuple(images.images.shape), parts)
    return replace(images, images=corrupted, name=title)


def _through_jpeg(x: Pixels) -> Pixels:
    file = io.BytesIO()
    Image.fromarray(x[..., 0] if x.shape[2] == 1 else x).save(file, "JPEG", quality=SAVED_QUALITY)
    return np.asarray(Image.open(file)).reshape(x.shape)


def _pixels(values: NDArray[np.floating[Any]]) -> Pixels:
    """From [0, 1] to whole numbers by cutting off the fraction, as the published sets have it, not by rounding."""
    levels: Pixels = (np.clip(values, 0, 1) * 255).astype(np.uint8)
    return levels
