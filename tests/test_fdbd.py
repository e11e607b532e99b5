"""fDBD: how far an image's features are from the decision boundaries, relative to the training mean."""

import math

import numpy as np
import pytest
import torch

from helpers import images, network, penultimate, vector_network
from kedge.detectors.fdbd import FDBD


def oracle(net, train: torch.Tensor, x: torch.Tensor) -> list[float]:
    """The paper's definition: for each other class, project onto the plane where both logits are equal."""
    weight, bias = (p.detach().double().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    mean = penultimate(net, train).mean(axis=0)
    scores = []
    for h in penultimate(net, x):
        y = int(np.argmax(weight @ h + bias))
        distances = []
        for c in set(range(len(weight))) - {y}:
            normal, offset = weight[y] - weight[c], bias[y] - bias[c]
            onto = h - (normal @ h + offset) / (normal @ normal) * normal
            distances.append(np.linalg.norm(h - onto))
        scores.append(-np.mean(distances) / np.linalg.norm(h - mean))
    return scores


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("classes", [2, 4, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_it_is_the_mean_distance_to_the_boundaries(kind, classes, dtype, tolerance):
    net, x = network(kind, classes=classes, dtype=dtype), images(9, seed=1)
    score = FDBD(net).fit(images(60)).score(x)
    assert score.dtype == dtype
    assert score.tolist() == pytest.approx(oracle(net, images(60), x), rel=tolerance)


def test_by_hand():
    """Logits are the features themselves: boundaries are diagonals, and (3, 1, 0) is 2 and 3 over sqrt(2) from them."""
    detector = FDBD(vector_network(np.eye(3))).fit(torch.zeros(2, 3, dtype=torch.float64))
    assert detector.mean.tolist() == [0, 0, 0]
    score = detector.score(torch.tensor([[3.0, 1, 0]], dtype=torch.float64))
    assert score.tolist() == pytest.approx([-(2 + 3) / 2 / math.sqrt(2) / math.sqrt(10)])


def test_classes_without_a_boundary_and_an_image_at_the_mean_have_finite_scores():
    net = vector_network([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0.0, 1.0, 0.0])
    detector = FDBD(net).fit(torch.tensor([[0.0, 0.0], [2.0, 2.0]], dtype=torch.float64))
    away, at_mean = detector.score(torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)).tolist()
    assert away == pytest.approx(-(3 / math.sqrt(2)) / 2 / 2)  # of the third class alone
    assert math.isfinite(at_mean)
    assert at_mean < away


def test_classes_with_nearly_the_same_weights():
    net = vector_network([[1.0, 1.0], [1.0, 1.0 + 1e-9]])
    detector = FDBD(net).fit(torch.zeros(2, 2, dtype=torch.float64))
    assert detector.gaps[0, 1].item() == pytest.approx(1e-9, rel=1e-6)
