"""The corruptions of ImageNet-C as functions of one image; their strengths are in `kedge.studies.corruptions`.

Each takes uint8 pixels (H, W, D), a random generator and its parameters, and returns uint8 pixels. The published sets
were made with scikit-image, OpenCV and ImageMagick; NumPy, SciPy and Pillow do the same arithmetic here. Given the same
random draws, a pixel can differ from theirs by one grey level where the last bit decides which whole number is below
(in `defocus_blur`, `brightness`, `snow` and `elastic_transform`; in the last one very rarely by two).
"""

import functools
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kedge.checks import needs

Pixels = NDArray[np.uint8]
Reals = NDArray[np.floating[Any]]
Rng = np.random.Generator


def through_jpeg(x: Pixels, quality: int) -> Pixels:
    """An image, (H, W, 1) or (H, W, 3), saved by Pillow as JPEG and read again."""
    file = io.BytesIO()
    _picture(x).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).reshape(x.shape)


def _gaussian_noise(x: Pixels, rng: Rng, sigma: float) -> Pixels:
    return _pixels(x / 255 + rng.normal(scale=sigma, size=x.shape))


def _shot_noise(x: Pixels, rng: Rng, photons: float) -> Pixels:
    return _pixels(rng.poisson(x / 255 * photons) / photons)


def _impulse_noise(x: Pixels, rng: Rng, amount: float) -> Pixels:
    """Salt or pepper, equally likely, independent in each channel."""
    hit, salt = rng.random(x.shape) < amount, rng.random(x.shape) < 0.5
    return np.where(hit, np.where(salt, 255, 0), x).astype(np.uint8)


def _gaussian_blur(x: Pixels, rng: Rng, sigma: float) -> Pixels:
    return _pixels(_smooth(x / 255, sigma))


def _defocus_blur(x: Pixels, rng: Rng, radius: float, sigma: float) -> Pixels:
    """Correlate with a disk that a small Gaussian has softened."""
    return _pixels(_ndimage().correlate(x / 255, _disk(radius, sigma)[..., None], mode="mirror"))


@functools.lru_cache
def _disk(radius: float, sigma: float) -> Reals:
    reach, taps = (8, 3) if radius <= 8 else (int(radius), 5)
    line = np.arange(-reach, reach + 1)
    disk = (line**2 + line[:, None] ** 2 <= radius**2).astype(np.float32)  # OpenCV's precision
    disk /= disk.sum()
    steps = np.arange(taps) - taps // 2
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (0, 1):
        disk = _ndimage().correlate1d(disk, weights, axis, mode="mirror")
    return disk.astype(np.float64)


def _glass_blur(x: Pixels, rng: Rng, sigma: float, reach: int, passes: int) -> Pixels:
    """Blur, replace every pixel by a near one, blur.

    The original means to swap the two, but its tuple assignment on views of an array overwrites one by the other, and
    the published images were made so.
    """
    y = _pixels(_smooth(x / 255, sigma))
    for _ in range(passes):
        y = _take_neighbours(y, rng.integers(-reach, reach, size=(2, *x.shape[:2])), reach)
    return _pixels(_smooth(y / 255, sigma))


def _take_neighbours(x: Pixels, offsets: NDArray[np.int64], reach: int) -> Pixels:
    """From the last pixel to the first, in place: each takes the current colour of its neighbour.

    Node p is pixel p before the pass and node n + p is pixel p after it. Each node points to where its colour comes
    from; following all pointers at once, doubling the distance, replaces the loop over pixels.
    """
    height, width = x.shape[:2]
    n = height * width
    pixels = np.arange(n).reshape(height, width)
    inner = slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1)
    sources = (pixels + offsets[0] * width + offsets[1])[inner]  # dy, dx
    before = np.arange(n)
    after = pixels.copy()  # the rim stays as it is
    after[inner] = sources + n * (sources > pixels[inner])  # a later pixel has been rewritten already
    origin = np.concatenate([before, after.ravel()])
    while ((further := origin[origin]) != origin).any():
        origin = further
    taken: Pixels = x.reshape(n, -1)[origin[n:]]
    return taken.reshape(x.shape)


def _motion_blur(x: Pixels, rng: Rng, radius: int, sigma: float) -> Pixels:
    return _smear(x, radius, sigma, rng.uniform(-45, 45))


def _smear(x: Pixels, radius: int, sigma: float, degrees: float) -> Pixels:
    """ImageMagick's motion blur: half a Gaussian, 2 radius + 1 pixels long, in one direction; it rounds."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    angle = math.radians(degrees)
    down, right = (np.ceil(steps * f(angle) - 0.5).astype(int) for f in (math.sin, math.cos))
    height, width = x.shape[:2]
    total = np.zeros(x.shape)
    for weight, dy, dx in zip(weights / weights.sum(), down, right, strict=True):
        rows = (np.arange(height) + dy).clip(0, height - 1)
        columns = (np.arange(width) + dx).clip(0, width - 1)
        total += weight * x[rows[:, None], columns]
    return np.floor(total + 0.5).astype(np.uint8)


def _zoom_blur(x: Pixels, rng: Rng, stop: float, step: float) -> Pixels:
    """The mean of the image and of its enlargements, factor 1 among them."""
    y = (x / 255).astype(np.float32)
    factors = np.arange(1, stop, step)  # not linspace: with some of these ends rounding adds one factor more
    total = np.zeros_like(y)
    for factor in factors:
        total += _enlarge(y, factor)
    return _pixels((y + total) / (len(factors) + 1))


def _enlarge(x: Reals, factor: float) -> Reals:
    """Enlarge the centre so that it fills the frame."""
    sides = x.shape[:2]
    kept = [math.ceil(side / factor) for side in sides]
    starts = [(side - n) // 2 for side, n in zip(sides, kept, strict=True)]
    centre = x[starts[0] : starts[0] + kept[0], starts[1] : starts[1] + kept[1]]
    large: Reals = _ndimage().zoom(centre, (factor, factor, 1), order=1)
    top, left = ((n - side) // 2 for side, n in zip(sides, large.shape[:2], strict=True))
    return large[top : top + sides[0], left : left + sides[1]]


def _snow(
    x: Pixels,
    rng: Rng,
    mean: float,
    sigma: float,
    zoom: float,
    threshold: float,
    radius: int,
    smear: float,
    keep: float,
) -> Pixels:
    """Whiten the image, then add smeared flakes and the same flakes turned by half a circle."""
    y = x.astype(np.float32) / 255
    flakes = _enlarge(rng.normal(mean, sigma, size=(*x.shape[:2], 1)), zoom)
    flakes = np.where(flakes < threshold, 0, flakes)
    flakes = _smear(_pixels(flakes), radius, smear, rng.uniform(-135, -45)) / 255  # (H, W, 1)
    grey = y if x.shape[2] == 1 else y @ np.array([[0.299], [0.587], [0.114]], np.float32)  # (H, W, 1)
    y = keep * y + (1 - keep) * np.maximum(y, grey * 1.5 + 0.5)
    return _pixels(y + flakes + flakes[::-1, ::-1])


def _fog(x: Pixels, rng: Rng, thickness: float, decay: float) -> Pixels:
    y = x / 255
    brightest = y.max()
    height, width = x.shape[:2]
    y = y + thickness * _plasma(max(height, width), rng, decay)[:height, :width, None]
    return _pixels(y * brightest / (brightest + thickness))


def _plasma(side: int, rng: Rng, decay: float) -> Reals:
    """A fractal cloud in [0, 1] by the diamond-square rule on a torus, its side the next power of two."""
    size = 1 << max(1, (side - 1).bit_length())
    cloud = np.zeros((size, size))
    step, wobble = size, 100.0
    while step >= 2:
        half = step // 2
        corners, centres = cloud[::step, ::step], cloud[half::step, half::step]  # views: they fill with the cloud
        pairs = corners + np.roll(corners, -1, axis=0)
        centres[:] = _wobbled(pairs + np.roll(pairs, -1, axis=1), wobble, rng)
        four = centres + np.roll(centres, 1, axis=0) + (corners + np.roll(corners, -1, axis=1))
        cloud[::step, half::step] = _wobbled(four, wobble, rng)
        four = centres + np.roll(centres, 1, axis=1) + (corners + np.roll(corners, -1, axis=0))
        cloud[half::step, ::step] = _wobbled(four, wobble, rng)
        step, wobble = half, wobble / decay
    cloud -= cloud.min()
    return cloud / float(cloud.max())


def _wobbled(four: Reals, wobble: float, rng: Rng) -> Reals:
    """The mean of four neighbours, whose sum comes in, and a random part: ``wobble`` is squared in the original."""
    return four / 4 + wobble * rng.uniform(-wobble, wobble, four.shape)


def _brightness(x: Pixels, rng: Rng, shift: float) -> Pixels:
    """Raise V of HSV. With H and S fixed every channel keeps its ratio to V, the largest one; black becomes grey."""
    y = x / 255
    value = y.max(axis=2, keepdims=True)
    saturation = np.divide(value - y, value, out=np.zeros_like(y), where=value > 0)  # of each channel
    return _pixels((1 - saturation) * np.clip(value + shift, 0, 1))


def _contrast(x: Pixels, rng: Rng, factor: float) -> Pixels:
    y = x / 255
    means = y.mean(axis=(0, 1), keepdims=True)
    return _pixels((y - means) * factor + means)


def _elastic_transform(x: Pixels, rng: Rng, strength: float, sigma: float, jitter: float) -> Pixels:
    """A random affine map, given by what becomes of three points, then a smooth field of random displacements."""
    height, width = x.shape[:2]
    rows, columns = np.indices((height, width))
    side = min(height, width) // 3
    corners = np.array([width, height]) // 2 + side * np.array([[1, 1], [1, -1], [-1, -1]])  # column, row
    moved = corners + rng.uniform(-jitter, jitter, size=(3, 2))
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners)  # (3, 2)
    source = np.rint(1024 * columns[..., None] * back[0]) + np.rint(1024 * (rows[..., None] * back[1] + back[2]))
    source = np.floor((source + 16) / 32) / 32  # as OpenCV: in 1/1024, then the nearest 1/32 of a pixel
    y = _sample((x / 255).astype(np.float32), source[..., 1], source[..., 0], "mirror")
    dx, dy = (
        strength * _ndimage().gaussian_filter(rng.uniform(-1, 1, rows.shape), sigma, mode="reflect", truncate=3.0)
        for _ in range(2)
    )
    return _pixels(_sample(y, rows + dy, columns + dx, "reflect"))


def _pixelate(x: Pixels, rng: Rng, factor: float) -> Pixels:
    height, width = x.shape[:2]
    small = _picture(x).resize((max(1, int(width * factor)), max(1, int(height * factor))), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)).reshape(x.shape)


# In the order of the paper; gaussian_blur is one of its four extra corruptions.
FUNCTIONS: Mapping[str, Callable[..., Pixels]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": lambda x, rng, quality: through_jpeg(x, quality),
    "gaussian_blur": _gaussian_blur,
}


def _pixels(values: Reals) -> Pixels:
    """From [0, 1] to whole numbers by cutting off the fraction, as the published sets have it, not by rounding."""
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def _picture(x: Pixels) -> Image.Image:
    return Image.fromarray(x[..., 0] if x.shape[2] == 1 else x)


def _smooth(x: Reals, sigma: float) -> Reals:
    smoothed: Reals = _ndimage().gaussian_filter(x, (sigma, sigma, 0), mode="nearest", truncate=4.0)
    return smoothed


def _sample(x: Reals, rows: Reals, columns: Reals, mode: str) -> Reals:
    """Bilinear values of each channel at real coordinates."""
    channels = [_ndimage().map_coordinates(x[..., d], (rows, columns), order=1, mode=mode) for d in range(x.shape[2])]
    return np.stack(channels, axis=-1)


def _ndimage() -> Any:
    return needs("scipy", "corruptions", "this corruption").ndimage
