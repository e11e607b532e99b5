"""ImageNet-C style corruptions of any image set, at the strengths of ImageNet-C and of CIFAR-10-C."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kedge.checks import at_least, one_of, shape_of
from kedge.data.imageset import ImageSet
from kedge.errors import InputError
from kedge.studies.corruption_functions import FUNCTIONS, through_jpeg

CORRUPTIONS = tuple(FUNCTIONS)
SEVERITIES = (1, 2, 3, 4, 5)
SCALES = ("cifar", "imagenet")
_LARGEST_CIFAR = 64  # pixels
_SAVED_QUALITY = 85  # of every ImageNet-C file
_FROST = "frost is left out, because it lays ImageNet-C's own photographs of frost over an image"

_Levels = tuple[tuple[float, ...], ...]

# Hendrycks and Dietterich (ICLR 2019), from their scripts make_cifar_c.py and make_imagenet_c.py: the arguments of each
# function at severities 1 to 5, on 32 x 32 and on 224 x 224 pixels.
PARAMETERS: Mapping[str, Mapping[str, _Levels]] = {
    "cifar": {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "elastic_transform": ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
        "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1,)),
    },
    "imagenet": {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (  # fractions of 244 in the original, which notes itself that 224 was meant
            (488, 170.8, 24.4),
            (488, 19.52, 48.8),
            (12.2, 2.44, 4.88),
            (17.08, 2.44, 4.88),
            (29.28, 2.44, 4.88),
        ),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
        "gaussian_blur": ((1,), (2,), (3,), (4,), (6,)),
    },
}


def corrupt(
    images: ImageSet,
    name: str,
    severity: int,
    *,
    scale: str | None = None,
    seed: int = 0,
    indices: Tensor | Sequence[int] | None = None,
    jpeg: int | str | None = "published",
) -> ImageSet:
    """Corrupt every image as ImageNet-C or CIFAR-10-C does: fourteen of its fifteen corruptions, and Gaussian blur.

    ``frost`` is left out: it lays ImageNet-C's own photographs of frost over an image. The blurs except
    ``motion_blur``, ``snow`` and ``elastic_transform`` need SciPy: ``pip install 'kedge[corruptions]'``.

    Args:
        images: The clean images, grey or RGB. Labels and classes are kept.
        name: One of ``CORRUPTIONS``.
        severity: 1 to 5.
        scale: ``"cifar"`` takes the strengths made for 32 x 32 pixels, ``"imagenet"`` those for 224 x 224; None takes
            the former up to 64 pixels. Other sizes get the same numbers: nothing is rescaled.
        seed: An image's random draws are fixed by the seed, the name, the severity and the image's index (and NumPy's
            version), not by the images beside it.
        indices: The images' indices in the whole set, if these are a part of it; 0, 1, 2, ... by default.
        jpeg: The quality at which each result is saved as JPEG and read again, or None for not at all;
            ``"published"`` is 85 at the scale ``"imagenet"`` and None at ``"cifar"``.

    Example:
        >>> clean = ImageSet(torch.full((2, 3, 32, 32), 128, dtype=torch.uint8), name="grey")
        >>> noisy = corrupt(clean, "gaussian_noise", 5)
        >>> noisy.name, round(noisy.images.float().std().item() / 255, 2)
        ('grey gaussian_noise 5', 0.1)
    """
    if not isinstance(images, ImageSet):
        raise InputError(
            f"images must be an ImageSet; got {shape_of(images)}: pass ImageSet(images), or "
            "set.to_memory(preprocess) for a streamed set"
        )
    channels, height, width = images.images.shape[1:]
    if channels not in (1, 3):
        raise InputError(f"images must have 1 or 3 channels to be corrupted; got {channels} in the set {images.name!r}")
    if name not in CORRUPTIONS:
        raise InputError(f"name must be one of {', '.join(map(repr, CORRUPTIONS))}; got {name!r} ({_FROST})")
    if isinstance(severity, bool) or not isinstance(severity, int) or severity not in SEVERITIES:
        raise InputError(f"severity must be a whole number from 1 to 5; got {severity!r}")
    if scale is None:
        scale = "cifar" if max(height, width) <= _LARGEST_CIFAR else "imagenet"
    parameters = PARAMETERS[one_of("scale", scale, SCALES)][name][severity - 1]
    quality = _quality(jpeg, scale)
    key = (at_least("seed", seed, 0), severity, *name.encode())

    corrupted = torch.empty_like(images.images, memory_format=torch.contiguous_format)
    for i, index in enumerate(_checked(indices, len(images))):
        x = images.images[i].permute(1, 2, 0).contiguous().cpu().numpy()  # (H, W, D), the layout of image files
        x = FUNCTIONS[name](x, np.random.default_rng((index, *key)), *parameters)
        if quality is not None:
            x = through_jpeg(x, quality)
        corrupted[i] = torch.from_numpy(x.transpose(2, 0, 1).copy())  # (D, H, W)
    return replace(images, images=corrupted, name=f"{images.name} {name} {severity}")


def _quality(jpeg: int | str | None, scale: str) -> int | None:
    if jpeg == "published":
        return _SAVED_QUALITY if scale == "imagenet" else None
    if jpeg is None or (isinstance(jpeg, int) and not isinstance(jpeg, bool) and 1 <= jpeg <= 100):
        return jpeg
    raise InputError(f'jpeg must be "published", None or a quality from 1 to 100; got {jpeg!r}')


def _checked(indices: Tensor | Sequence[int] | None, n: int) -> Sequence[int]:
    if indices is None:
        return range(n)
    values = torch.as_tensor(indices, dtype=torch.long if len(indices) == 0 else None)
    whole = not (values.is_floating_point() or values.dtype == torch.bool)  # a mask is no list of indices
    if not whole or values.shape != (n,) or bool((values < 0).any()):
        raise InputError(
            f"indices must be whole numbers from 0, one per image, ({n},); got {values.dtype} {shape_of(values)}, "
            f"the smallest {values.min().item() if values.numel() else None}"
        )
    return [int(index) for index in values]
