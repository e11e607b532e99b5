"""k-means: scikit-learn and the definition as loops are the oracles."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from kedge.detectors import kmeans as module
from kedge.detectors.kmeans import kmeans
from kedge.errors import InputError


def points(n=60, d=3, seed=0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def column(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def check_like_sklearn(x, start, steps):
    """The same groups and centres as scikit-learn's from the same start."""
    groups, centres = kmeans(x, len(start), centres=start, steps=steps)
    fitted = KMeans(len(start), init=start.numpy(), n_init=1, max_iter=steps, tol=0, algorithm="lloyd").fit(x.numpy())
    assert groups.tolist() == fitted.labels_.tolist()
    assert np.allclose(centres, fitted.cluster_centers_, rtol=1e-10)


def test_a_case_by_hand():
    x = column(0, 1, 2, 10, 11, 12)
    for steps, groups, centres in (
        (0, [0, 1, 1, 1, 1, 1], (0, 1)),
        (1, [0, 0, 0, 1, 1, 1], (0, 7.2)),  # the means of 0 alone and of the five others
        (20, [0, 0, 0, 1, 1, 1], (1, 11)),
    ):
        result = kmeans(x, 2, centres=column(0, 1), steps=steps)
        assert result[0].tolist() == groups
        assert result[1].allclose(column(*centres))


@pytest.mark.parametrize("seed", range(5))
def test_the_same_as_scikit_learn_from_the_same_start(seed):
    x = points(seed=seed)
    for k in (1, 2, 7, 60):
        for steps in (1, 3, 300):
            check_like_sklearn(x, x[torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:k]], steps)
    check_like_sklearn(x, torch.cat([x[:3], torch.full((1, 3), 50.0, dtype=torch.float64)]), 300)  # an empty group
    many = points(70_000, 2)  # more than one sum takes
    check_like_sklearn(many, kmeans(many, 3, steps=0)[1], 2)


def test_empty_groups_take_the_points_that_are_furthest_from_their_centres_and_can_be_spared():
    groups, centres = kmeans(column(0, 1, 10), 2, centres=column(0, 1000), steps=1)
    assert groups.tolist() == [0, 0, 1]
    assert centres.allclose(column(0.5, 10))
    # The lone points 100 and 0 lie furthest from their centres; the empty group gets the next one, 51.
    _, centres = kmeans(column(100, 0, 50, 51), 4, centres=column(130, 50, -9, 1e6), steps=1)
    assert centres.allclose(column(100, 50, 0, 51))
    # 0, 1 and 2; 9 for the first empty group; 8 for the second.
    _, centres = kmeans(column(0, 1, 2, 8, 9), 3, centres=column(0, 100, 200), steps=1)
    assert centres.allclose(column(1, 9, 8))


def test_few_different_points_and_as_many_groups_as_points():
    for distinct in (1, 2):
        x = torch.arange(6.0)[:, None] % distinct
        groups, centres = kmeans(x, 4)
        assert len(groups.unique()) == distinct
        assert centres[groups].equal(x)
        assert kmeans(x, 4)[0].equal(groups)
    groups, centres = kmeans(points(20), 20)
    assert sorted(groups.tolist()) == list(range(20))
    assert centres[groups].allclose(points(20))


def test_the_size_of_the_blocks_does_not_matter(monkeypatch):
    expected = kmeans(points(500, 4), 7)
    monkeypatch.setattr(module, "BLOCK", 30)
    groups, centres = kmeans(points(500, 4), 7)
    assert groups.equal(expected[0])
    assert centres.allclose(expected[1])


def test_points_far_from_zero_in_single_precision():
    x = torch.cat([points(50, 2, dtype=torch.float32), points(50, 2, seed=1, dtype=torch.float32) + 8])
    groups, centres = kmeans(x, 2, seed=1)
    assert len(groups[:50].unique()) == len(groups[50:].unique()) == 1
    far, moved = kmeans(x + 100_000, 2, seed=1)
    assert far.equal(groups)
    assert moved.allclose(centres + 100_000, rtol=0, atol=0.05)
    assert moved.dtype == torch.float32


def test_the_start_is_drawn_as_k_means_plus_plus_draws_it():
    """Of 0, 1 and 3, the second is drawn by its squared distance to the first; the third by that to the nearer one."""
    x, times = column(0, 1, 3), {}
    for seed in range(900):
        pair = tuple(kmeans(x, 2, seed=seed, steps=0)[1][:, 0].round().int().tolist())
        times[pair] = times.get(pair, 0) + 1
    expected = {(0, 1): 1 / 10, (0, 3): 9 / 10, (1, 0): 1 / 5, (1, 3): 4 / 5, (3, 0): 9 / 13, (3, 1): 4 / 13}
    assert set(times) == set(expected)
    for pair, chance in expected.items():
        assert times[pair] / 300 == pytest.approx(chance, abs=0.12)  # four standard errors
    # The first two are of different pairs, so the others lie 1 and 2 from a centre: squared, one to four.
    thirds = [float(kmeans(column(0, 1, 1000, 1002), 3, seed=s, steps=0)[1][2, 0]) for s in range(400)]
    assert sum(third > 500 for third in thirds) / 400 == pytest.approx(4 / 5, abs=0.08)  # four standard errors


def test_every_blob_has_a_centre_however_small_it_is():
    x = torch.cat([points(200, 2), points(3, 2, seed=1) + 1000, points(3, 2, seed=2) - 1000])
    for seed in range(20):
        assert sorted(torch.bincount(kmeans(x, 3, seed=seed)[0]).tolist()) == [3, 3, 200]


def test_the_seed_decides_and_the_global_generator_stays():
    state = torch.get_rng_state()
    first = kmeans(points(), 9, seed=1)
    assert torch.get_rng_state().equal(state)
    torch.rand(5)
    again = kmeans(points(), 9, seed=1)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not kmeans(points(), 9, seed=2)[1].equal(first[1])


def test_wrong_arguments_are_named():
    x = torch.rand(3, 2)
    for points, k, options, message in (
        (torch.rand(3), 1, {}, r"points must be floating point numbers \(N, d\)"),
        (x, 4, {}, r"at least k = 4; got \(3, 2\)"),
        (x.long(), 2, {}, "points must be floating point"),
        (x, 0, {}, "k must be"),
        (torch.full((3, 2), torch.nan), 2, {}, "points must be finite"),
        (x, 2, {"steps": -1}, "steps"),
        (x, 2, {"centres": torch.rand(2, 3)}, r"centres must be \(k, d\)"),
    ):
        with pytest.raises(InputError, match=message):
            kmeans(points, k, **options)
