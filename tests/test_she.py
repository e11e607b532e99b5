"""SHE and HE: the Hopfield energy of features with the patterns of the predicted class."""

import math

import numpy as np
import pytest
import torch

import kedge
from helpers import images, network, penultimate, vector_network
from kedge.detectors import she
from kedge.detectors.registry import make
from kedge.detectors.she import SHE
from kedge.errors import InputError


def labelled(net, n: int = 60, wrong: int = 4) -> kedge.ImageSet:
    """Images with the labels that the network predicts, but for every ``wrong``-th."""
    x = images(n)
    kedge.MSP(net).fit(x)  # sets anchors
    with torch.no_grad():
        logits = net(net.as_input(x))
    labels = logits.argmax(dim=1)
    labels[::wrong] = (labels[::wrong] + 1) % logits.shape[1]
    return kedge.ImageSet(x, labels)


def patterns(net, train: kedge.ImageSet) -> tuple[dict[int, list[np.ndarray]], np.ndarray, np.ndarray]:
    """The features of correctly classified images of each class, and the last layer."""
    weight, bias = (p.detach().double().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    stored: dict[int, list[np.ndarray]] = {}
    for z, label in zip(penultimate(net, train.images), train.labels.tolist(), strict=True):
        if int(np.argmax(weight @ z + bias)) == label:
            stored.setdefault(label, []).append(z)
    return stored, weight, bias


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("classes", [2, 4, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_she_is_the_product_with_the_mean_of_the_correctly_classified(kind, classes, dtype, tolerance):
    net, x = network(kind, classes=classes, dtype=dtype), images(9, seed=1)
    stored, weight, bias = patterns(net, labelled(net))
    every = [z for each in stored.values() for z in each]
    expected = []
    for z in penultimate(net, x):
        pattern = np.mean(stored.get(int(np.argmax(weight @ z + bias)), every), axis=0)
        expected.append(-float(z @ pattern))
    score = SHE(net).fit(labelled(net)).score(x)
    assert score.dtype == dtype
    assert score.tolist() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize(("classes", "beta"), [(2, 0.01), (4, 0.5), (1000, 3.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_he_is_the_hopfield_energy_of_all_of_them(kind, classes, beta, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(she, "ROWS", 3)
    net, x = network(kind, classes=classes, dtype=dtype), images(9, seed=1)
    stored, weight, bias = patterns(net, labelled(net))
    every = [z for each in stored.values() for z in each]
    expected = []
    for z in penultimate(net, x):
        products = [float(z @ other) for other in stored.get(int(np.argmax(weight @ z + bias)), every)]
        expected.append(-math.log(math.fsum(math.exp(beta * p) for p in products)) / beta)
    score = make("he", net, beta=beta).fit(labelled(net)).score(x)
    assert score.tolist() == pytest.approx(expected, rel=tolerance)


def test_by_hand():
    """Of three images of the first class one is taken for the second; (2, 1) belongs to the first."""
    net = vector_network(np.eye(2))
    train = [(torch.tensor(z, dtype=torch.float64), y) for z, y in (([4.0, 0], 0), ([2.0, 2], 0), ([0.0, 9], 0))]
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    assert SHE(net).fit(train).bank.tolist() == [[3, 1], [3, 1]]  # the second class has none of its own
    assert SHE(net).fit(train).score(x).item() == pytest.approx(-7)
    hopfield = SHE(net, patterns="all", beta=0.5).fit(train)
    assert hopfield.counts.tolist() == [2, 0]
    assert hopfield.score(x).item() == pytest.approx(-2 * math.log(math.exp(4) + math.exp(3)))


def test_a_limit_keeps_some_of_the_patterns():
    net = network(dtype=torch.float64)
    every, kept = (SHE(net, patterns="all", limit=limit).fit(labelled(net)).bank for limit in (60, 8))
    assert (len(every), len(kept)) == (45, 8)
    assert all(any(row.equal(other) for other in every) for row in kept)


def test_some_training_images_must_be_classified_correctly():
    net = vector_network(np.eye(2))
    wrong = [(torch.tensor([1.0, 0.0], dtype=torch.float64), 1)] * 3
    for patterns_ in she.PATTERNS:
        with pytest.raises(InputError, match="classifies correctly"):
            SHE(net, patterns=patterns_).fit(wrong)
