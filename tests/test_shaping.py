"""Activation shaping as an option of the methods of the logits, against loops over single activations."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax

import kedge
from helpers import images, network, penultimate, vector_network
from kedge.detectors import shaping
from kedge.detectors.registry import make
from kedge.detectors.shaping import SHAPES
from kedge.errors import ArchitectureError, InputError

ROWS = np.array([[5.0, 1.0, 0.0, 3.0, 0.5], [0.0, 2.0, 2.5, 0.5, 7.0]])


def kept(row, percentile):
    """The positions of an image's largest activations."""
    count = max(1, len(row) - round(len(row) * percentile))
    return sorted(range(len(row)), key=lambda i: -row[i])[:count]


def ratio(row, percentile):
    return sum(row) / sum(row[i] for i in kept(row, percentile))


def shaped(name, row, percentile, clip=()):
    """Features of one image, and the factor of its logits, by the papers' definitions."""
    top = kept(row, percentile)
    if name == "react":
        return [min(a, clip[0]) for a in row], 1.0
    if name == "vra":
        return [0.0 if a < clip[0] else min(a, clip[1]) for a in row], 1.0
    if name == "ash-p":
        return [a if i in top else 0.0 for i, a in enumerate(row)], 1.0
    if name == "ash-b":
        return [sum(row) / len(top) if i in top else 0.0 for i in range(len(row))], 1.0
    if name in ("ash-s", "ash"):
        return [a * math.exp(ratio(row, percentile)) if i in top else 0.0 for i, a in enumerate(row)], 1.0
    if name == "scale":
        return [a * math.exp(ratio(row, percentile)) for a in row], 1.0
    return list(row), ratio(row, percentile) ** 2


def expected_logits(net, name, h, percentile, clip=()):
    weight, bias = (p.detach().double().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    rows = [shaped(name, row, percentile, clip) for row in h]
    return np.array([factor * (weight @ np.array(features) + bias) for features, factor in rows])


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_score_is_the_energy_of_the_logits_of_shaped_features(name, kind):
    net = network(kind, dtype=torch.float64)
    detector = kedge.Energy(net, shape=name).fit(images(60))
    percentile = SHAPES[name].percentile
    clip = np.quantile(penultimate(net, images(60)), percentile) if name in ("react", "vra") else ()
    h = penultimate(net, images(9, seed=1))
    assert (h >= 0).all()
    expected = -logsumexp(expected_logits(net, name, h, percentile[0], clip), axis=1)
    result = detector.score(images(9, seed=1))
    assert result.tolist() == pytest.approx(expected.tolist(), rel=1e-4 if len(clip) else 1e-9)
    assert not torch.allclose(result, kedge.Energy(net).fit(images(60)).score(images(9, seed=1)))


@pytest.mark.parametrize("percentile", [0.0, 0.3, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.learns])
def test_each_percentile(name, percentile):
    result = SHAPES[name].function(torch.from_numpy(ROWS), percentile)
    rows = [shaped(name, row, percentile) for row in ROWS]
    expected = [[factor] for _, factor in rows] if name == "lts" else [features for features, _ in rows]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_by_hand():
    """Of 5, 1, 0, 3, 1 the upper two fifths are 5 and 3: r = 10 / 8."""
    h, e = torch.tensor([[5.0, 1.0, 0.0, 3.0, 1.0]]), math.exp(10 / 8)
    assert shaping.ash_p(h, 0.6).tolist() == [[5, 0, 0, 3, 0]]
    assert shaping.ash_b(h, 0.6).tolist() == [[5, 0, 0, 5, 0]]
    assert shaping.ash_s(h, 0.6).tolist() == [pytest.approx([5 * e, 0, 0, 3 * e, 0])]
    assert shaping.scale(h, 0.6).tolist() == [pytest.approx([5 * e, e, 0, 3 * e, e])]
    assert shaping.lts(h, 0.6).tolist() == [[(10 / 8) ** 2]]
    assert shaping.react(h, 2).tolist() == [[2, 1, 0, 2, 1]]
    assert shaping.vra(h, 1, 4).tolist() == [[4, 1, 0, 3, 1]]


def test_images_without_a_positive_activation_have_finite_scores():
    h = torch.tensor([[0.0, 0.0, 0.0], [-1.0, -2.0, -3.0], [2.0, -5.0, -1.0]])
    assert shaping.top_ratio(h, 0.6).tolist() == [[1.0], [1.0], [1.0]]
    for shape in SHAPES.values():
        numbers = (0.1, 0.9)[: len(shape.percentile)]
        assert shape.function(h, *numbers).isfinite().all()


@pytest.mark.parametrize("method", [kedge.MSP, kedge.MaxLogit, kedge.Entropy, kedge.KLUniform, kedge.GEN])
def test_every_method_of_the_logits_takes_a_shape(method):
    net = network(dtype=torch.float64)
    logits = expected_logits(net, "scale", penultimate(net, images(9, seed=1)), 0.7)
    p = softmax(logits, axis=1)
    expected = {
        "msp": -p.max(axis=1),
        "max_logit": -logits.max(axis=1),
        "gen": (p**0.1 * (1 - p) ** 0.1).sum(axis=1),
        "entropy": -(p * np.log(p)).sum(axis=1),
        "kl_uniform": logits.mean(axis=1) - logsumexp(logits, axis=1),
    }[method.name]
    detector = method(net, shape="scale", percentile=0.7).fit(images(60))
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-12)


def test_names_of_methods_are_the_energy_with_a_shape():
    net = network()
    for name in ("ash", "scale", "lts", "vra"):
        one, other = (d.fit(images(60)) for d in (make(name, net), kedge.Energy(net, shape=name)))
        assert one.score(images(9, seed=1)).equal(other.score(images(9, seed=1)))
    react = kedge.Energy(net, shape="react", percentile=0.8).fit(images(60))
    assert kedge.ReAct(net, percentile=0.8).fit(images(60)).score(images(9)).equal(react.score(images(9)))


def test_what_a_detector_says_of_itself():
    net = network()
    plain, shaped_one = kedge.Energy(net), kedge.Energy(net, shape="vra")
    assert (plain.reads, shaped_one.reads, kedge.Energy.reads) == ("logits", "features", "logits")
    assert plain.takes_features
    assert shaped_one.takes_features
    assert (plain.percentile, shaped_one.percentile) == (None, (0.6, 0.95))
    assert shaped_one.config() == {"shape": "vra", "percentile": (0.6, 0.95), "head": "fc"}


def test_without_a_shape_no_linear_layer_is_needed_and_fit_reads_no_image():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 8), torch.nn.Flatten())
    detector = kedge.Energy(net).fit(images(4))
    assert detector.score(images(2)).isfinite().all()
    with pytest.raises(ArchitectureError, match="no linear layer"):
        kedge.Energy(net, shape="ash")


def test_thresholds_are_learned_anew_and_saved(tmp_path):
    net = network(dtype=torch.float64)
    detector = kedge.MSP(net, shape="vra", percentile=[0.3, 0.8]).fit(images(60))
    first = detector.clip.clone()
    assert not detector.fit(images(60, seed=4)).clip.equal(first)
    detector.save(tmp_path / "a.kedge")
    again = kedge.load(tmp_path / "a.kedge")
    assert again.clip.equal(detector.clip)
    assert again.config() == detector.config()
    assert again.score(images(5)).equal(detector.score(images(5)))


def test_activations_that_are_mostly_nothing_need_a_higher_percentile():
    sparse = torch.zeros(100, 1, dtype=torch.float64)
    sparse[:3, 0] = torch.arange(1.0, 4.0).double()
    with pytest.raises(InputError, match=r"percentile must be higher .* share of 0\.95 "):
        kedge.Energy(vector_network([[1.0], [0.0]], [0.0, 0.0]), shape="vra").fit(sparse)
