"""T, the corruption of anchors: what each of its five parts does alone, and where its randomness comes from."""

import itertools
import math

import pytest
import torch

from kedge.anchoring.corruption import Corruption
from kedge.errors import InputError
from kedge.seeds import mix_seed, seeded

OFF = {"crop": False, "flip": False, "jitter": False, "blur": False, "gray": False}
PARTS = sorted(OFF)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def images(n, channels=3, height=12, width=16, seed=0):
    return torch.rand(n, channels, height, width, generator=generator(seed))


def corrupt(x, *parts, seed=0):
    """Apply the named parts alone."""
    with seeded(seed):
        return Corruption(**(OFF | dict.fromkeys(parts, True)))(x)


def per_image(condition):
    """Whether a condition holds at every pixel, for each image."""
    return condition.flatten(1).all(dim=1)


def assert_share(flags, p):
    """Assert that a share of draws is within five deviations of its probability."""
    assert flags.double().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / len(flags)))


# --- all five --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [(12, 16), (32, 32), (9, 7), (1, 1), (1, 8), (8, 1), (2, 2), (4, 4), (5, 3)])
def test_shape_range_and_dtype_stay_even_of_images_smaller_than_the_blur(size, channels, dtype):
    x = images(8, channels, *size).to(dtype)
    before = x.clone()
    y = corrupt(x, *PARTS)
    assert torch.equal(x, before)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert 0 <= y.min() <= y.max() <= 1


def test_the_default_is_all_five_with_a_draw_for_each_image_and_all_off_is_the_identity():
    x = images(1).expand(20, -1, -1, -1)
    with seeded(3):
        default = Corruption()(x)
    assert torch.equal(default, corrupt(x, *PARTS, seed=3))
    assert not torch.equal(default, corrupt(x, *PARTS, seed=2))
    assert len({tuple(row.tolist()) for row in default.flatten(1)}) == 20
    assert torch.equal(corrupt(x), x)


def test_where_there_are_not_three_channels_images_are_cropped_flipped_and_blurred_only():
    for x in (images(50, channels) for channels in (1, 2, 4, 5)):
        for parts in (("jitter",), ("gray",), ("jitter", "gray")):
            assert torch.equal(corrupt(x, *parts), x)
        for part in ("crop", "flip", "blur"):
            assert not torch.equal(corrupt(x, part), x)


# --- each alone ------------------------------------------------------------------------------------------------------


def test_flip_gives_the_image_or_its_mirror_and_grey_equal_channels_for_a_fifth():
    x = images(1000, height=3, width=4)
    y = corrupt(x, "flip")
    mirrored = per_image(y == x.flip(-1))
    assert (per_image(y == x) ^ mirrored).all()
    assert_share(mirrored, 0.5)
    y = corrupt(x, "gray")
    grey = per_image(y == y[:, :1])
    assert (per_image(y == x) ^ grey).all()
    assert_share(grey, 0.2)
    assert (x[grey].amin(dim=1) - 1e-6 <= y[grey, 0]).all()
    assert (y[grey, 0] <= x[grey].amax(dim=1) + 1e-6).all()


def test_jitter_scales_the_brightness_of_four_fifths_of_the_images_and_clips():
    x = 0.05 + 0.6 * images(1000, height=3, width=4)  # below 2/3 nothing is clipped
    factor = (corrupt(x, "jitter") / x).flatten(1)
    assert (factor.amax(dim=1) - factor.amin(dim=1)).max() < 1e-5  # one for the whole image
    assert 0.5 - 1e-5 < factor.min() < 0.55
    assert 1.45 < factor.max() < 1.5 + 1e-5
    assert_share((factor[:, 0] - 1).abs() > 1e-5, 0.8)
    x = images(200, height=3, width=4)
    y = corrupt(x, "jitter")
    bright = (y / x).flatten(1).amax(dim=1, keepdim=True)  # the dark pixels, which nothing clips, show the factor
    assert torch.allclose(y.flatten(1), (x.flatten(1) * bright).clamp(max=1), atol=1e-5)


def test_blur_keeps_the_mean_and_lowers_the_variance_of_four_fifths_of_the_images():
    x = images(300, height=24, width=24)
    y = corrupt(x, "blur")
    blurred = ~per_image(y == x)
    assert_share(blurred, 0.8)
    assert (y.mean(dim=(1, 2, 3)) - x.mean(dim=(1, 2, 3))).abs().max() < 0.02
    ratio = y[blurred].var(dim=(1, 2, 3)) / x[blurred].var(dim=(1, 2, 3))
    assert ratio.max() < 1 + 1e-6
    assert ratio.median() < 0.3
    x = torch.full((50, 3, 12, 16), 0.3)  # a flat image stays flat
    assert torch.allclose(corrupt(x, "blur"), x, atol=1e-5)


def ramps(n, height, width):
    """Images whose two channels hold each pixel's column and row, to show which box an output was cut from."""
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return torch.stack([columns, rows]).repeat(n, 1, 1, 1)


def area(y):
    return (y.amax(dim=(2, 3)) - y.amin(dim=(2, 3))).prod(dim=1)


def test_crop_shows_a_part_of_the_image_enlarged_to_its_size():
    y = corrupt(ramps(200, 60, 80), "crop")
    assert y.shape == (200, 2, 60, 80)
    assert 0.55 < area(y).min() < area(y).max() <= 1
    assert area(y).std() > 0.05
    assert (y[:, 0].diff(dim=-1) >= -1e-5).all()  # neither mirrored nor turned
    assert (y[:, 1].diff(dim=-2) >= -1e-5).all()
    assert len({tuple(corner.tolist()) for corner in y[:, :, 0, 0]}) > 150
    for low in (0.08, 0.6):
        with seeded(0):
            y = Corruption(**(OFF | {"crop": True}), crop_scale=(low, 1.0))(ramps(400, 60, 60))
        assert low - 0.06 < area(y).min() < low + 0.1


def test_jitter_and_blur_can_share_one_draw_as_in_the_published_code():
    x = 0.05 + 0.6 * images(1000, height=12, width=12)
    with seeded(0):
        y = Corruption(**(OFF | {"jitter": True, "blur": True}), joint_jitter_blur=True)(x)
    same = per_image(y == x)
    assert_share(~same, 0.8)
    assert ((y - x)[~same].var(dim=(1, 2, 3)) > 1e-8).all()
    brightness = y.mean(dim=(1, 2, 3)) / x.mean(dim=(1, 2, 3))
    assert ((brightness[~same] - 1).abs() > 1e-4).double().mean() > 0.98  # jitter acts wherever blur does
    apart = corrupt(x, "jitter", "blur")
    assert_share(per_image(apart == x), 0.04)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_images_and_crop_scales_are_an_error_and_a_rounding_error_is_none():
    for low, high in ((-2.0, 2.0), (0.0, 1.5), (-0.1, 1.0), (0.0, 255.0)):
        with pytest.raises(InputError, match=r"\[0, 1\].*before normalisation.*mean="):
            Corruption()(low + (high - low) * images(4))
    assert corrupt(images(4) * (1 + 5e-4), "flip").max() <= 1
    for scale in ((0, 1), (0.5, 0.4), (0.5, 1.2), (0.5,), (0.5, 0.6, 0.7)):
        with pytest.raises(InputError, match="crop_scale must be"):
            Corruption(crop_scale=scale)
    for shape in ((3, 12, 16), (4, 9), (4, 3, 9), (2, 1, 4, 4, 4)):
        with pytest.raises(InputError, match=r"\(B, D, H, W\).*corruption="):
            Corruption()(torch.rand(shape))


# --- randomness ------------------------------------------------------------------------------------------------------


def test_seeded_draws_as_manual_seed_does_and_puts_the_generator_back():
    state = torch.get_rng_state()
    with seeded(5):
        inside = torch.rand(4)
        with seeded(1):
            torch.randn(7)
        assert not torch.equal(torch.rand(4), inside)
    assert torch.equal(inside, torch.rand(4, generator=generator(5)))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError), seeded(0):
        torch.rand(-1)
    assert torch.equal(torch.get_rng_state(), state)


def test_mix_seed_is_splitmix64_without_collisions_and_neighbours_are_unrelated():
    assert mix_seed(0) == 0xE220A8397B1DCDAF >> 1  # its published first output, the top bit dropped
    grid = list(itertools.product(range(-3, 30), range(40), range(10)))
    assert len({mix_seed(*point) for point in grid}) == len(grid)
    assert len({mix_seed(*point[:2]) for point in grid} | {mix_seed(point[0]) for point in grid}) == 33 * 40 + 33
    for seed in (0, -1, 2**63, 2**64 - 1, 10**30):
        assert 0 <= mix_seed(seed, 7) < 2**63
        generator(mix_seed(seed, 7))
    draws = torch.stack([torch.rand(50, generator=generator(mix_seed(0, i))) for i in range(20)])
    assert (torch.corrcoef(draws) - torch.eye(20)).abs().max() < 0.6


def test_a_batch_without_images_stays_as_it_is():
    assert Corruption()(torch.rand(0, 3, 8, 8)).shape == (0, 3, 8, 8)
