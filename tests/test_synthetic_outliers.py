"""Synthetic outliers: what each kind keeps of an image and removes, and the loss that refuses them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator

import kedge
from helpers import flat
from kedge.data.digits import digits
from kedge.errors import InputError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training.losses import Step, SyntheticOutliers
from kedge.training.synthetic_outliers import (
    KINDS,
    hybrid,
    mismatch,
    patch_shuffle,
    phase_randomization,
    recolor,
    synthetic_outliers,
    zoom,
)


def noise(n=8, channels=3, height=32, width=32):
    return torch.rand(n, channels, height, width, generator=Generator().manual_seed(0))


def drawn(kind, x, seed=0):
    return kind(x, generator=Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [*KINDS.values(), phase_randomization])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 7, 9), (3, 3, 3)])
def test_outliers_have_the_shape_and_range_of_images_and_depend_on_the_generator_alone(kind, shape):
    x = noise(8, *shape)
    before, state = x.clone(), torch.get_rng_state()
    y = drawn(kind, x)
    assert torch.get_rng_state().equal(state)
    assert y.shape == x.shape
    assert 0 <= y.min() <= y.max() <= 1
    assert torch.equal(x, before)
    assert not torch.allclose(y, x)
    torch.rand(1)
    assert torch.equal(y, drawn(kind, x))
    if shape[1] > 8:
        assert not torch.equal(y, drawn(kind, x, seed=1))


def test_patch_shuffle_keeps_the_pixels_in_whole_patches():
    x = noise(4)
    for seed in range(4):
        y = drawn(patch_shuffle, x, seed)
        for before, after in zip(x, y, strict=True):
            assert torch.equal(before.flatten(1).sort().values, after.flatten(1).sort().values)
        # Neighbors inside a patch of four stay neighbors, whichever of the two sizes was drawn.
        pairs, shuffled = (
            {tuple(pair) for pair in torch.stack([z[0, 0, :, 0::4], z[0, 0, :, 1::4]], dim=-1).reshape(-1, 2).tolist()}
            for z in (x, y)
        )
        assert pairs == shuffled


def test_a_hybrid_has_the_low_frequencies_of_one_image_and_the_high_frequencies_of_another():
    flat_images = torch.linspace(0.1, 0.9, 6).view(6, 1, 1, 1).expand(6, 3, 16, 16)
    assert torch.allclose(drawn(hybrid, flat_images), flat_images, atol=1e-6)
    x = torch.full((2, 1, 16, 16), 0.5)
    x[1, :, ::2] = 0.4
    x[1, :, 1::2] = 0.6
    y = drawn(hybrid, x)
    assert float(y[0].std()) == pytest.approx(1.5 * float(x[1].std()), rel=1e-3)  # the stripes moved to the flat image
    assert y[1].std() < 1e-3


def test_a_mismatch_adds_the_difference_of_two_other_images():
    x = torch.tensor([0.40, 0.41, 0.43, 0.47]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    for seed in range(8):
        for own, y in zip(x[:, 0, 0, 0], drawn(mismatch, x, seed)[:, 0, 0, 0], strict=True):
            others = [v for v in x[:, 0, 0, 0] if v != own]
            assert any(torch.isclose(y, own + a - b, atol=1e-6) for a in others for b in others if a != b)


def test_zoom_shows_a_window():
    y = drawn(zoom, torch.linspace(0, 1, 60).expand(20, 1, 60, 60))
    shown = y.amax(dim=(1, 2, 3)) - y.amin(dim=(1, 2, 3))
    assert shown.min() > 0.9 / 6
    assert shown.max() < 1.2 / 3


def test_recolor_leaves_two_colors():
    x = (noise(5) > 0.5).float().mean(dim=1, keepdim=True).round().expand(-1, 3, -1, -1)
    for image in drawn(recolor, x):
        pixels = image.flatten(1).T
        low, high = pixels[pixels[:, 0].argmin()], pixels[pixels[:, 0].argmax()]
        assert torch.minimum((pixels - low).norm(dim=1), (pixels - high).norm(dim=1)).max() < 1e-3


def test_phase_randomization_keeps_the_amplitude_spectrum():
    x = 0.4 + 0.2 * noise(3, height=16, width=16)  # so that no pixel leaves [0, 1]
    y = drawn(phase_randomization, x)
    assert 0 < y.min() < y.max() < 1
    torch.testing.assert_close(torch.fft.fft2(y).abs(), torch.fft.fft2(x).abs(), rtol=1e-3, atol=1e-3)
    assert (y - x).abs().mean() > 0.02


def test_kinds_take_equal_parts_and_fewer_kinds_few_images():
    x, generator = noise(15), Generator().manual_seed(0)
    expected = [kind(part, generator) for kind, part in zip(KINDS.values(), x.split(3), strict=True)]
    assert torch.equal(drawn(synthetic_outliers, x), torch.cat(expected))
    for count in range(1, 16):
        for seed in range(10):
            y = drawn(synthetic_outliers, x[:count], seed)
            assert y.shape == x[:count].shape
            assert not any(torch.equal(one, other) for one in y for other in x)
    assert len(synthetic_outliers(x[:2], ("hybrid", "mismatch"), generator=generator)) == 0
    assert len(synthetic_outliers(x[:0], generator=generator)) == 0
    with pytest.raises(InputError, match=r"images must be \(B, D, H, W\) to make outliers of; got \(4, 5\)"):
        synthetic_outliers(torch.rand(4, 5), generator=generator)


# The loss.


def step_of(net, x, y, seed=3, **options):
    generator = Generator().manual_seed(seed)
    return Step(net, net, x, y, None, None, None, {}, 0.0, 0, len(x), 0.0, generator=generator, **options)


def small(n):
    return noise(n, height=8, width=8), torch.arange(n) % 4


def test_the_loss_is_that_of_the_labels_and_of_the_uniform_distribution():
    net = kedge.Classifier(flat()).train()
    x, y = small(6)
    result = SyntheticOutliers(share=0.5, weight=0.25, kinds=["zoom"]).loss(step_of(net, x, y))
    generator = Generator().manual_seed(3)
    outliers = zoom(x[torch.randperm(6, generator=generator)[:3]], generator)
    right = net(x).softmax(dim=1)[torch.arange(6), y]
    refused = net(outliers).softmax(dim=1)
    expected = -right.log().mean() - 0.25 * (refused.log().sum(dim=1) / 4).mean()
    torch.testing.assert_close(result.value, expected)
    torch.testing.assert_close(result.logits, net(x))
    without = SyntheticOutliers(share=0).loss(step_of(net, x, y))
    torch.testing.assert_close(without.value, F.cross_entropy(net(x), y))


@pytest.mark.parametrize("target", ["label", "uniform"])
def test_masked_pairs_keep_their_own_targets(target):
    net = kedge.anchor(flat(), mask=0.5, mask_target=target)
    x, y = small(12)
    calls = []
    step = step_of(net, x, y)
    step = replace(
        step, forward=lambda images, **anchors: calls.append((images, net(images, **anchors))) or calls[0][1]
    )
    result = SyntheticOutliers(share=0.5, weight=2.0).loss(step)
    ((images, logits),) = calls
    is_x = torch.stack([(x == image).flatten(1).all(dim=1).any() for image in images])
    assert int(is_x.sum()) == 12
    assert 0 < int(net.draw.masked[is_x].sum()) < 12
    rows = -logits.log_softmax(dim=1)
    expected = rows[is_x][torch.arange(12), y]
    if target == "uniform":
        expected = torch.where(net.draw.masked[is_x], rows[is_x].mean(dim=1), expected)
    torch.testing.assert_close(result.value, expected.mean() + 2.0 * rows[~is_x].mean())


@pytest.mark.parametrize("kind", ["anchored", "unanchored"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_that_share_a_batch_draw_the_outliers_and_anchors_of_one(kind, world):
    network, (x, y) = flat(), small(24)

    def run(rank, count):
        net = kedge.anchor(network, init="fresh", per_sample=True) if kind == "anchored" else kedge.Classifier(network)
        rows = slice(rank * 24 // count, (rank + 1) * 24 // count)
        step = step_of(net.train(), x[rows], y[rows], among=x, first=rows.start)
        return SyntheticOutliers(share=0.3).loss(step)

    with seeded(0):
        alone = run(0, 1)
    parts = []
    for rank in range(world):
        with seeded(0):
            parts.append(run(rank, world))
    torch.testing.assert_close(torch.stack([part.value for part in parts]).mean(), alone.value)
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), alone.logits)


def test_a_network_learns_to_refuse_synthetic_outliers():
    train, test = digits().subset(range(0, 5000, 2)).split(0.8)
    outliers = drawn(synthetic_outliers, test.images.float() / 255)

    def largest(loss):
        with seeded(0):
            net = kedge.anchor(build("compact", width=4, channels=1))
        net = kedge.train(net, train, kedge.training.recipe("demo", epochs=2), loss=loss)
        net.set_anchors(train.images[:3])
        with torch.no_grad():
            return float(net.eval()(outliers).softmax(dim=1).amax(dim=1).mean())

    assert largest(SyntheticOutliers(weight=1.0)) < 0.8 * largest(None)


@pytest.mark.parametrize("options", [{"share": 2}, {"weight": -1}, {"kinds": ["fog"]}, {"kinds": []}])
def test_bad_arguments_are_named(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} must"):
        SyntheticOutliers(**options)
