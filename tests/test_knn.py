"""KNN: the distance to the k-th nearest training image."""

import math
import weakref

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import nn

import kedge
from helpers import images, layer_maps, network, penultimate
from kedge.detectors import search
from kedge.detectors.bank import sample_rows
from kedge.detectors.knn import KNN
from kedge.detectors.search import kth_distance
from kedge.errors import ArchitectureError, InputError


def identity(dtype=torch.float64) -> nn.Module:
    """A network whose features are its inputs, vectors of two numbers."""
    return nn.Sequential(nn.Identity(), nn.Linear(2, 3, dtype=dtype))


@torch.no_grad()
def maps_of(net: kedge.Classifier, layer: str, x: torch.Tensor) -> np.ndarray:
    """A layer's features, averaged over positions and anchors."""
    return layer_maps(net, x.to(net.mean.dtype) / 255, [layer])[1][0].mean(dim=2).double().numpy()


def normalised(z: np.ndarray) -> np.ndarray:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def neighbours(bank: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """Scikit-learn's distances to the k-th neighbour."""
    result = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(normalised(bank)).kneighbors(normalised(queries))
    return result[0][:, -1]


# The formula.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_it_is_the_distance_that_scikit_learn_finds(k, dtype, tolerance):
    net = network(dtype=dtype)
    expected = neighbours(maps_of(net, "flatten", images()), maps_of(net, "flatten", images(9, seed=1)), k)
    detector = KNN(net, k=k).fit(images())
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected.tolist(), abs=tolerance)
    assert detector.bank.shape == (40, 32)
    assert detector.bank.dtype == detector.score(images(9)).dtype == dtype


def test_by_hand():
    """Vectors at 0, 60 and 180 degrees, of any length; one at 90 degrees lies 30, 90 and 90 degrees from them."""
    angles = torch.tensor([0.0, 60.0, 180.0], dtype=torch.float64).deg2rad()
    bank = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([[1.0], [5.0], [0.2]])
    query = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    for k, degrees in ((1, 30), (2, 90), (3, 90)):
        detector = KNN(identity(), k=k).fit(bank)
        assert detector.score(query).item() == pytest.approx(2 * math.sin(math.radians(degrees) / 2), abs=1e-12)


def test_half_precision_is_compared_in_single_and_lengths_do_not_count():
    x = torch.rand(20, 2).bfloat16()
    detector = KNN(identity(torch.bfloat16), k=2).fit(x)
    assert detector.bank.dtype == detector.score(x).dtype == torch.float32
    assert detector.score(4 * x).equal(detector.score(x))
    assert detector.score(torch.zeros(1, 2).bfloat16()).item() == pytest.approx(1, abs=1e-6)  # without a direction


def test_the_nearest_of_near_duplicates():
    """In single precision, products of unit vectors do not tell distances below 3e-4 apart."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.nn.functional.normalize(torch.randn(1, 64, generator=generator), dim=1)
    bank = centre + 1e-6 * torch.randn(30, 64, generator=generator)
    rows = bank.double().tolist()
    for k in (1, 2, 15):
        for query, result in zip(rows, kth_distance(bank, bank, k).tolist(), strict=True):
            assert result == pytest.approx(sorted(math.dist(query, row) for row in rows)[k - 1], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_a_large_bank_in_single_precision_gives_the_distances_of_double_precision(spread, monkeypatch):
    """Among near duplicates the scan cannot tell which rows are nearest, and double precision decides."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(1, 48, generator=generator)
    bank = torch.nn.functional.normalize(centre + spread * torch.randn(3000, 48, generator=generator), dim=1)
    queries = torch.cat([bank[:3], torch.nn.functional.normalize(torch.randn(5, 48, generator=generator), dim=1)])
    done, again = search._kth_in_double, []
    monkeypatch.setattr(search, "_kth_in_double", lambda q, *rest: again.append(len(q)) or done(q, *rest))
    for k in (1, 50):
        expected = torch.cdist(queries.double(), bank.double(), compute_mode="donot_use_mm_for_euclid_dist")
        assert kth_distance(queries, bank, k).allclose(expected.sort(dim=1).values[:, k - 1], rtol=1e-9, atol=1e-12)
    assert bool(again) is (spread < 1)


def test_a_bank_in_pieces_gives_the_same_neighbours(monkeypatch):
    bank, queries = torch.randn(50, 6).double(), torch.randn(11, 6).double()
    for k in (1, 7, 50):
        whole = kth_distance(queries, bank, k)
        with monkeypatch.context() as small:
            small.setattr(search, "ROWS", 4)
            small.setattr(search, "QUERIES", 3)
            assert kth_distance(queries, bank, k).allclose(whole, rtol=0, atol=1e-12)
        expected = NearestNeighbors(n_neighbors=k).fit(bank.numpy()).kneighbors(queries.numpy())[0][:, -1]
        assert whole.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


# Which features.


@pytest.mark.parametrize("stage", ["stage1", "stage2", "flatten"])
def test_another_layer_s_features_and_maps_are_averaged(stage):
    net = network()
    bank, queries = (maps_of(net, stage, x) for x in (images(), images(9, seed=1)))
    detector = KNN(net, k=3, layer=stage).fit(images())
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(neighbours(bank, queries, 3).tolist(), abs=1e-5)


def test_the_input_of_a_layer_and_a_network_without_a_head():
    net, x = network(), images(9, seed=1)
    assert KNN(net, layer="fc:in").fit(images()).score(x).equal(KNN(net).fit(images()).score(x))
    assert KNN(net, layer="fc").fit(images()).bank.shape == (40, 4)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ArchitectureError, match="no linear layer"):
        KNN(convolutions)
    assert KNN(convolutions, layer="0").fit(images()).bank.shape == (40, 4)
    with pytest.raises(InputError, match="has no layer 'stage9'; did you mean"):
        KNN(net, layer="stage9").fit(images())


def test_with_anchors_the_features_are_means():
    net = network("anchored", dtype=torch.float64)
    detector = KNN(net, k=3).fit(images())
    expected = neighbours(penultimate(net, images()), penultimate(net, images(9, seed=1)), 3)
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected.tolist(), abs=1e-9)


# How many neighbours, and how many images are kept.


@pytest.mark.parametrize(("n", "k"), [(7, 1), (60, 2), (300, 10), (2000, 50)])
def test_by_default_a_tenth_of_the_images_of_a_class(n, k, tmp_path):
    """Of three classes."""
    default, same = KNN(identity(torch.float32)), KNN(identity(torch.float32), k=k)
    assert default.k is None
    x = torch.rand(n, 2)
    assert default.fit(x).k == k
    assert default.score(x[:5]).equal(same.fit(x).score(x[:5]))
    default.save(tmp_path / "knn.kedge")
    assert kedge.load(tmp_path / "knn.kedge").k == k


def test_a_limit_keeps_some_of_the_training_images():
    net = network()
    every = KNN(net).fit(images(300)).bank
    kept = KNN(net, limit=20).fit(images(300))
    assert kept.bank.shape == (20, 32)
    places = [(every - row).abs().amax(dim=1).argmin().item() for row in kept.bank]
    assert len(set(places)) == 20
    assert every[places].allclose(kept.bank, atol=1e-6)
    assert max(places) >= 256  # not the first batch alone
    assert KNN(net, limit=20).fit(images(300)).bank.equal(kept.bank)
    assert not KNN(net, limit=20, seed=1).fit(images(300)).bank.equal(kept.bank)
    assert KNN(net, limit=20).fit(images(15)).bank.shape == (15, 32)


@pytest.mark.parametrize("size", [1, 4, 10])
def test_every_row_has_the_same_chance_to_be_kept(size):
    counts = np.zeros(10)
    for seed in range(1500):
        rows = sample_rows(torch.arange(10.0)[:, None].split(size), 3, seed).flatten().long().tolist()
        assert len(set(rows)) == 3
        counts[rows] += 1
    deviation = math.sqrt(1500 * 0.3 * 0.7)
    assert np.abs(counts - 450).max() < 4 * deviation


def test_no_more_rows_are_held_than_are_kept():
    alive: list[weakref.ref] = []

    def parts():
        for i in range(10):
            if i >= 3:  # 5 rows are kept, which the first two parts fill; the one just looked at may still be there
                assert sum(part() is not None for part in alive) <= 1
            part = torch.full((4, 1), float(i))
            alive.append(weakref.ref(part))
            yield part
            del part

    given = torch.arange(10.0)[:, None]
    sample_rows([given], 3, 0)
    assert given.flatten().tolist() == list(range(10))  # nothing is written into what came
    assert sample_rows(parts(), 5, 0).shape == (5, 1)
