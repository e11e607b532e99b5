"""Outliers that are made of training images: what each kind keeps of them, and what it takes away."""

import dataclasses

import pytest
import torch

import kedge
from kedge.errors import InputError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training.losses import Step, SyntheticOutliers
from kedge.training.synthetic_outliers import (
    MAKERS,
    jigsaw,
    mismatch,
    recolour,
    remix,
    scramble,
    synthetic_outliers,
    zoom,
)


def images(n=8, channels=3, height=32, width=32, seed=0):
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))


def made(maker, x, seed=0):
    with seeded(seed):
        return maker(x)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 7, 9), (3, 3, 3)])
def test_shape_range_and_images_stay(maker, shape):
    x = images(8, *shape)
    before = x.clone()
    y = made(maker, x)
    assert y.shape == x.shape
    assert 0 <= y.min() <= y.max() <= 1
    assert torch.equal(x, before)
    assert not torch.allclose(y, x)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_the_seed_decides(maker):
    x = images()
    assert torch.equal(made(maker, x), made(maker, x))
    assert not torch.equal(made(maker, x), made(maker, x, seed=1))


def test_a_jigsaw_has_the_pixels_of_its_image_in_whole_tiles():
    x = images(4)
    for seed in range(4):
        y = made(jigsaw, x, seed)
        for before, after in zip(x, y, strict=True):
            assert torch.equal(before.flatten(1).sort().values, after.flatten(1).sort().values)
        # Neighbours inside a tile of four stay neighbours, whichever of the two sizes was drawn.
        pairs = {
            tuple(pair) for pair in torch.stack([x[0, 0, :, 0::4], x[0, 0, :, 1::4]], dim=-1).reshape(-1, 2).tolist()
        }
        found = torch.stack([y[0, 0, :, 0::4], y[0, 0, :, 1::4]], dim=-1).reshape(-1, 2).tolist()
        assert pairs == {tuple(pair) for pair in found}


def test_a_remix_of_flat_images_is_flat_in_its_own_colour():
    x = torch.linspace(0.1, 0.9, 6).view(6, 1, 1, 1).expand(6, 3, 16, 16)
    assert torch.allclose(made(remix, x), x, atol=1e-6)


def test_a_remix_has_details_of_another_image():
    x = torch.full((2, 1, 16, 16), 0.5)
    x[1, :, ::2] = 0.4
    x[1, :, 1::2] = 0.6
    y = made(remix, x)
    assert float(y[0].std()) == pytest.approx(1.5 * float(x[1].std()), rel=1e-3)  # the stripes came to the flat image
    assert y[1].std() < 1e-3  # which had no details to give


def test_a_mismatch_adds_the_difference_of_two_others():
    x = torch.tensor([0.40, 0.41, 0.43, 0.47]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    for seed in range(8):
        for mine, y in zip(x[:, 0, 0, 0], made(mismatch, x, seed)[:, 0, 0, 0], strict=True):
            others = [v for v in x[:, 0, 0, 0] if v != mine]
            assert any(torch.isclose(y, mine + a - b, atol=1e-6) for a in others for b in others if a != b)


def test_a_zoom_shows_a_part_only():
    ramp = torch.linspace(0, 1, 60).expand(20, 1, 60, 60)
    y = made(zoom, ramp)
    shown = y.amax(dim=(1, 2, 3)) - y.amin(dim=(1, 2, 3))
    assert shown.min() > 0.9 / 6
    assert shown.max() < 1.2 / 3


def test_recolouring_leaves_two_colours():
    x = (images(5) > 0.5).float().mean(dim=1, keepdim=True).round().expand(-1, 3, -1, -1)
    for image in made(recolour, x):
        near = image.flatten(1).T
        low, high = near[near[:, 0].argmin()], near[near[:, 0].argmax()]
        assert torch.minimum((near - low).norm(dim=1), (near - high).norm(dim=1)).max() < 1e-3


def test_scrambling_keeps_how_strong_each_wave_is():
    x = 0.4 + 0.2 * images(3, height=16, width=16)  # so that no pixel leaves [0, 1]
    y = made(scramble, x)
    assert 0 < y.min() < y.max() < 1
    torch.testing.assert_close(torch.fft.fft2(y).abs(), torch.fft.fft2(x).abs(), rtol=1e-3, atol=1e-3)
    assert (y - x).abs().mean() > 0.02


def test_all_kinds_take_equal_parts():
    x = images(15)
    with seeded(0):
        expected = [maker(part) for maker, part in zip(MAKERS.values(), x.split(3), strict=True)]
    assert torch.equal(made(synthetic_outliers, x), torch.cat(expected))
    with pytest.raises(InputError, match=r"images must be \(B, D, H, W\) to make outliers of; got \(4, 5\)"):
        synthetic_outliers(torch.rand(4, 5))


@pytest.mark.parametrize("count", range(1, 16))
def test_few_images_make_fewer_kinds_and_never_an_image_as_it_was(count):
    x = images(count)
    for seed in range(10):
        y = made(synthetic_outliers, x, seed=seed)
        assert y.shape == x.shape
        assert not any(torch.equal(one, other) for one in y for other in x)


@pytest.mark.parametrize("kinds", [("remix", "mismatch"), tuple(MAKERS)])
def test_of_too_few_images_none_are_made(kinds):
    assert len(synthetic_outliers(images(2), kinds)) == (0 if "zoom" not in kinds else 2)
    assert len(synthetic_outliers(images(0), kinds)) == 0


# The loss.


def step_of(net, x, y, smoothing=0.0):
    return Step(net, net, x, y, None, None, None, {}, 0.0, 0, len(x), smoothing)


def test_the_loss_is_that_of_the_labels_and_of_the_uniform_distribution():
    net = kedge.Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 4))).train()
    x, y = images(6, height=8, width=8), torch.tensor([0, 1, 2, 3, 0, 1])
    loss = SyntheticOutliers(share=0.5, weight=0.25, kinds=["zoom"])
    with seeded(3):
        found = loss.loss(step_of(net, x, y))
    with seeded(3):
        outliers = zoom(x[torch.randperm(6)[:3]])
    probability, refused = net(x).softmax(dim=1), net(outliers).softmax(dim=1)
    right = probability[torch.arange(6), y]
    expected = -right.log().mean() - 0.25 * (refused.log().sum(dim=1) / 4).mean()
    torch.testing.assert_close(found.value, expected)
    assert found.logits.shape == (6, 4)


def test_nothing_made_is_plain_cross_entropy():
    net = kedge.Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 4))).train()
    x, y = images(6, height=8, width=8), torch.tensor([0, 1, 2, 3, 0, 1])
    found = SyntheticOutliers(share=0).loss(step_of(net, x, y))
    torch.testing.assert_close(found.value, torch.nn.functional.cross_entropy(net(x), y))


def test_a_network_learns_to_refuse_what_is_made():
    from kedge.data.digits import digits

    train, test = digits().subset(range(0, 5000, 2)).split(0.8)
    recipe = kedge.training.recipe("demo", epochs=2)

    def largest(loss):
        with seeded(0):
            net = kedge.anchor(build("compact", width=4, channels=1))
        net = kedge.train(net, train, recipe, seed=0, loss=loss)
        net.set_anchors(train.images[:3])
        outliers = made(synthetic_outliers, test.images.float() / 255)
        with torch.no_grad():
            return float(net.eval()(outliers).softmax(dim=1).amax(dim=1).mean())

    assert largest(SyntheticOutliers(weight=1.0)) < 0.8 * largest(None)


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match=r"share must lie in \[0, 1\]; got 2"):
        SyntheticOutliers(share=2)
    with pytest.raises(InputError, match="weight must lie in"):
        SyntheticOutliers(weight=-1)
    with pytest.raises(InputError, match="kinds must be one of"):
        SyntheticOutliers(kinds=["fog"])
    with pytest.raises(InputError, match="kinds must name at least one"):
        SyntheticOutliers(kinds=[])


@pytest.mark.parametrize("target", ["label", "uniform"])
def test_masked_pairs_beside_made_ones_keep_their_own_targets(target):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
    net = kedge.anchor(network, mask=0.5, mask_target=target)
    x, y, seen = images(12, height=8, width=8), torch.arange(12) % 4, []
    step = step_of(net, x, y)
    step = dataclasses.replace(step, forward=lambda x: seen.append(net(x)) or seen[-1])
    with seeded(0):
        found = SyntheticOutliers(share=0.5, weight=2.0).loss(step)
    (logits,), masked = seen, net.draw.masked[:12]
    assert 0 < int(masked.sum()) < 12
    rows = -logits.log_softmax(dim=1)
    expected = rows[torch.arange(12), y]
    if target == "uniform":
        expected = torch.where(masked, rows[:12].mean(dim=1), expected)
    torch.testing.assert_close(found.value, expected.mean() + 2.0 * rows[12:].mean())
