"""OpenMax: the odds of an unknown class, with Weibull tails fitted by SciPy, one image and one class at a time."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import fmin
from scipy.special import logsumexp
from scipy.stats import weibull_min

import kedge
from helpers import images, network, vector_network
from kedge.detectors.openmax import OpenMax, weibull_tail
from kedge.errors import InputError

IDENTITY = [[1.0, 0.0], [0.0, 1.0]]


def correct(logits, labels, c):
    return logits[(labels == c) & (logits.argmax(axis=1) == c)]


def scipys_fit(values):
    """Shape and scale, searched until they stay."""
    fit = weibull_min.fit(values, floc=0, optimizer=partial(fmin, xtol=1e-12, ftol=1e-12, maxfun=9999))
    return fit[0], fit[2]


def oracle(train, labels, test, tail, alpha):
    """Algorithms 1 and 2 of the paper with the ranks of its code, in NumPy and SciPy."""
    means, fits = {}, {}
    for c in range(train.shape[1]):
        mine = correct(train, labels, c)
        if len(mine):
            means[c] = mine.mean(axis=0)
            largest = np.sort(np.linalg.norm(mine - means[c], axis=1))[-tail:]
            fits[c] = (largest.min(), *scipys_fit(largest - largest.min() + 10_000))
    alpha, scores = min(alpha, train.shape[1]), []
    for z in test:
        known, unknown = z.copy(), 0.0
        for rank, c in enumerate(np.argsort(-z)[:alpha]):
            share = 1.0
            if c in fits:
                smallest, shape, scale = fits[c]
                share = weibull_min.cdf(np.linalg.norm(z - means[c]) - smallest + 10_000, shape, 0, scale)
            weight = (alpha - rank) / alpha * share
            known[c] = z[c] * (1 - weight)
            unknown += z[c] * weight
        scores.append(unknown - logsumexp(known))
    return scores


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize(("classes", "tail", "alpha"), [(2, 20, 10), (4, 5, 3), (4, 100, 1)])
def test_it_is_the_paper_s_computation(kind, classes, tail, alpha):
    net, x = network(kind, classes=classes, dtype=torch.float64), images(9, seed=1)
    kedge.MSP(net).fit(images(80))  # sets the anchors
    with torch.no_grad():
        train, test = (net(net.as_input(each)).numpy() for each in (images(80), x))
    labels = np.where(np.arange(80) % 3 > 0, train.argmax(axis=1), 0)  # two thirds are right at least
    detector = OpenMax(net, tail=tail, alpha=alpha).fit(kedge.ImageSet(images(80), torch.from_numpy(labels)))
    expected = oracle(train, labels, test, tail, alpha)
    assert detector.score(x).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("n", [2, 5, 20, 500])
def test_a_tail_has_the_shape_and_scale_that_scipy_finds(n):
    distances = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) * 3 + 2
    smallest, shape, scale = weibull_tail(distances)
    moved = (distances - smallest).numpy() + 10_000
    expected_shape, expected_scale = scipys_fit(moved)
    assert smallest == distances.min()
    assert (shape, scale) == (pytest.approx(expected_shape, rel=1e-4), pytest.approx(expected_scale, rel=1e-9))
    own, scipys = (
        weibull_min.logpdf(moved, k, 0, s).sum() for k, s in ((shape, scale), (expected_shape, expected_scale))
    )
    assert own >= scipys - 1e-6


def test_equal_distances_are_a_step():
    for distances in (torch.tensor([2.0], dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)):
        smallest, shape, scale = weibull_tail(distances)
        values = torch.tensor([1.9, 2.1], dtype=torch.float64) - smallest + 10_000
        assert (values / scale).pow(shape).tolist() == [0, math.inf]  # minus the logarithm of what is above


def test_far_images_have_larger_odds_of_the_unknown_class_and_a_class_without_images_is_unknown():
    generator = torch.Generator().manual_seed(0)
    z = torch.tensor([[9.0, 2.0]]).double() + torch.rand(40, 2, dtype=torch.float64, generator=generator)
    detector = OpenMax(vector_network(IDENTITY), alpha=1).fit(list(zip(z, [0] * 40, strict=True)))
    assert detector.means[1].tolist() == [0, 0]
    near, far, other = detector.score(torch.tensor([[9.5, 2.5], [14.0, 2.5], [2.5, 9.5]], dtype=torch.float64)).tolist()
    assert near < far
    assert far == pytest.approx(14 - math.log(1 + math.exp(2.5)))  # all of the largest logit is the unknown class's
    assert other == pytest.approx(9.5 - math.log(1 + math.exp(2.5)))


def test_labels_that_the_network_never_gives_are_refused():
    wrong = [(torch.tensor([1.0, 0.0], dtype=torch.float64), 1)] * 4
    with pytest.raises(InputError, match="images that the network classifies correctly"):
        OpenMax(vector_network(IDENTITY)).fit(wrong)
    with pytest.raises(InputError, match="must have a label for each image"):
        OpenMax(vector_network(IDENTITY)).fit(torch.rand(9, 2, dtype=torch.float64))
