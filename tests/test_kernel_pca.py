"""CoP and CoRP: reconstruction errors against scikit-learn's PCA, in the spaces of their kernels."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import rbf_kernel

from helpers import images, network, penultimate, vector_network
from kedge.detectors.kernel_pca import CoP, CoRP, default_m

KINDS = ("unanchored", "anchored")


def unit(z):
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def reconstruction_error(train, test, variance):
    pca = PCA(variance, svd_solver="full").fit(train)
    return pca.n_components_, np.linalg.norm(test - pca.inverse_transform(pca.transform(test)), axis=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variance", [0.3, 0.85, 0.99])
def test_cop_is_the_reconstruction_error_of_directions(kind, variance):
    net, x = network(kind, dtype=torch.float64), images(9, seed=1)
    detector = CoP(net, variance=variance).fit(images(60))
    train, test = unit(penultimate(net, images(60))), unit(penultimate(net, x))
    count, expected = reconstruction_error(train, test, variance)
    assert detector.components.shape == (32, count)
    assert detector.score(x).tolist() == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_corp_is_the_reconstruction_error_of_random_fourier_features_of_directions(kind):
    net, x = network(kind, dtype=torch.float64), images(9, seed=1)
    detector = CoRP(net, variance=0.6, gamma=1.5, m=70, seed=3).fit(images(60))
    w, u = detector.frequencies.double().numpy(), detector.phases.double().numpy()
    train, test = (np.sqrt(2 / 70) * np.cos(unit(penultimate(net, each)) @ w.T + u) for each in (images(60), x))
    count, expected = reconstruction_error(train, test, 0.6)
    assert detector.components.shape == (70, count)
    assert detector.score(x).tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_inner_products_of_the_map_come_close_to_the_gaussian_kernel():
    detector = CoRP(network(dtype=torch.float64), gamma=2.0, m=20_000)
    detector.prepare_map(5)
    z = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mapped = detector.mapped(z)
    np.testing.assert_allclose(mapped @ mapped.T, rbf_kernel(unit(z.numpy()), gamma=2.0), atol=0.03)


def test_by_hand():
    """Directions along the first axis and the second: what lies along the third is left over."""
    detector = CoP(vector_network(torch.eye(3)), variance=0.5)
    detector.fit(torch.tensor([[2.0, 0, 0], [0, 3, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.float64))
    assert detector.mean.tolist() == pytest.approx([0.5, 0.5, 0])
    scores = detector.score(torch.tensor([[5.0, 0, 0], [0, 0, 7]], dtype=torch.float64))
    assert scores.tolist() == pytest.approx([0, np.sqrt(1.5)], abs=1e-12)  # of (-0.5, -0.5, 1)


@pytest.mark.parametrize("method", [CoP, CoRP])
def test_fewer_images_than_features_and_equal_ones_give_finite_scores(method):
    net = network()
    for train in (images(3), images(1).expand(4, -1, -1, -1)):
        scores = method(net).fit(train).score(images(9, seed=1))
        assert scores.isfinite().all()
        assert scores.unique().numel() == 9


def test_the_random_map_has_the_paper_s_sizes_and_follows_the_seed():
    assert [default_m(width) for width in (2, 64, 512, 1280, 2048)] == [8, 256, 2048, 2560, 4096]
    scores = [CoRP(network(), seed=seed).fit(images(60)).score(images(5, seed=1)) for seed in (0, 0, 1)]
    assert scores[0].equal(scores[1])
    assert not scores[0].equal(scores[2])
