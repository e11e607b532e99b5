"""PixMix: images mixed with altered copies of themselves and with fractals, by draws that belong to each image."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

import kedge
from helpers import StopError, labelled, same_weights, stop_at
from kedge.errors import InputError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, pixmix, train
from kedge.training.loader import AugmentedDataset
from kedge.training.pixmix import ALTERING, DRAWS, ROUNDS, STRENGTH, PixMix, fractals

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=1, pixmix=True)


def pictures(n=6, channels=3, side=8, seed=0) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), generator=torch.Generator().manual_seed(seed)) / 255


def test_mixing_is_that_of_the_paper():
    """Image by image in NumPy; draws of at least one half take the picture, never an altered copy."""
    images, others = pictures(40), pictures(40, seed=1)
    draws = torch.rand(40, DRAWS - 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    size = 1 + ALTERING + 4
    columns = [0, *(2 + ALTERING + number * size for number in range(ROUNDS))]
    draws[:, columns] = 0.5 + draws[:, columns] / 2
    result = pixmix.pixmix(images.double(), others.double(), draws)
    counts = set()
    for image, other, drawn, mixed in zip(images.double().numpy(), others.double().numpy(), draws, result, strict=True):
        rounds = math.floor(drawn[1 + ALTERING] * 5)
        counts.add(rounds)
        for number in range(rounds):
            kind, growing, u, v = drawn[2 + ALTERING + number * size + 1 + ALTERING :][:4].tolist()
            from_b1, from_1b = u ** (1 / STRENGTH), 1 - v ** (1 / STRENGTH)  # Beta(s, 1) and Beta(1, s)
            a, b = (from_b1, from_1b) if growing < 0.5 else (1 + (1 - from_b1), -from_1b)
            if kind < 0.5:
                image = (a * (image * 2 - 1) + b * (other * 2 - 1) + 1) / 2
            else:
                image = (image * 2) ** a * np.clip(other * 2, 1e-37, None) ** b / 2
            image = np.clip(image, 0, 1)
        np.testing.assert_allclose(mixed.numpy(), image, rtol=1e-9, atol=1e-12)
    assert counts == set(range(ROUNDS + 1))


def test_the_weights_follow_the_beta_distributions_of_the_paper():
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (u ** (1 / STRENGTH)).mean().item() == pytest.approx(STRENGTH / (STRENGTH + 1), abs=2e-3)  # Beta(3, 1)
    variance = STRENGTH / (STRENGTH + 1) ** 2 / (STRENGTH + 2)
    assert (1 - u ** (1 / STRENGTH)).var().item() == pytest.approx(variance, rel=2e-2)  # Beta(1, 3)


def altered_by(number: int, images: torch.Tensor, level: float, sign: float = 1.0) -> torch.Tensor:
    """All images after one operation."""
    draws = torch.tensor(
        [(number + 0.5) / 9, (10 * level - 0.1) / 2.9, 0.75 if sign > 0 else 0.25], dtype=torch.float64
    )
    return pixmix.altered(images, draws.expand(len(images), 3))


def by_pil(images: torch.Tensor, function) -> torch.Tensor:
    arrays = [(image * 255).round().byte().permute(1, 2, 0).numpy() for image in images]
    return (
        torch.stack([torch.from_numpy(np.array(function(Image.fromarray(a)))).permute(2, 0, 1) for a in arrays]) / 255
    )


@pytest.mark.parametrize(
    ("number", "function"),
    [
        (0, ImageOps.autocontrast),
        (2, lambda image: ImageOps.posterize(image, 3)),
        (3, lambda image: ImageOps.solarize(image, 192)),
    ],
)
def test_colors_are_altered_as_by_pillow(number, function):
    images = 0.2 + 0.6 * pictures(5)
    images = (images * 255).round() / 255
    torch.testing.assert_close(
        altered_by(number, images.double(), 0.25), by_pil(images, function).double(), atol=5e-3, rtol=0
    )


def test_equalized_values_are_shares_of_pixels():
    image = pictures(1)
    values = image[0, 1].flatten().tolist()
    expected = [sum(other <= value for other in values) / len(values) for value in values]
    assert altered_by(1, image.double(), 0.2)[0, 1].flatten().tolist() == pytest.approx(expected)


def test_images_are_moved_by_pixels_and_degrees():
    x = pictures(2, side=12)
    shifted = altered_by(7, x.double(), 0.25)  # 2/3 of a quarter of half the side: a pixel of twelve
    torch.testing.assert_close(shifted[:, :, :, :-1], x.double()[:, :, :, 1:], rtol=0, atol=1e-9)
    assert shifted[:, :, :, -1].max() < 1e-9  # black
    torch.testing.assert_close(altered_by(8, x.double(), 0.25, -1)[:, :, 1:], x.double()[:, :, :-1], rtol=0, atol=1e-9)
    quarter = pixmix._moves(torch.tensor([0]), torch.tensor([3.0]).double(), x)  # 90 degrees
    grid = torch.nn.functional.affine_grid(quarter, [1, 3, 12, 12], align_corners=False)
    turned = torch.nn.functional.grid_sample(x[:1].double(), grid, align_corners=False)
    assert any(torch.allclose(turned, x[:1].double().rot90(k, (2, 3)), atol=1e-6) for k in (1, 3))
    # Shears move each row in proportion to its distance from the middle.
    assert pixmix._moves(torch.tensor([1]), torch.tensor([0.2]), x)[0].flatten().tolist() == pytest.approx(
        [1, 0.06, 0, 0, 1, 0]
    )
    assert pixmix._moves(torch.tensor([2]), torch.tensor([0.2]), x)[0].flatten().tolist() == pytest.approx(
        [1, 0, 0, 0.06, 1, 0]
    )


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 8), (4, 16, 24)])
def test_a_mix_belongs_to_the_seed_the_epoch_and_the_image(shape):
    mix = PixMix(shape, seed=3)
    x, index = torch.rand(30, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(100, 130)
    whole = mix(x, 2, index)
    assert whole.shape == x.shape
    assert whole.isfinite().all()
    assert 0 <= whole.min() <= whole.max() <= 1
    assert torch.equal(PixMix(shape, seed=3)(x[7:9], 2, index[7:9]), whole[7:9])
    for other in (mix(x, 3, index), mix(x, 2, index + 1), PixMix(shape, seed=4)(x, 2, index)):
        assert (other != whole).flatten(1).any(dim=1).double().mean() > 0.8


def test_fractals_are_pictures_with_structure():
    some = fractals(32, (3, 32, 32), torch.Generator().manual_seed(0))
    assert (some.dtype, some.shape) == (torch.uint8, (32, 3, 32, 32))
    assert torch.equal(some, fractals(32, (3, 32, 32), torch.Generator().manual_seed(0)))
    assert len(some.flatten(1).unique(dim=0)) == 32
    levels = [len(picture.unique()) for picture in some]
    assert sum(count > 20 for count in levels) > 24  # few are flat


def test_training_images_are_mixed_and_outliers_are_not():
    data = labelled(20, classes=2)
    recipe = replace(RECIPE, crop=0, flip=False)
    keys = [(0, index) for index in range(20)]
    plain, mixed, outliers = (
        AugmentedDataset(data, kedge.Preprocess((3, 8, 8)), replace(recipe, pixmix=on), 0, labelled)
        for on, labelled in ((False, True), (True, True), (True, False))
    )
    x, y = mixed.__getitems__(keys)
    assert not torch.equal(x, plain.__getitems__(keys)[0])
    assert torch.equal(y, data.labels)
    assert torch.equal(outliers.__getitems__(keys)[0], plain.__getitems__(keys)[0])
    pairs = AugmentedDataset(list(data), kedge.Preprocess((3, 8, 8)), recipe, 0)  # read one by one, the same draws
    torch.testing.assert_close(pairs.__getitems__(keys)[0], x)


@pytest.mark.parametrize("anchored", [False, True])
def test_a_run_that_was_stopped_ends_with_the_very_same_weights(tmp_path, anchored):
    def run(folder, **more):
        with seeded(0):
            net = build("compact", width=4, classes=2)
        net = kedge.anchor(net) if anchored else net
        return train(net, labelled(64, classes=2), RECIPE, directory=tmp_path / folder, checkpoint_seconds=0.0, **more)

    straight = run("straight")
    with pytest.raises(StopError):
        run("stopped", progress=stop_at(3))
    assert same_weights(run("stopped"), straight)
    assert straight.record["recipe"]["pixmix"] is True


def test_what_cannot_be_mixed_is_refused():
    net = build("compact", width=4, classes=2)
    with pytest.raises(InputError, match="pixmix needs a set of images"):
        train(net, DataLoader(labelled(64, classes=2), batch_size=16), RECIPE)
    vectors = [(torch.rand(4), i % 2) for i in range(32)]
    with pytest.raises(InputError, match="pixmix needs a set of images"):
        train(torch.nn.Linear(4, 2), vectors, RECIPE)
