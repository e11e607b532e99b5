"""NCI: the alignment of centred features with the weight of the predicted class."""

import math

import numpy as np
import pytest
import torch

from helpers import images, network, penultimate, vector_network
from kedge.detectors.nci import NCI


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize(("classes", "alpha"), [(2, 0), (4, 0.01), (1000, 1.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_it_is_the_cosine_times_the_weight_s_length_and_the_norm(kind, classes, alpha, dtype, tolerance):
    net, x = network(kind, classes=classes, dtype=dtype), images(9, seed=1)
    score = NCI(net, alpha=alpha).fit(images(60)).score(x)
    weight, bias = (p.detach().double().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    mean = penultimate(net, images(60)).mean(axis=0)
    expected = []
    for h in penultimate(net, x):
        w, centred = weight[np.argmax(weight @ h + bias)], h - mean
        cosine = w @ centred / np.linalg.norm(w) / np.linalg.norm(centred)
        expected.append(-cosine * np.linalg.norm(w) - alpha * sum(abs(h)))
    assert score.dtype == dtype
    assert score.tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_by_hand():
    """The mean is (1, 0), so that (4, 4) lies at (3, 4) from it; its class is the second."""
    detector = NCI(vector_network([[1.0, 0.0], [0.0, 2.0]]), alpha=0.5)
    detector.fit(torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64))
    score = detector.score(torch.tensor([[4.0, 4.0], [4.0, -4.0], [1.0, 0.0]], dtype=torch.float64)).tolist()
    assert score == pytest.approx([-(2 * 4 / 5 + 0.5 * 8), -(3 / 5 + 0.5 * 8), -0.5])
    assert all(map(math.isfinite, score))
