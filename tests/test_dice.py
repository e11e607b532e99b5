"""DICE: the energy of a last layer without the weights that contribute least on average."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from helpers import images, network, penultimate, vector_network
from kedge.detectors.dice import DICE


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("sparsity", [0.3, 0.7, 0.9])
def test_it_is_the_energy_of_the_weights_above_a_percentile_of_their_mean_contributions(kind, sparsity):
    net = network(kind, dtype=torch.float64)
    detector = DICE(net, sparsity=sparsity).fit(images(60))
    train, test = penultimate(net, images(60)), penultimate(net, images(9, seed=1))
    weight, bias = (p.detach().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    contributions = weight * train.mean(axis=0)
    kept = contributions > np.percentile(contributions, 100 * sparsity)
    assert detector.mask.tolist() == kept.tolist()
    expected = -logsumexp(test @ (weight * kept).T + bias, axis=1)
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_by_hand():
    """The mean features are 2 and 1, so that the contributions are 2, 3, -4 and 1, and the largest two remain."""
    net = vector_network([[1.0, 3.0], [-2.0, 1.0]], [0.5, 0.0])
    detector = DICE(net, sparsity=0.5).fit(torch.tensor([[1.0, 0.0], [3.0, 2.0]], dtype=torch.float64))
    assert detector.mask.tolist() == [[True, True], [False, False]]
    score = detector.score(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    assert score.tolist() == pytest.approx([-math.log(math.exp(1 + 6 + 0.5) + 1)])


def test_without_sparsity_it_is_the_energy():
    net = network(dtype=torch.float64)
    with torch.no_grad():
        energy = -net(net.as_input(images(5))).logsumexp(dim=1)
    assert DICE(net, sparsity=0).fit(images(60)).score(images(5)).allclose(energy)
