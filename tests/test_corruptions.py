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
from kedge.studies.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from kedge.studies.imagenet_c import IMAGENET_T

# As in the scripts that made the published sets: at 32 x 32 and 224 x 224 pixels.
SIGMAS = {32: (0.4, 0.6, 0.7, 0.8, 1.0), 224: (1, 2, 3, 4, 6)}
SHIFTS = {32: (0.05, 0.1, 0.15, 0.2, 0.3), 224: (0.1, 0.2, 0.3, 0.4, 0.5)}
NOISES = {32: (0.04, 0.06, 0.08, 0.09, 0.10), 224: (0.08, 0.12, 0.18, 0.26, 0.38)}


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


def saved(x):
    """An image (D, H, W) as a JPEG file of quality 85 has it."""
    file = io.BytesIO()
    Image.fromarray(x.transpose(1, 2, 0).squeeze()).save(file, format="JPEG", quality=85, optimize=True)
    return np.asarray(Image.open(file)).reshape(*x.shape[1:], -1).transpose(2, 0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", SIGMAS)
def test_gaussian_blur_is_bit_exact(side, channels):
    clean = scenes(2, side, channels)
    for severity, sigma in enumerate(SIGMAS[side], start=1):
        for image, ours in zip(clean.images.numpy(), corrupt(clean, "gaussian_blur", severity).images, strict=True):
            blurred = [gaussian_filter(plane / 255, sigma, mode="nearest", truncate=4.0) for plane in image]
            expected = np.stack([np.uint8(np.clip(plane, 0, 1) * 255) for plane in blurred])
            assert (ours.numpy() == (saved(expected) if side == 224 else expected)).all()


def test_gaussian_noise_has_the_moments_of_its_definition():
    for severity, sigma in zip(SEVERITIES, NOISES[32], strict=True):
        gray = ImageSet(torch.full((30, 3, 32, 32), 128, dtype=torch.uint8))
        noise = corrupt(gray, "gaussian_noise", severity).images.double() / 255 - 128 / 255
        width = 0.5 / sigma  # clipped at black and white, half a unit away
        kept = math.erf(width / math.sqrt(2))
        density = math.exp(-(width**2) / 2) / math.sqrt(2 * math.pi)
        variance = sigma**2 * (kept - 2 * width * density + width**2 * (1 - kept))
        cut_off = -0.5 / 255  # the mean of the fractions
        assert noise.mean() == pytest.approx(cut_off, abs=4 * sigma / math.sqrt(noise.numel()))
        assert noise.var() == pytest.approx(variance, rel=0.03)
        images, channels = noise.flatten(1)[:4], noise.transpose(0, 1).flatten(1)  # none repeats another's noise
        assert (torch.corrcoef(images) - torch.eye(4)).abs().max() < 0.08
        assert (torch.corrcoef(channels) - torch.eye(3)).abs().max() < 0.03
    assert CORRUPTIONS["gaussian_noise"][1:] == tuple(NOISES.values())


def test_brightness_raises_the_value_of_hsv():
    clean = scenes(1, 24)
    clean.images[0, :, 0, :3] = torch.tensor([[0, 255, 255], [0, 0, 255], [0, 0, 255]])  # black, red, white
    for severity, shift in zip(SEVERITIES, SHIFTS[32], strict=True):
        ours = corrupt(clean, "brightness", severity).images[0].permute(1, 2, 0).numpy()
        for h, w in np.ndindex(24, 24):
            hue, saturation, value = colorsys.rgb_to_hsv(*(clean.images[0, :, h, w].numpy() / 255))
            levels = 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + shift, 1)))
            assert ((np.floor(levels - 1e-3) <= ours[h, w]) & (ours[h, w] <= np.floor(levels + 1e-3))).all()
        assert ours[0, :3].tolist() == [[int(shift * 255)] * 3, [255, 0, 0], [255] * 3]
    assert CORRUPTIONS["brightness"][1:] == tuple(SHIFTS.values())


# scikit-image 0.26.0 and SciPy: the pixels (0, 0), (5, 4) and (11, 11), and the sum of all.
RECORDED = {
    ("brightness", 0.2): ([[51, 51, 51], [62, 123, 184], [103, 255, 86]], 64961),
    ("gaussian_blur", 2): ([[44, 51, 57], [129, 130, 131], [88, 159, 95]], 52295),
}


@pytest.mark.parametrize(("name", "strength"), RECORDED)
def test_recorded_outputs_of_the_original_programs(name, strength):
    i, j = np.indices((12, 12))
    x = np.stack([(37 * i * i + 11 * j * d + 5 * i * j) % 256 for d in (1, 2, 3)], axis=-1).astype(np.uint8)
    ours = CORRUPTIONS[name][0](x, None, strength)
    values, total = RECORDED[name, strength]
    assert ours[[0, 5, 11], [0, 4, 11]].tolist() == values
    assert abs(int(ours.sum()) - total) <= 2


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_grows_and_an_image_does_not_depend_on_those_beside_it(name):
    for clean in (scenes(6, 32), scenes(2, 112)):
        dirty = [corrupt(clean, name, severity) for severity in SEVERITIES]
        away = [(each.images.int() - clean.images.int()).abs().double().mean() for each in dirty]
        assert all(later > earlier for earlier, later in itertools.pairwise(away))
        assert torch.equal(dirty[2].images[:2], corrupt(clean.subset([0, 1]), name, 3).images)
    same = ImageSet(clean.images[:1].expand(2, -1, -1, -1))
    first, other = (corrupt(same, name, 4, seed=seed).images for seed in (0, 1))
    assert torch.equal(first, other) == torch.equal(first[0], first[1]) == (name != "gaussian_noise")


def test_severities_draw_apart():
    gray = ImageSet(torch.full((1, 3, 32, 32), 128, dtype=torch.uint8))
    noises = [corrupt(gray, "gaussian_noise", s).images.flatten().double() for s in SEVERITIES]
    assert (torch.corrcoef(torch.stack(noises)) - torch.eye(5)).abs().max() < 0.1


@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 3, 20, 33), (1, 1, 70, 66), (0, 3, 32, 32)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_any_size_keeps_its_shape_and_labels(name, shape):
    noise = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    clean, before = ImageSet(noise, torch.arange(shape[0]), "set", ("a", "b")), noise.clone()
    dirty = corrupt(clean, name, 5)
    assert (dirty.images.shape, dirty.images.dtype) == (shape, torch.uint8)
    assert dirty.images.is_contiguous()
    assert torch.equal(dirty.labels, torch.arange(shape[0]))
    assert (dirty.name, dirty.classes) == (f"set {name} 5", ("a", "b"))
    assert torch.equal(clean.images, before)


SMALL = ImageSet(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), name="small")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"severity": wrong}, "severity must be .* from 1 to 5") for wrong in (0, 6, True, "3", None)),
        ({"seed": -1}, "seed must be a whole number of at least 0; got -1"),
        ({"name": "frost"}, "name must be one of 'gaussian_noise', .*; got 'frost'"),
        ({"images": ImageSet(torch.zeros(2, 4, 8, 8, dtype=torch.uint8))}, "1 or 3 channels; got .2, 4, 8, 8"),
        ({"images": SMALL.images}, r"images must be an ImageSet .*; got \(2, 3, 8, 8\)"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments, message):
    with pytest.raises(InputError, match=message):
        corrupt(**{"images": SMALL, "name": "gaussian_noise", "severity": 1} | arguments)


def test_only_the_blur_needs_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert len(corrupt(SMALL, "brightness", 1)) == 2
    with pytest.raises(NotReadyError, match=r"needs scipy.*kedge\[corruptions\]"):
        corrupt(SMALL, "gaussian_blur", 1)


def test_imagenet_s_corruption_of_anchors_is_that_of_algorithm_1():
    assert (IMAGENET_T.crop_scale, IMAGENET_T.gray, IMAGENET_T.joint_jitter_blur) == ((0.08, 1.0), False, True)
