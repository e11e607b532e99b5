"""Baselines that explain a part of AMP: one tau for all images, test-time augmentation, low-level statistics."""

import zlib

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from torch import nn

import kedge
from helpers import images
from kedge import scores
from kedge.data.leakage import fingerprints
from kedge.detectors.low_level_statistics import LowLevelStatistics, low_level_statistics
from kedge.detectors.tta import TTA, shift_image
from kedge.errors import InputError, NotReadyError
from kedge.seeds import seeded


def network(anchored=False) -> nn.Module:
    with seeded(0):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    return kedge.anchor(net, init="fresh") if anchored else net


def test_a_shared_tau_is_the_mean_over_the_half_that_was_learned_from():
    net = network(anchored=True)
    held_out = images(80, seed=1)
    control = kedge.AMP(net, shared_tau=True).fit(images())
    with pytest.raises(NotReadyError, match="call calibrate"):
        control.score(images(2))
    control.calibrate(held_out)
    half = fingerprints(held_out)[:, 0] % 2 == 0
    with torch.no_grad():
        taus = [float(scores.tau(net.eval().per_anchor_logits(x[None]))) for x in held_out[half]]
    assert control.global_tau == pytest.approx(sum(taus) / len(taus))
    assert len(control.calibration.scores) == int((~half).sum())
    x = images(5, seed=2)
    mean = net.per_anchor_logits(x).mean(dim=0)
    expected = scores.kl_uniform(mean / (1 + torch.exp(torch.tensor(control.global_tau))))
    torch.testing.assert_close(control.score(x), expected)
    torch.testing.assert_close(control(x).tau, scores.tau(net.per_anchor_logits(x)))  # reported, not used


# Test-time augmentation.


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-3, 3), (1, 0), (0, -7), (9, 0), (1, -20)])
def test_a_shift_moves_every_pixel_and_zeros_in(down, right):
    x = torch.rand(2, 3, 8, 8)
    expected = torch.zeros_like(x)
    for i in range(8):
        for j in range(8):
            if 0 <= i - down < 8 and 0 <= j - right < 8:
                expected[:, :, i, j] = x[:, :, i - down, j - right]
    assert torch.equal(shift_image(x, down, right), expected)


@pytest.mark.parametrize("flip", [True, False])
def test_the_score_is_of_the_mean_logits_of_the_copies(flip):
    net, x = network(), images(4) / 255.0
    detector = TTA(net, k=4, shift=2, flip=flip, seed=3).fit(images())
    moves = torch.randint(-2, 3, (4, 2), generator=torch.Generator().manual_seed(3)).tolist()
    copies = [x.double()]
    for number, (down, right) in enumerate(moves[1:], 1):
        padded = torch.nn.functional.pad(x.double(), (2, 2, 2, 2))
        copy = padded[:, :, 2 - down : 10 - down, 2 - right : 10 - right]
        copies.append(torch.flip(copy, dims=[3]) if flip and number % 2 == 1 else copy)
    logits = torch.stack([net(copy) for copy in copies]).mean(dim=0)
    torch.testing.assert_close(detector.score(images(4)), scores.energy(logits))
    assert detector.cost.forward == 4


@pytest.mark.parametrize("k", [2, 5, 6])
def test_with_the_augmentations_of_amp_it_is_amp_where_anchors_do_not_count(k):
    net, x = network(), images(4, seed=1)
    anchored = kedge.anchor(net)  # the anchor cancels out
    amp = kedge.AMP(anchored, k=k, tta=6, rescale="none").fit(images())
    control = TTA(net, k=k, score="kl_uniform", same_as_amp=True).fit(images())
    torch.testing.assert_close(control.score(x), amp.score(x))
    assert not torch.allclose(control.score(x), TTA(net, k=k, score="kl_uniform").fit(images()).score(x))


def test_one_copy_is_energy():
    net = network()
    with pytest.raises(InputError, match="k must be at most 6"):  # AMP's augmentations
        TTA(net, k=7, same_as_amp=True)
    one, energy = TTA(net, k=1).fit(images()), kedge.Energy(net).fit(images())
    assert torch.equal(one.score(images(5, seed=1)), energy.score(images(5, seed=1)))
    with pytest.raises(InputError, match="to flip and crop"):
        TTA(nn.Linear(4, 2)).fit(torch.rand(5, 4)).score(torch.rand(5, 4))


# Low-level statistics.


def test_statistics_are_mean_deviation_and_compressed_size():
    some = images(5)
    rows = low_level_statistics(some / 255.0).numpy()
    for image, row in zip(some.numpy(), rows, strict=True):
        assert row[0] == pytest.approx((image / 255).mean())
        assert row[1] == pytest.approx((image / 255).std())
        left = np.concatenate([np.zeros_like(image[..., :1]), image[..., :-1]], axis=-1).astype(int)
        assert row[2] == len(zlib.compress(((image - left) % 256).astype(np.uint8).tobytes(), 6))
    flat = low_level_statistics(torch.full((1, 3, 8, 8), 0.5))[0]
    assert flat[1] == 0
    assert flat[2] < rows[:, 2].min()  # an image of one colour compresses best


def test_low_level_statistics_score_the_squared_distance():
    divisors = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)  # the fewer gray levels, the smaller
    train, fresh = (x // divisors[torch.arange(len(x)) % 8, None, None, None] for x in (images(40), images(6, seed=1)))
    detector = LowLevelStatistics(network()).fit(train)
    rows = low_level_statistics(train / 255.0).numpy()
    precision = np.linalg.inv(np.cov(rows.T, bias=True))
    tests = low_level_statistics(fresh / 255.0).numpy()
    expected = [mahalanobis(row, rows.mean(axis=0), precision) ** 2 for row in tests]
    np.testing.assert_allclose(detector.score(fresh).numpy(), expected, rtol=1e-6)


def test_it_knows_bright_from_dark_and_nothing_of_classes():
    train = images(40) // 2  # no pixel above 127
    detector = LowLevelStatistics(network()).fit(train)
    assert detector.score(images(20, seed=1) // 2).max() < detector.score(255 - images(20, seed=1) // 2).min()
    assert detector.cost.forward == 0
