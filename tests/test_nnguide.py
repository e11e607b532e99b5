"""NNGuide: the energy times the mean of the largest energy-weighted cosines with training images."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from helpers import images, network, penultimate, vector_network
from kedge.detectors import search
from kedge.detectors.nnguide import NNGuide


def oracle(net, train: torch.Tensor, x: torch.Tensor, k: int) -> list[float]:
    """The paper's definition, one image and one training image at a time."""
    weight, bias = (p.detach().double().numpy() for p in (net.network.fc.weight, net.network.fc.bias))

    def read(z: np.ndarray) -> tuple[np.ndarray, float]:
        return z / np.linalg.norm(z), float(logsumexp(weight @ z + bias))

    bank = [read(z) for z in penultimate(net, train)]
    scores = []
    for direction, energy in map(read, penultimate(net, x)):
        products = sorted((its * float(direction @ other) for other, its in bank), reverse=True)
        scores.append(-energy * sum(products[:k]) / k)
    return scores


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize(("classes", "k"), [(2, 1), (4, 10), (1000, 60)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_it_is_the_energy_times_its_guidance(kind, classes, k, dtype, tolerance):
    net, x = network(kind, classes=classes, dtype=dtype), images(9, seed=1)
    detector = NNGuide(net, k=k).fit(images(60))
    assert detector.score(x).tolist() == pytest.approx(oracle(net, images(60), x, k), rel=tolerance)
    assert detector.bank.dtype == detector.score(x).dtype == dtype


def test_by_hand():
    """One class, so that the energy is the logit: 2 for (2, 0), which has energies times cosines of 3, 0 and -1."""
    detector = NNGuide(vector_network([[1.0, 0.0]], [0.0]), k=2)
    detector.fit(torch.tensor([[3.0, 0.0], [0.0, 5.0], [1.0, 0.0]], dtype=torch.float64))
    assert detector.score(torch.tensor([[2.0, 0.0]], dtype=torch.float64)).tolist() == pytest.approx([-2 * (3 + 1) / 2])


def test_a_bank_in_pieces_gives_the_same_scores(monkeypatch):
    net, x = network(dtype=torch.float64), images(9, seed=1)
    detector = NNGuide(net, k=7).fit(images(60))
    whole = detector.score(x)
    monkeypatch.setattr(search, "ROWS", 4)
    monkeypatch.setattr(search, "QUERIES", 3)
    assert detector.score(x).allclose(whole, rtol=1e-12)


def test_a_limit_keeps_some_of_the_training_images_and_fewer_than_k_are_all_neighbours():
    net, x = network(dtype=torch.float64), images(9, seed=1)
    every = NNGuide(net).fit(images(60)).bank
    kept = NNGuide(net, limit=8, seed=3).fit(images(60))
    assert kept.bank.shape == (8, 32)
    assert all(any(row.allclose(other) for other in every) for row in kept.bank)
    assert kept.score(x).tolist() == pytest.approx(NNGuide(net, k=8, limit=8, seed=3).fit(images(60)).score(x).tolist())
