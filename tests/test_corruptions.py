"""The corruptions against their definitions, written as loops over pixels, and against the programs of the original."""

import colorsys
import io
import itertools
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from kedge.data.imageset import ImageSet
from kedge.errors import InputError, NotReadyError
from kedge.studies.corruption_functions import FUNCTIONS, through_jpeg
from kedge.studies.corruptions import CORRUPTIONS, PARAMETERS, SCALES, SEVERITIES, corrupt

LEVELS = list(itertools.product(SCALES, SEVERITIES))
NOISES = ("gaussian_noise", "shot_noise", "impulse_noise")
FIXED = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur")
NEED_NO_SCIPY = (*NOISES, "motion_blur", "fog", "brightness", "contrast", "pixelate", "jpeg_compression")


def scenes(n, side, channels=3, seed=0):
    """Natural-like images: noise with a 1/f spectrum, and some flat boxes with sharp edges in front of it."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)) + 1 / side
    spectrum = np.fft.fft2(rng.normal(size=(n, channels, side, side))) / frequency
    images = np.fft.ifft2(spectrum).real
    images = 128 + 45 * (images - images.mean((2, 3), keepdims=True)) / images.std((2, 3), keepdims=True)
    for image in images:
        for _ in range(3):
            top, left, high, wide = rng.integers(0, side // 2, size=4)
            image[:, top : top + high + 3, left : left + wide + 3] = rng.uniform(20, 235, (channels, 1, 1))
    return ImageSet(torch.from_numpy(images.clip(0, 255).astype(np.uint8)), torch.arange(n) % 2, "scenes", ("a", "b"))


def one(side, channels=3, seed=0):
    return np.ascontiguousarray(scenes(1, side, channels, seed).images[0].permute(1, 2, 0).numpy())  # (H, W, D)


def pixels(values):
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def is_cut(ours, values, slack=1e-3):
    """Whether ``ours`` are the values, from [0, 1], without their fractions; ``slack``, in gray levels, is rounding."""
    levels = np.clip(values, 0, 1) * 255
    return ((np.floor(levels - slack) <= ours) & (ours <= np.floor(levels + slack))).all()


def distance(x, y):
    return np.abs(np.asarray(x, dtype=int) - np.asarray(y, dtype=int))


def jpeg(x, quality):
    file = io.BytesIO()
    Image.fromarray(x.squeeze()).save(file, format="JPEG", quality=quality, optimize=True)
    return np.asarray(Image.open(io.BytesIO(file.getvalue()))).reshape(x.shape)


def both(name, scale, severity, x, naive, seed=7):
    """The library's image and the definition's, from equal generators."""
    parameters = PARAMETERS[scale][name][severity - 1]
    ours = FUNCTIONS[name](x, np.random.default_rng(seed), *parameters)
    return ours, naive(x, np.random.default_rng(seed), *parameters)


# Gaussian blur, exactly as ImageNet-C and CIFAR-10-C have it.


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("scale", "side", "sigmas"), [("cifar", 32, (0.4, 0.6, 0.7, 0.8, 1.0)), ("imagenet", 224, (1, 2, 3, 4, 6))]
)
def test_gaussian_blur_is_bit_exact(scale, side, sigmas, channels):
    clean = scenes(2, side, channels)
    for severity, sigma in enumerate(sigmas, start=1):
        plain = corrupt(clean, "gaussian_blur", severity, jpeg=None).images
        saved = corrupt(clean, "gaussian_blur", severity, jpeg=85).images
        published = corrupt(clean, "gaussian_blur", severity).images
        for i, image in enumerate(clean.images.numpy()):
            blurred = [gaussian_filter(plane / 255, sigma, mode="nearest", truncate=4.0) for plane in image]
            expected = np.stack([np.uint8(np.clip(plane, 0, 1) * 255) for plane in blurred])
            assert (plain[i].numpy() == expected).all()
            again = jpeg(np.ascontiguousarray(expected.transpose(1, 2, 0)), 85).transpose(2, 0, 1)
            assert (saved[i].numpy() == again).all()
        assert torch.equal(published, saved if scale == "imagenet" else plain)


# The noises: the formula, and the moments that it promises.


@pytest.mark.parametrize(("scale", "severity"), LEVELS)
def test_gaussian_noise(scale, severity):
    sigma = PARAMETERS[scale]["gaussian_noise"][severity - 1][0]
    gray = ImageSet(torch.full((30, 3, 32, 32), 128, dtype=torch.uint8))
    noise = corrupt(gray, "gaussian_noise", severity, scale=scale, jpeg=None).images.double() / 255 - 128 / 255
    width = 0.5 / sigma  # clipped at black and white, half a unit away
    kept = math.erf(width / math.sqrt(2))
    density = math.exp(-(width**2) / 2) / math.sqrt(2 * math.pi)
    variance = sigma**2 * (kept - 2 * width * density + width**2 * (1 - kept))
    assert noise.mean() == pytest.approx(-0.5 / 255, abs=4 * sigma / math.sqrt(noise.numel()))  # the cut-off fraction
    assert noise.var() == pytest.approx(variance, rel=0.03)
    images, channels = noise.flatten(1)[:4], noise.transpose(0, 1).flatten(1)  # none repeats another's noise
    assert (torch.corrcoef(images) - torch.eye(4)).abs().max() < 0.08
    assert (torch.corrcoef(channels) - torch.eye(3)).abs().max() < 0.03


@pytest.mark.parametrize(("scale", "severity"), LEVELS)
def test_shot_noise(scale, severity):
    photons = PARAMETERS[scale]["shot_noise"][severity - 1][0]
    dark = ImageSet(torch.full((30, 3, 32, 32), 51, dtype=torch.uint8))  # a fifth of white
    noisy = corrupt(dark, "shot_noise", severity, scale=scale, jpeg=None).images
    possible = [int(min(k / photons, 1) * 255) for k in range(1000)]
    assert set(noisy.unique().tolist()) <= set(possible)
    rate = 0.2 * photons
    chance = [math.exp(-rate + k * math.log(rate) - math.lgamma(k + 1)) for k in range(1000)]
    mean = sum(p * v for p, v in zip(chance, possible, strict=True))
    variance = sum(p * (v - mean) ** 2 for p, v in zip(chance, possible, strict=True))
    assert noisy.double().mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / noisy.numel()))
    assert noisy.double().var() == pytest.approx(variance, rel=0.03)
    assert variance / 255**2 == pytest.approx(0.2 / photons, rel=0.1)  # Poisson: the variance is the mean


@pytest.mark.parametrize(("scale", "severity"), LEVELS)
def test_impulse_noise(scale, severity):
    amount = PARAMETERS[scale]["impulse_noise"][severity - 1][0]
    gray = ImageSet(torch.full((30, 3, 32, 32), 90, dtype=torch.uint8))
    noisy = corrupt(gray, "impulse_noise", severity, scale=scale, jpeg=None).images
    assert set(noisy.unique().tolist()) == {0, 90, 255}
    spread = 4 * math.sqrt(amount / noisy.numel())
    assert (noisy == 0).double().mean() == pytest.approx(amount / 2, abs=spread)
    assert (noisy == 255).double().mean() == pytest.approx(amount / 2, abs=spread)
    hit = noisy != 90
    assert (hit[:, 0] & hit[:, 1]).double().mean() == pytest.approx(amount**2, abs=spread)  # each channel of its own


# The blurs.


def mirrored(i, n):
    """Reflection that does not repeat the edge: -1 becomes 1."""
    i = abs(i) % (2 * n - 2)
    return i if i < n else 2 * n - 2 - i


def disk(radius, sigma):
    reach = 8 if radius <= 8 else radius
    side = range(-reach, reach + 1)
    flat = {(i, j): float(i * i + j * j <= radius * radius) for i in side for j in side}
    area = sum(flat.values())
    arm = 1 if radius <= 8 else 2
    bell = {t: math.exp(-t * t / (2 * sigma * sigma)) for t in range(-arm, arm + 1)}
    total = sum(bell.values())
    inside = {i: mirrored(i + reach, 2 * reach + 1) - reach for i in range(-reach - arm, reach + arm + 1)}
    return {
        (i, j): sum(
            flat[inside[i + s], inside[j + t]] / area * bell[s] * bell[t] / total**2 for s in bell for t in bell
        )
        for i, j in flat
    }


def defocus_blur(x, rng, radius, sigma):
    kernel = {offset: weight for offset, weight in disk(radius, sigma).items() if weight > 1e-12}
    n = len(x)
    out = np.zeros(x.shape)
    for h, w in np.ndindex(n, n):
        for (i, j), weight in kernel.items():
            out[h, w] += weight * x[mirrored(h + i, n), mirrored(w + j, n)] / 255
    return out


def glass_blur(x, rng, sigma, reach, passes):
    y = pixels(gaussian_filter(x / 255, (sigma, sigma, 0), mode="nearest", truncate=4.0))
    for _ in range(passes):
        dy, dx = rng.integers(-reach, reach, size=(2, *x.shape[:2]))
        for h in range(len(y) - reach, reach, -1):
            for w in range(len(y) - reach, reach, -1):
                there = h + dy[h, w], w + dx[h, w]
                # As in the original: these are views of y, so that the line reads as a swap and copies.
                y[h, w], y[there] = y[there], y[h, w]
    return pixels(gaussian_filter(y / 255, (sigma, sigma, 0), mode="nearest", truncate=4.0))


def smeared(x, radius, sigma, degrees):
    """ImageMagick's MotionBlurImage."""
    width = 2 * radius + 1
    weights = [math.exp(-i * i / (2 * sigma * sigma)) for i in range(width)]
    x_step, y_step = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    out = np.zeros(x.shape)
    for h, w in np.ndindex(x.shape[:2]):
        for i, weight in enumerate(weights):
            row = min(max(h + math.ceil(i * y_step - 0.5), 0), x.shape[0] - 1)
            column = min(max(w + math.ceil(i * x_step - 0.5), 0), x.shape[1] - 1)
            out[h, w] += weight / sum(weights) * x[row, column]
    return np.floor(out + 0.5).astype(np.uint8)


def motion_blur(x, rng, radius, sigma):
    return smeared(x, radius, sigma, rng.uniform(-45, 45))


def enlarged(x, factor):
    """The centre, bilinearly enlarged with its corner pixels on the corners, and cut to the frame."""
    n = len(x)
    kept = math.ceil(n / factor)
    start = (n - kept) // 2
    centre = x[start : start + kept, start : start + kept]
    size = round(kept * factor)
    at = np.arange(size) * (kept - 1) / max(size - 1, 1)
    rows = np.stack([[np.interp(at, range(kept), line[:, d]) for d in range(x.shape[2])] for line in centre])
    grid = np.stack([[np.interp(at, range(kept), rows[:, d, w]) for w in range(size)] for d in range(x.shape[2])])
    first = (size - n) // 2
    return grid.transpose(2, 1, 0)[first : first + n, first : first + n]


def zoom_blur(x, rng, stop, step):
    factors = np.arange(1, stop, step)
    return (x / 255 + sum(enlarged(x / 255, f) for f in factors)) / (len(factors) + 1)


def test_zoom_factors_are_those_of_arange():
    """np.arange has rounding of its own: 1.06 and 1.11 are themselves reached, 1.16 is not."""
    counts = [[len(np.arange(1, *c)) for c in PARAMETERS[scale]["zoom_blur"]] for scale in SCALES]
    assert counts == [[7, 12, 16, 21, 26], [12, 16, 11, 13, 11]]


# The weather.


def snow(x, rng, mean, sigma, zoom, threshold, radius, smear, keep):
    layer = enlarged(mean + sigma * rng.standard_normal(x.shape[:2])[..., None], zoom)
    layer = pixels(np.where(layer < threshold, 0, layer))
    layer = smeared(layer, radius, smear, rng.uniform(-135, -45))[..., 0] / 255
    out = np.empty(x.shape)
    n = len(x)
    for h, w in np.ndindex(n, n):
        r, g, b = x[h, w] / 255
        white = 1.5 * (0.299 * r + 0.587 * g + 0.114 * b) + 0.5
        flakes = layer[h, w] + layer[n - 1 - h, n - 1 - w]
        out[h, w] = [keep * v + (1 - keep) * max(v, white) + flakes for v in (r, g, b)]
    return out


def plasma(n, rng, decay):
    """Diamond-square on a torus, a point at a time."""
    cloud, step, wobble = {(0, 0): 0.0}, n, 100.0

    def settle(h, w, neighbours):
        mean = sum(cloud[i % n, j % n] for i, j in neighbours) / 4
        cloud[h, w] = mean + wobble * rng.uniform(-wobble, wobble)

    while step >= 2:
        half, lattice = step // 2, range(0, n, step)
        for h, w in itertools.product(lattice, lattice):
            settle(h + half, w + half, [(h, w), (h + step, w), (h, w + step), (h + step, w + step)])
        for h, w in itertools.product(lattice, lattice):
            settle(h, w + half, [(h, w), (h, w + step), (h + half, w + half), (h - half, w + half)])
        for h, w in itertools.product(lattice, lattice):
            settle(h + half, w, [(h, w), (h + step, w), (h + half, w + half), (h + half, w - half)])
        step, wobble = half, wobble / decay
    grid = np.array([[cloud[h, w] for w in range(n)] for h in range(n)])
    return (grid - grid.min()) / (grid.max() - grid.min())


@pytest.mark.parametrize(
    ("scale", "severity", "side", "map_side"),
    [*((*level, 32, 32) for level in LEVELS), ("cifar", 3, 28, 32), ("imagenet", 1, 40, 64)],
)
def test_fog(scale, severity, side, map_side):
    def naive(x, rng, thickness, decay):
        fog = thickness * plasma(map_side, rng, decay)[:side, :side, None]
        top = x.max() / 255
        return (x / 255 + fog) * top / (top + thickness)

    ours, expected = both("fog", scale, severity, one(side), naive)
    assert is_cut(ours, expected)


# Color, shape and storage.


@pytest.mark.parametrize(("scale", "severity"), LEVELS)
def test_brightness(scale, severity):
    def naive(x, rng, shift):
        out = np.empty(x.shape)
        for h, w in np.ndindex(x.shape[:2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*(x[h, w] / 255))
            out[h, w] = colorsys.hsv_to_rgb(hue, saturation, min(value + shift, 1))
        return out

    x = one(24)
    x[0, :3] = [[0, 0, 0], [255, 0, 0], [255, 255, 255]]
    ours, expected = both("brightness", scale, severity, x, naive)
    assert is_cut(ours, expected)
    shift = PARAMETERS[scale]["brightness"][severity - 1][0]
    assert ours[0, :3].tolist() == [[int(shift * 255)] * 3, [255, 0, 0], [255] * 3]
    gray = x[..., :1]
    assert (FUNCTIONS["brightness"](gray, None, shift) == pixels(gray / 255 + shift)).all()


def contrast(x, rng, factor):
    means = [math.fsum(x[..., d].ravel() / 255) / x[..., d].size for d in range(3)]
    return np.stack([(x[..., d] / 255 - means[d]) * factor + means[d] for d in range(3)], axis=-1)


def bilinear(x, row, column, place):
    """The value between four pixels; ``place`` says where a pixel outside the frame is taken from."""
    top, left = math.floor(row), math.floor(column)
    down, right = row - top, column - left
    rows, columns = [place(top + i, len(x)) for i in (0, 1)], [place(left + i, x.shape[1]) for i in (0, 1)]
    weights = ((1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right)
    corners = itertools.product(rows, columns)
    return sum(weight * x[corner] for weight, corner in zip(weights, corners, strict=True))


def repeated(i, n):
    """Reflection that repeats the edge: -1 becomes 0."""
    i = i % (2 * n)
    return i if i < n else 2 * n - 1 - i


@pytest.mark.parametrize(("scale", "severity"), LEVELS)
def test_elastic_transform(scale, severity):
    def naive(x, rng, strength, sigma, jitter):
        n, third = len(x), len(x) // 3
        before = n // 2 + third * np.array([[1, 1], [1, -1], [-1, -1]])
        after = before + rng.uniform(-jitter, jitter, size=(3, 2))
        edges_before, edges_after = (before[1:] - before[0]).T, (after[1:] - after[0]).T
        matrix = edges_before @ np.linalg.inv(edges_after)  # maps an edge back; a point by way of the first corner
        warped = np.empty(x.shape)
        for h, w in np.ndindex(n, n):
            column, row = before[0] + matrix @ (np.array([w, h]) - after[0])
            warped[h, w] = bilinear(x / 255, row, column, mirrored)
        dx, dy = (
            strength * gaussian_filter(rng.uniform(-1, 1, (n, n)), sigma, mode="reflect", truncate=3.0)
            for _ in range(2)
        )
        moved = [bilinear(warped, h + dy[h, w], w + dx[h, w], repeated) for h, w in np.ndindex(n, n)]
        return np.reshape(moved, x.shape)

    side = 32 if scale == "cifar" else 48
    x = pixels(gaussian_filter(one(side) / 255, (3, 3, 0)))  # smooth, so that 1/64 of a pixel cannot matter
    ours, expected = both("elastic_transform", scale, severity, x, naive)
    assert is_cut(ours, expected, slack=0.5)
    assert distance(ours, x).mean() > 0.5


def pixelate(x, rng, factor):
    small = Image.fromarray(x.squeeze()).resize((int(32 * factor), int(32 * factor)), Image.Resampling.BOX)
    return np.asarray(small.resize((32, 32), Image.Resampling.BOX)).reshape(x.shape)


def jpeg_compression(x, rng, quality):
    return jpeg(x, quality)


@pytest.mark.parametrize(("scale", "severity"), LEVELS)
@pytest.mark.parametrize(
    ("naive", "side", "channels"),
    [(defocus_blur, 16, 3), (zoom_blur, 32, 3), (snow, 20, 3), (contrast, 24, 3), (motion_blur, 16, 3)]
    + [(naive, 32, channels) for naive in (pixelate, jpeg_compression) for channels in (1, 3)]
    + [(glass_blur, 24, channels) for channels in (1, 3)],
)
def test_a_corruption_is_its_definition(naive, side, channels, scale, severity):
    ours, expected = both(naive.__name__, scale, severity, one(side, channels), naive)
    assert (ours == expected).all() if expected.dtype == np.uint8 else is_cut(ours, expected)


# Numbers that the programs of the original gave.


class Draws:
    """A generator whose uniform numbers are given."""

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def uniform(self, low, high, size=None):
        return low + (high - low) * np.asarray(self.arrays.pop(0)).reshape(size or ())


# ImageMagick 7.1.2-30, OpenCV 4.11.0, scikit-image 0.26.0: the pixels (0, 0), (5, 4) and (11, 11), and the sum of all.
RECORDED = {
    ("motion_blur", (4, 2.5)): ([[17, 34, 51], [80, 74, 131], [44, 165, 30]], 54279),
    ("defocus_blur", (1.5, 0.1)): ([[34, 41, 48], [126, 113, 129], [112, 112, 140]], 54317),
    ("defocus_blur", (10, 0.5)): ([[119, 135, 132], [124, 131, 127], [120, 129, 132]], 55295),
    ("elastic_transform", (3.2, 1.28, 1.6)): ([[16, 26, 36], [175, 213, 108], [113, 141, 88]], 53960),
    ("brightness", (0.2,)): ([[51, 51, 51], [62, 123, 184], [103, 255, 86]], 64961),
    ("gaussian_blur", (2,)): ([[44, 51, 57], [129, 130, 131], [88, 159, 95]], 52295),
}


@pytest.mark.parametrize(("name", "parameters"), RECORDED)
def test_recorded_outputs_of_the_original_programs(name, parameters):
    i, j = np.indices((12, 12))
    x = np.stack([(37 * i * i + 11 * j * d + 5 * i * j) % 256 for d in (1, 2, 3)], axis=-1).astype(np.uint8)
    draws = {
        "motion_blur": Draws(14 / 90),  # -31 degrees
        "elastic_transform": Draws(
            [[0.1, 0.9], [0.4, 0.2], [0.7, 0.5]], np.arange(144) * 7 % 13 / 13, np.arange(144) * 5 % 11 / 11
        ),
    }
    ours = FUNCTIONS[name](x, draws.get(name), *parameters)
    values, total = RECORDED[name, parameters]
    assert ours[[0, 5, 11], [0, 4, 11]].tolist() == values
    assert abs(int(ours.sum()) - total) <= (2 if name == "brightness" else 0)


# All of them.


def test_names_and_parameters_are_complete():
    assert CORRUPTIONS[0] == "gaussian_noise"
    assert CORRUPTIONS[-1] == "gaussian_blur"
    assert len(CORRUPTIONS) == 15
    for scale in SCALES:
        assert tuple(PARAMETERS[scale]) == CORRUPTIONS
        assert all(len(levels) == len(set(levels)) == 5 for levels in PARAMETERS[scale].values())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_grows(name, scale):
    clean = scenes(24, 32) if scale == "cifar" else scenes(2, 112)
    away = [distance(corrupt(clean, name, s, jpeg=None).images, clean.images).mean() for s in SEVERITIES]
    if name == "elastic_transform":  # published so: the affine part shrinks while the elastic part grows
        assert min(away) > 20
        return
    # These have several parameters, and not every one of them grows at each step; fog and motion also vary by chance.
    slack = 0.9 if name in ("glass_blur", "motion_blur", "snow", "fog") else 1.0
    assert all(later > slack * earlier for earlier, later in itertools.pairwise(away))
    assert away[4] > 1.15 * away[0]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_does_not_depend_on_those_beside_it(name):
    clean = scenes(6, 32)
    whole = corrupt(clean, name, 3, seed=5).images
    assert torch.equal(whole, corrupt(clean, name, 3, seed=5).images)
    assert torch.equal(whole[:2], corrupt(clean.subset([0, 1]), name, 3, seed=5).images)
    for indices in ([4, 1], torch.tensor([4, 1])):
        assert torch.equal(whole[[4, 1]], corrupt(clean.subset([4, 1]), name, 3, seed=5, indices=indices).images)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_decides_what_is_random(name):
    clean = ImageSet(scenes(1, 32).images.expand(2, -1, -1, -1))
    first, other = (corrupt(clean, name, 4, seed=seed).images for seed in (0, 1))
    assert torch.equal(first, other) == torch.equal(first[0], first[1]) == (name in FIXED)


def test_names_and_severities_draw_apart():
    gray = ImageSet(torch.full((1, 3, 32, 32), 128, dtype=torch.uint8))
    noises = [corrupt(gray, "gaussian_noise", s).images.flatten().double() for s in SEVERITIES]
    assert (torch.corrcoef(torch.stack(noises)) - torch.eye(5)).abs().max() < 0.1


@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 3, 20, 33), (2, 3, 5, 4), (1, 1, 70, 66), (0, 3, 32, 32)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_any_size_keeps_its_shape_and_labels(name, shape):
    noise = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    clean, before = ImageSet(noise, torch.arange(shape[0]), "set", ("a", "b")), noise.clone()
    for severity in (1, 5):
        dirty = corrupt(clean, name, severity)
        assert (dirty.images.shape, dirty.images.dtype) == (shape, torch.uint8)
        assert dirty.images.is_contiguous()
        assert torch.equal(dirty.labels, torch.arange(shape[0]))
        assert (dirty.name, dirty.classes) == (f"set {name} {severity}", ("a", "b"))
    assert torch.equal(clean.images, before)
    assert corrupt(ImageSet(clean.images), name, 1).labels is None


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_black_and_white_images(name, value):
    flat = ImageSet(torch.full((1, 3, 32, 32), value, dtype=torch.uint8))
    dirty = corrupt(flat, name, 3).images
    if name.endswith(("_blur", "_transform", "_compression")) or name in ("pixelate", "contrast"):
        assert distance(dirty, flat.images).max() <= 1  # a fraction just below white may be cut off


def test_gray_images_are_the_channels_of_gray_rgb():
    gray = scenes(2, 32, 1)
    rgb = ImageSet(gray.images.expand(-1, 3, -1, -1))
    for name in CORRUPTIONS:
        if name in (*NOISES, "jpeg_compression"):
            continue  # noise of their own in each channel; conversion to YCbCr
        three, one_channel = corrupt(rgb, name, 3).images, corrupt(gray, name, 3).images
        assert distance(three, one_channel).max() <= 1, name


def test_the_scale_follows_the_larger_side():
    for side, scale in ((32, "cifar"), (64, "cifar"), (65, "imagenet"), (96, "imagenet")):
        clean = ImageSet(scenes(1, side).images[:, :, :32])
        named = corrupt(clean, "gaussian_blur", 2, scale=scale)
        assert torch.equal(corrupt(clean, "gaussian_blur", 2).images, named.images)
    small = scenes(1, 32)
    saved = corrupt(small, "contrast", 1, scale="imagenet")
    plain = corrupt(small, "contrast", 1, scale="imagenet", jpeg=None)
    x = np.ascontiguousarray(plain.images[0].permute(1, 2, 0).numpy())
    assert (saved.images[0].permute(1, 2, 0).numpy() == jpeg(x, 85)).all()
    assert (through_jpeg(x, 30) == jpeg(x, 30)).all()


# Refusals.

SMALL = ImageSet(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), name="small")


def test_an_unknown_name_lists_the_known_and_says_why_frost_is_missing():
    with pytest.raises(InputError, match=r"got 'frost'.*photographs") as caught:
        corrupt(SMALL, "frost", 1)
    assert all(repr(name) in str(caught.value) for name in CORRUPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"severity": wrong}, "severity must be .* from 1 to 5") for wrong in (0, 6, -1, 2.0, True, "3", None)),
        *(({"jpeg": wrong}, "jpeg must be .* from 1 to 100") for wrong in (0, True, "best")),
        ({"scale": "tiny"}, "scale must be one of 'cifar', 'imagenet'; got 'tiny'"),
        ({"seed": -1}, "seed must be a whole number of at least 0; got -1"),
        ({"indices": [0]}, r"indices must be whole numbers from 0, one per image, \(2,\); got torch.int64 \(1,\)"),
        ({"indices": [0, -1]}, "the smallest -1"),
        ({"indices": [0.0, 1.0]}, "got torch.float32"),
        ({"indices": [True, False]}, "got torch.bool"),
        ({"indices": []}, r"got torch.int64 \(0,\)"),
        ({"images": ImageSet(torch.zeros(2, 4, 8, 8, dtype=torch.uint8))}, "1 or 3 channels .*; got 4"),
        ({"images": SMALL.images}, r"images must be an ImageSet; got \(2, 3, 8, 8\)"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments, message):
    with pytest.raises(InputError, match=message):
        corrupt(**{"images": SMALL, "name": "fog", "severity": 1} | arguments)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_without_scipy(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    if name in NEED_NO_SCIPY:
        assert len(corrupt(SMALL, name, 1)) == 2
    else:
        with pytest.raises(NotReadyError, match=r"needs scipy.*kedge\[corruptions\]"):
            corrupt(SMALL, name, 1)
