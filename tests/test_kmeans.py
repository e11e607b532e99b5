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


def sklearn(x, start, steps):
    fitted = KMeans(len(start), init=start.numpy(), n_init=1, max_iter=steps, tol=0, algorithm="lloyd").fit(x.numpy())
    return fitted.labels_.tolist(), torch.from_numpy(fitted.cluster_centers_)


def naive(x, centres, steps):
    """Lloyd's algorithm as it is told; for starts that leave no group empty."""
    x, centres, groups = x.numpy(), centres.numpy().copy(), None
    for _ in range(steps):
        groups = [min(range(len(centres)), key=lambda j, p=p: ((p - centres[j]) ** 2).sum()) for p in x]
        centres = np.stack(
            [np.mean([p for p, g in zip(x, groups, strict=True) if g == j], 0) for j in range(len(centres))]
        )
    return centres


def test_a_case_by_hand():
    x = column(0, 1, 2, 10, 11, 12)
    groups, centres = kmeans(x, 2, centres=column(0, 1), steps=0)
    assert groups.tolist() == [0, 1, 1, 1, 1, 1]
    assert centres.tolist() == [[0], [1]]
    groups, centres = kmeans(x, 2, centres=column(0, 1), steps=1)  # the means of 0 alone and of the five others
    assert groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert centres.allclose(column(0, 7.2))
    groups, centres = kmeans(x, 2, centres=column(0, 1))
    assert groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert centres.allclose(column(1, 11))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 7, 60])
@pytest.mark.parametrize("steps", [1, 3, 300])
def test_the_same_as_scikit_learn_from_the_same_start(seed, k, steps):
    x = points(seed=seed)
    start = x[torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:k]]
    groups, centres = kmeans(x, k, centres=start, steps=steps)
    expected, means = sklearn(x, start, steps)
    assert groups.tolist() == expected
    assert centres.allclose(means, rtol=1e-10)


def test_the_same_as_the_definition():
    x = points(40, 2, seed=3)
    for steps in (1, 2, 5):
        assert kmeans(x, 4, centres=x[:4], steps=steps)[1].allclose(torch.from_numpy(naive(x, x[:4], steps)))


def test_an_empty_group_takes_the_point_that_is_furthest_from_its_centre():
    x = column(0, 1, 10)
    groups, centres = kmeans(x, 2, centres=column(0, 1000), steps=1)
    assert groups.tolist() == [0, 0, 1]
    assert centres.allclose(column(0.5, 10))
    assert groups.tolist() == sklearn(x, column(0, 1000), 1)[0]
    for seed in range(5):
        x = points(seed=seed)
        start = torch.cat([x[:3], torch.full((1, 3), 50.0, dtype=torch.float64)])
        groups, centres = kmeans(x, 4, centres=start, steps=300)
        expected, means = sklearn(x, start, 300)
        assert groups.tolist() == expected
        assert centres.allclose(means, rtol=1e-10)


def test_a_group_gives_no_point_away_that_is_its_only_one():
    """The lone points 100 and 0 lie furthest from their centres; the empty group gets the next one, 51."""
    x = column(100, 0, 50, 51)
    _, centres = kmeans(x, 4, centres=column(130, 50, -9, 1e6), steps=1)
    assert centres.allclose(column(100, 50, 0, 51))


def test_two_empty_groups_take_the_two_furthest_points():
    x = column(0, 1, 2, 8, 9)
    _, centres = kmeans(x, 3, centres=column(0, 100, 200), steps=1)
    assert centres.allclose(column(1 + 2, 27, 24) / 3)  # 0, 1 and 2; 9 for the first empty group; 8 for the second


@pytest.mark.parametrize("distinct", [1, 2])
def test_fewer_different_points_than_groups(distinct):
    x = torch.arange(6.0)[:, None] % distinct
    groups, centres = kmeans(x, 4)
    assert len(groups.unique()) == distinct
    assert all(len(groups[x[:, 0] == value].unique()) == 1 for value in range(distinct))
    assert centres[groups].equal(x)
    assert kmeans(x, 4)[0].equal(groups)


def test_as_many_groups_as_points():
    x = points(20)
    groups, centres = kmeans(x, 20)
    assert sorted(groups.tolist()) == list(range(20))
    assert centres[groups].allclose(x)


def test_the_size_of_the_blocks_does_not_matter(monkeypatch):
    x = points(500, 4)
    expected = kmeans(x, 7)
    monkeypatch.setattr(module, "BLOCK", 30)
    groups, centres = kmeans(x, 7)
    assert groups.equal(expected[0])
    assert centres.allclose(expected[1])


def test_more_points_than_one_sum_takes():
    x = points(70_000, 2)
    groups, centres = kmeans(x, 3, steps=2)
    expected, means = sklearn(x, kmeans(x, 3, steps=0)[1], 2)
    assert groups.tolist() == expected
    assert centres.allclose(means)


def test_points_far_from_zero_in_single_precision():
    x = torch.cat([points(50, 2, dtype=torch.float32), points(50, 2, seed=1, dtype=torch.float32) + 8])
    groups, centres = kmeans(x, 2, seed=1)
    assert len(groups[:50].unique()) == len(groups[50:].unique()) == 1
    far, middle = kmeans(x + 100_000, 2, seed=1)
    assert far.equal(groups)
    assert middle.allclose(centres + 100_000, rtol=0, atol=0.05)
    assert middle.dtype == torch.float32


# The starting centres.


def test_the_start_is_drawn_as_k_means_plus_plus_draws_it():
    """Of 0, 1 and 3, the second is drawn by its squared distance to the first."""
    x, times = column(0, 1, 3), {}
    for seed in range(900):
        pair = tuple(kmeans(x, 2, seed=seed, steps=0)[1][:, 0].round().int().tolist())
        times[pair] = times.get(pair, 0) + 1
    expected = {(0, 1): 1 / 10, (0, 3): 9 / 10, (1, 0): 1 / 5, (1, 3): 4 / 5, (3, 0): 9 / 13, (3, 1): 4 / 13}
    assert set(times) == set(expected)
    for pair, chance in expected.items():
        assert times[pair] / 300 == pytest.approx(chance, abs=0.12)  # four standard errors


def test_the_third_centre_is_drawn_by_the_distance_to_the_nearer_of_two():
    """The first two are of different pairs, so the others lie 1 and 2 from a centre: squared, one to four."""
    x = column(0, 1, 1000, 1002)
    thirds = [float(kmeans(x, 3, seed=seed, steps=0)[1][2, 0]) for seed in range(400)]
    assert sum(third > 500 for third in thirds) / 400 == pytest.approx(4 / 5, abs=0.08)  # four standard errors


def test_every_blob_has_a_centre_however_small_it_is():
    x = torch.cat([points(200, 2), points(3, 2, seed=1) + 1000, points(3, 2, seed=2) - 1000])
    for seed in range(20):
        groups, _ = kmeans(x, 3, seed=seed)
        assert sorted(torch.bincount(groups).tolist()) == [3, 3, 200]


def test_the_seed_decides_and_the_global_generator_stays():
    x, state = points(), torch.get_rng_state()
    first = kmeans(x, 9, seed=1)
    assert torch.get_rng_state().equal(state)
    torch.rand(5)
    again = kmeans(x, 9, seed=1)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not kmeans(x, 9, seed=2)[1].equal(first[1])


@pytest.mark.parametrize(
    ("x", "k", "options", "message"),
    [
        (torch.rand(3), 1, {}, r"points must be floating point numbers \(N, d\) with N at least k = 1; got \(3,\)"),
        (torch.rand(3, 2), 4, {}, r"at least k = 4; got \(3, 2\)"),
        (torch.ones(3, 2, dtype=torch.long), 2, {}, "points must be floating point"),
        (torch.rand(3, 2), 0, {}, "k must be a whole number of at least 1; got 0"),
        (torch.full((3, 2), torch.nan), 2, {}, "points must be finite; 6 of 6"),
        (torch.rand(3, 2), 2, {"steps": -1}, "steps must be a whole number of at least 0"),
        (torch.rand(3, 2), 2, {"centres": torch.rand(2, 3)}, r"centres must be \(k, d\), \(2, 2\) here; got \(2, 3\)"),
    ],
)
def test_what_cannot_be_grouped(x, k, options, message):
    with pytest.raises(InputError, match=message):
        kmeans(x, k, **options)
