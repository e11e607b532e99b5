"""ViM: the length of what the training images' main space leaves over, against the logits."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.covariance import EmpiricalCovariance
from torch import nn

import kedge
from helpers import TwoHeads, images, network, penultimate, vector_network
from kedge.detectors.registry import make
from kedge.detectors.vim import ViM, default_dim, origin_of
from kedge.errors import ArchitectureError, InputError

WEIGHT = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]


def oracle(net: kedge.Classifier, x: torch.Tensor, dim: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The paper's published steps in NumPy, fitted to images(60): virtual logits and logits of x, and alpha."""
    head = net.network.fc
    weight, bias = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()
    train, test = penultimate(net, images(60)), penultimate(net, x)
    u = -np.linalg.pinv(weight) @ bias
    covariance = EmpiricalCovariance(assume_centered=True).fit(train - u)
    values, vectors = np.linalg.eig(covariance.covariance_)
    null = np.ascontiguousarray(vectors.real.T[np.argsort(values.real * -1)[dim:]].T)
    logits = train @ weight.T + bias
    alpha = logits.max(axis=-1).mean() / np.linalg.norm((train - u) @ null, axis=-1).mean()
    return np.linalg.norm((test - u) @ null, axis=-1) * alpha, test @ weight.T + bias, alpha


# The formula.


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("dim", [1, 5, 16, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_it_is_the_paper_s_published_computation(dim, kind, dtype, tolerance):
    net, x = network(kind, dtype=dtype), images(9, seed=1)
    detector = ViM(net, dim=dim).fit(images(60))
    virtual, logits, alpha = oracle(net, x, dim or 16)  # half of 32 features
    assert detector.alpha == pytest.approx(alpha, rel=tolerance)
    expected = virtual - logsumexp(logits, axis=1)
    assert detector.score(x).tolist() == pytest.approx(expected.tolist(), abs=10 * tolerance)
    assert detector.score(x).dtype == dtype


def test_the_residual_alone_needs_no_positive_logit():
    net = vector_network([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0.0, 0.0])
    train = torch.tensor([[-4.0, 0, 1], [-4, 0, -1], [0, -4, 1], [0, -4, -1]], dtype=torch.float64)
    detector = make("residual", net, dim=2).fit(train)
    assert detector.score(torch.tensor([[4.0, 0, -3], [9.0, 9, 0]], dtype=torch.float64)).tolist() == pytest.approx(
        [3, 0]
    )
    net, x = network(dtype=torch.float64), images(9, seed=1)
    virtual, _, alpha = oracle(net, x, 5)
    expected = (virtual / alpha).tolist()
    assert make("residual", net, dim=5).fit(images(60)).score(x).tolist() == pytest.approx(expected, abs=1e-9)


def test_by_hand():
    """Training images vary along the first two axes by 4 and along the third by 1; the head reads the first two."""
    net = vector_network([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0.0, 0.0])
    train = torch.tensor([[4.0, 0, 1], [4, 0, -1], [0, 4, 1], [0, 4, -1]], dtype=torch.float64)
    detector = ViM(net, dim=2).fit(train)
    assert detector.alpha == pytest.approx(4)  # the largest logit is 4 and the residual 1, of every image
    x = torch.tensor([[4.0, 0, 0], [4, 0, 3], [0, 0, -2]], dtype=torch.float64)
    energy = [math.log(math.exp(4) + 1), math.log(math.exp(4) + 1), math.log(2)]
    expected = [0 - energy[0], 12 - energy[1], 8 - energy[2]]
    assert detector.score(x).tolist() == pytest.approx(expected, abs=1e-12)


def test_features_are_measured_from_the_point_where_the_logits_are_zero():
    net = vector_network([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [3.0, 4.0])
    origin = origin_of(net[1])
    assert origin.tolist() == pytest.approx([-3, -2, 0])
    assert net[1](origin).abs().max() < 1e-12
    x = torch.rand(30, 3, dtype=torch.float64)
    without, zero = (ViM(vector_network(WEIGHT, bias), dim=1).fit(x).score(x) for bias in (None, [0.0, 0.0]))
    assert without.allclose(zero, rtol=0, atol=1e-12)


# Its options.


@pytest.mark.parametrize(
    ("features", "dim"), [(4096, 1000), (2048, 1000), (2047, 512), (768, 512), (767, 383), (3, 1), (1, 0)]
)
def test_the_default_dimension_is_that_of_the_paper_s_code(features, dim):
    assert default_dim(features) == dim


def test_by_default_the_principal_space_has_at_most_half_as_many_dimensions_as_training_images():
    net = nn.Sequential(nn.Flatten(), nn.Linear(27, 24), nn.ReLU(), nn.Linear(24, 3)).double()
    net[-1].bias.data += 5
    x = torch.rand(10, 3, 3, 3, dtype=torch.float64)
    assert ViM(net).fit(x).score(x).equal(ViM(net, dim=5).fit(x).score(x))


def test_training_sets_without_a_residual_or_a_positive_logit_are_refused():
    x = torch.rand(2, 3, dtype=torch.float64)  # two images span two dimensions at most
    net = vector_network(WEIGHT, [0.0, 0.0])
    with pytest.raises(InputError, match="no residual outside 2 of 3 dimensions"):
        ViM(net, dim=2).fit(x)
    assert ViM(net, dim=1).fit(x).score(x).shape == (2,)
    with pytest.raises(InputError, match=r"largest logit must be positive on average.*use a method"):
        ViM(vector_network(WEIGHT, [-50.0, -60.0]), dim=1).fit(x)


def test_features_that_are_too_many_to_keep_are_computed_again(monkeypatch):
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    net[-1].bias.data += 5
    train = torch.rand(600, 3, 2, 2)
    kept = ViM(net).fit(train)
    counts, read = [], ViM.features
    monkeypatch.setattr("kedge.detectors.features.KEPT_BYTES", 100)
    monkeypatch.setattr(ViM, "features", lambda self, x: counts.append(len(x)) or read(self, x))
    again = ViM(net).fit(train)
    assert sum(counts) == 2 * 600
    assert again.alpha == pytest.approx(kept.alpha, rel=1e-12)
    assert torch.equal(again.score(train[:9]), kept.score(train[:9]))


@pytest.mark.parametrize("method", [ViM, kedge.ReAct, kedge.KNN])
def test_a_head_that_is_not_the_last_linear_layer_is_found_by_running_the_network(method, tmp_path):
    train = torch.rand(40, 4)
    detector = method(TwoHeads()).fit(train).calibrate(torch.rand(30, 4))
    assert detector.head == "head"
    detector.save(tmp_path / "two.kedge")
    assert torch.equal(kedge.load(tmp_path / "two.kedge").score(train), detector.score(train))
    with pytest.raises(ArchitectureError, match=r"not the output of 'body'.*pass head="):
        method(TwoHeads(), head="body").fit(train)
    with pytest.raises(ArchitectureError, match="no linear layer"):
        method(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
